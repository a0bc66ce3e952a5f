"""Provenance of data, beside samples that a server gave."""

from dataclasses import replace

import numpy as np
import pytest

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.serve.tinker.losses import SampleRecord, check_provenance
from tilth.serve.tinker.wire import Datum, ProvenanceRun

SAMPLES = {
    "a": SampleRecord(np.array([1, 2, 3]), np.array([4, 5]), np.float32([-0.4, -0.5])),
    "b": SampleRecord(np.array([1, 2, 3, 4, 5, 6]), np.array([7, 8]), np.float32([-0.7, -0.8])),
}
"""Two turns: the second prompt is the first one with its sample, and one token more."""


def find(name):
    if name not in SAMPLES:
        raise DataError("none", key="sequence_id.missing")
    return SAMPLES[name]


def run(sampled, name, offset, length):
    return ProvenanceRun(sampled, name, offset, length)


def datum(**changes):
    """Both turns as one sequence; targets of prompts are 0, as recipes write them."""
    columns = {
        "target_tokens": np.array([0, 0, 4, 5, 0, 7, 8]),
        "logprobs": np.float32([0, 0, -0.4, -0.5, 0, -0.7, -0.8]),
        "advantages": np.float32([0, 0, 1, 1, 0, -1, -1]),
    }
    columns = {name: changes.pop(name, values) for name, values in columns.items()}
    inputs = [run(False, "a", 0, 3), run(True, "a", 0, 2), run(False, "b", 5, 1), run(True, "b", 0, 1)]
    targets = [run(False, "a", 1, 2), run(True, "a", 0, 2), run(False, "b", 5, 1), run(True, "b", 0, 2)]
    made = Datum(np.array([1, 2, 3, 4, 5, 6, 7]), columns, inputs, targets)
    return replace(made, **changes)


def test_tokens_of_several_samples_pass_and_their_places_are_known():
    check_provenance([datum()], find)
    assert datum().sampled.tolist() == [False, False, True, True, False, True, True]


INPUTS, TARGETS = datum().inputs, datum().targets


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"inputs": []}, "data[0].model_input_spans.length"),
        ({"targets": TARGETS[:-1]}, "data[0].loss_fn_input_spans.length"),
        ({"inputs": [run(False, "a", 0, 8), run(False, "a", 0, -1)]}, "data[0].model_input_spans.length"),
        ({"inputs": [run(False, "a", -1, 3), *INPUTS[1:]]}, "data[0].model_input_spans.length"),
        ({"inputs": [run(False, "c", 0, 3), *INPUTS[1:]]}, "sequence_id.missing"),
        ({"inputs": [run(False, "a", 0, 3), run(True, "b", 0, 2), *INPUTS[2:]]}, "data[0].model_input_spans[1]"),
        ({"inputs": [run(False, "a", 1, 3), *INPUTS[1:]]}, "data[0].model_input_spans[0]"),
        ({"tokens": np.array([1, 2, 3, 4, 5, 6, 8])}, "data[0].model_input_spans[3]"),
        ({"target_tokens": np.array([0, 0, 4, 6, 0, 7, 8])}, "data[0].loss_fn_input_spans[1]"),
        ({"logprobs": np.zeros(7, np.float32)}, "data[0].loss_fn_inputs.logprobs"),
        ({"advantages": np.ones(7, np.float32)}, "data[0].loss_fn_inputs.advantages.sampled"),
    ],
)
def test_what_no_sampler_gave_is_refused_by_its_place(changes, key):
    with raises(DataError, key):
        check_provenance([datum(**changes)], find)
