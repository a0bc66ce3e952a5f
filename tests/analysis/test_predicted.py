"""Predicted costs stand beside the measured ones, micro-batch by micro-batch."""

import json

import pytest

from tests.analysis.test_costs import table
from tests.launch.laws import costs_of
from tests.runs.test_costs import CostFit
from tilth.analysis.perfetto import export
from tilth.analysis.predicted import predicted

LAW = (2e-6, 3e-9, 1e-3)
FITS = [CostFit(1, "a profile", costs_of(1e-6)), CostFit(3, "this run", costs_of(*LAW))]


def updates(steps=4, factor=1.0):
    """Two updates a step of one rank, each of two micro-batches: the law's seconds, a third of them forward."""
    rows, clock = [], 0
    for step in range(1, steps + 1):
        for call in (0, 1):
            parent = 1000 * step + 100 * call
            begun = clock
            for micro, tokens in ((0, 800), (1, 300 + call)):
                seconds = factor * (LAW[0] * tokens + LAW[1] * 9 * tokens + LAW[2])
                for op, share in (("forward", 1 / 3), ("backward", 2 / 3)):
                    took = round(1e9 * seconds * share)
                    rows.append({"op": op, "id": parent + 10 * micro + (op == "backward") + 1, "parent": parent,
                                 "start": clock, "duration": took, "step": step, "micro_batch": micro,
                                 "tokens": tokens, "squares": 9 * tokens})  # fmt: skip
                    clock += took
            rows.append({"op": "update", "id": parent, "start": begun, "duration": clock - begun, "step": step})
            clock += 10**6
    return table(rows)


def test_each_micro_batch_has_the_prediction_of_its_step():
    found = predicted(updates(factor=1.25), FITS)
    assert len(found.row) == 16
    early, late = found.row[:8], slice(8, None)
    assert found.seconds[:8] == pytest.approx([800e-6, 300e-6, 800e-6, 301e-6] * 2) and (early >= 0).all()
    assert found.measured[late] == pytest.approx(1.25 * found.seconds[late], rel=1e-4)
    whole = found.summary()
    assert whole["micro_batches"] == 16 and whole["measured"] == pytest.approx(found.measured.sum())


def test_the_error_is_that_of_the_median_micro_batch():
    assert predicted(updates(factor=1.25), FITS[1:]).summary()["error"] == pytest.approx(0.2, rel=1e-3)
    assert predicted(updates(), FITS[1:]).summary()["p90"] < 1e-3


def test_nothing_is_said_without_costs_or_passes():
    assert predicted(updates(), []) is None
    assert predicted(table([{"op": "update", "duration": 5}]), FITS) is None


def test_the_picture_shows_both(tmp_path):
    events = updates()
    found = predicted(events, FITS)
    export(events, tmp_path / "p.json", costs=found)
    spans = [e for e in json.loads((tmp_path / "p.json").read_text())["traceEvents"] if e["ph"] == "X"]
    shown = [e["args"] for e in spans if "predicted_ms" in e["args"]]
    assert len(shown) == 16 and all(e["name"] == "forward" for e in spans if "predicted_ms" in e["args"])
    assert [a["predicted_ms"] for a in shown] == pytest.approx(1e3 * found.seconds, rel=1e-5)
    assert [a["measured_ms"] for a in shown] == pytest.approx(1e3 * found.measured, rel=1e-5)
