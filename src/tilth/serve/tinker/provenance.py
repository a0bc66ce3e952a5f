"""Provenance of tokens to train on, checked against the samples that this server gave."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.serve.tinker.losses import TOKENS
from tilth.serve.tinker.wire import Datum, ProvenanceRun


class SampleRecord(NamedTuple):
    """One sampled sequence: its prompt and tokens, int64, and log-probs of the tokens, float32."""

    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray


Find = Callable[[str], SampleRecord]


def check_provenance(data: Sequence[Datum], find: Find) -> None:
    """Raise DataError unless every datum names samples that have its tokens and log-probs, and has advantages of
    sampled tokens alone. find: returns the sample of a ``sequence_id``, or raises DataError."""
    for i, datum in enumerate(data):
        where = f"data[{i}]"
        for name, run, part in _tiled(f"{where}.model_input_spans", datum.inputs, len(datum.tokens)):
            source = find(run.sequence)
            _check_equal(name, run, source.tokens if run.sampled else source.prompt, datum.tokens[part])
        for name, run, part in _tiled(f"{where}.loss_fn_input_spans", datum.targets, len(datum.tokens)):
            if not run.sampled:
                if datum.columns["advantages"][part].any():
                    message = f"{where}.loss_fn_inputs.advantages has values at tokens that no model sampled"
                    raise DataError(f"{message}; make them 0", key=f"{where}.loss_fn_inputs.advantages.sampled")
                continue
            source = find(run.sequence)
            _check_equal(name, run, source.tokens, datum.columns[TOKENS][part])
            _check_equal(f"{where}.loss_fn_inputs.logprobs", run, source.logprobs, datum.columns["logprobs"][part])


def _tiled(where: str, runs: Sequence[ProvenanceRun], size: int) -> list[tuple[str, ProvenanceRun, slice]]:
    """Return runs with their names and places. DataError: they do not tile the tokens."""
    lengths = [run.length for run in runs]
    if sum(lengths) != size or min([0, *lengths, *(run.offset for run in runs)]) < 0:
        message = f"{where} covers {sum(lengths)} of {size} tokens; name the sample behind each (Datum.with_provenance)"
        raise DataError(message, key=f"{where}.length")
    ends = np.cumsum(lengths).tolist()
    return [(f"{where}[{j}]", run, slice(end - run.length, end)) for j, (run, end) in enumerate(zip(runs, ends))]


def _check_equal(where: str, run: ProvenanceRun, source: np.ndarray, given: np.ndarray) -> None:
    recorded = source[run.offset : run.offset + run.length]
    if not np.array_equal(recorded, given):
        kind = "tokens" if run.sampled else "prompt"
        message = f"{where}: {run.length} values from {run.offset} on are not those of the {kind} of {run.sequence}"
        raise DataError(f"{message}; give what the sampler returned", key=where)
