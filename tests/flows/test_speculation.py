"""A run with drafts is the run without them, and counts what they saved."""

import pytest

from tests.flows import tiny
from tilth.flows.measured import measure_drafts
from tilth.runs.metrics import Metrics


def test_a_run_with_drafts_has_the_bits_of_one_without(tmp_path):
    made = {
        how: tiny.run(
            tiny.recipe(
                tmp_path,
                train={"parity": True},
                supervised={"steps": 2},
                algorithm={"steps": 3},
                model={"context": 32},
                rollout={"speculate": how, "max_tokens": 20, "temperature": 0.3},
            ),
            name=how,
        ).directory
        for how in ("off", "suffix")
    }
    assert tiny.weights(made["off"]) == tiny.weights(made["suffix"])
    plain, drafted = tiny.numbers(made["off"]), tiny.numbers(made["suffix"])
    own = [{name: record.pop(name) for name in [*record] if name.startswith("draft/")} for record in drafted]
    assert plain == drafted
    assert any(0 < record.get("draft/acceptance", 0) <= 1 for record in own)
    assert sum(0 < record.get("draft/passes", 1) < 1 for record in own) > 1


def test_drafts_are_summed_over_engines():
    metrics = Metrics()
    measure_drafts(metrics, [(10, 8, 4), (0, 0, 0), (10, 2, 1)])
    found = metrics.values()
    assert found["draft/acceptance"] == pytest.approx(0.5) and found["draft/passes"] == pytest.approx(0.75)
    measure_drafts(empty := Metrics(), [(0, 0, 0)])
    measure_drafts(empty, [])
    assert not empty.values()
