"""Files of a run that somebody else may have written: what is no JSON that can be read is one named error."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from tilth.config.load import load_recipe
from tilth.core.errors import DataError
from tilth.data.cache import CacheEntry
from tilth.plan.costs import load_costs
from tilth.rl.passk import wilson
from tilth.runs.directory import RunDir
from tilth.runs.model_refs import MARK, original
from tilth.runs.readers import ettr, ettr_curve, handovers, planned_steps, read_metrics, read_state, unpaired_change
from tilth.trace.clock_samples import read_rounds, rounds_path

ODD = ["[" * 100_000, "9" * 5000, "{", "[]", '{"rank": 0, "rounds": [[9223372036854775808, 0, 0]]}']


@pytest.mark.parametrize("text", ODD)
def test_what_is_no_file_of_a_run(tmp_path, text):
    for file, read in [("run.json", read_state), ("metrics.jsonl", read_metrics)]:
        (tmp_path / file).write_text(f"{text}\n")
        with pytest.raises(DataError) as caught:
            read(tmp_path)
        assert caught.value.key.startswith(file)
    (tmp_path / MARK).write_text(text)
    assert original(tmp_path, str(tmp_path)) is None
    (tmp_path / "about.json").write_text(text)
    (tmp_path / "pieces.arrow").touch()
    assert CacheEntry(tmp_path, "pieces.arrow").damage()


@pytest.mark.parametrize("text", ODD)
def test_what_are_no_costs_and_no_rounds_of_clocks(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(DataError) as caught:
        load_costs(tmp_path / "costs.json")
    assert caught.value.key.startswith("costs.json")
    rounds = rounds_path(tmp_path, 0)
    rounds.parent.mkdir(exist_ok=True)
    rounds.write_text(f"{text}\n{text}\n")
    with pytest.raises(DataError) as caught:
        read_rounds(tmp_path, 0)
    assert caught.value.key.startswith(rounds.name)


def test_the_effective_time_counts_what_failures_cost_within_the_window():
    began = datetime(2026, 1, 1, tzinfo=UTC)

    def at(seconds):
        return (began + timedelta(seconds=seconds)).isoformat()

    state = {"attempts": [{"started": at(0), "ended": at(3000)}, {"started": at(3000), "ended": None}]}
    recoveries = [{"time": at(3000), "lost": 80.0, "seconds": 20.0}, {"time": at(9000), "lost": 30.0, "seconds": 6.0}]
    now = began + timedelta(seconds=10_000)
    assert ettr(state, recoveries, now) == pytest.approx(1 - 136 / 10_000)
    assert ettr(state, recoveries, now, 3600.0) == pytest.approx(1 - 36 / 3600)
    assert ettr(state, [], now) == 1.0
    assert ettr({"attempts": []}, [], now) is None
    paused = {"attempts": [{"started": at(0), "ended": at(100)}, {"started": at(5000), "ended": None}]}
    assert ettr(paused, recoveries[1:], now) == pytest.approx(1 - 36 / 5100)
    left, after = paused["attempts"][0] | {"state": "left"}, paused["attempts"][1]
    for more, cost in (({}, 4900), ({"resumed": at(5300), "from_step": 9}, 5200)):  # another controller goes on
        assert ettr({"attempts": [left, after | more]}, [], now) == pytest.approx(1 - cost / 10_000)
    assert ettr({"attempts": [left, after | more]}, [], now, 3600.0) == 1.0
    assert handovers({"attempts": [left, after | more]}) == [
        {"time": at(5300), "step": 9, "lost": 0.0, "seconds": 5200.0}
    ]


def test_an_unpaired_change_is_that_of_newcombe():
    before, after = wilson(48, 80), wilson(56, 70)  # Newcombe 1998, table II a: 56/70 - 48/80
    assert unpaired_change(before, after) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_a_summary_with_two_evaluated_phases_needs_no_torch(tmp_path):
    """Its import would be most of the time of a page, and of a command."""
    ends = {"accuracy/heldout": 0.5, "reward/heldout": 0.5, "reward/heldout/low": 0.4, "reward/heldout/high": 0.6}
    with RunDir.create(load_recipe("addition-grpo", [f"run.dir={tmp_path}"]), "phases") as run:
        for step, phase in ((1, "warmup"), (2, "grpo")):
            run.commit_step({"step": step, "phase": phase, **ends})
        run.end("finished")
    code = "import sys; from tilth.runs.readers import summarise; p = summarise(sys.argv[1])['phases'][1]['change']"
    subprocess.run([sys.executable, "-c", f"{code}; assert p and 'torch' not in sys.modules", run.path], check=True)


@pytest.mark.parametrize(
    ("last", "count"),
    [
        ({}, 330),
        ({"step": 7}, 330),  # of an earlier version
        ({"phase": "warmup", "step": 7, "phase_step": 7, "phase_steps": 200}, 330),
        ({"phase": "values", "step": 95, "phase_step": 5, "phase_steps": 30}, 220),  # the warm-up took 90
        ({"phase": "ppo", "step": 130, "phase_step": 10, "phase_steps": 100}, 220),
        ({"phase": "ppo", "step": 220, "phase_step": 100, "phase_steps": 100}, 220),
    ],
)
def test_the_last_step_of_a_run_follows_from_phases_as_they_took_and_are_planned(last, count):
    state = {"plan": {"supervised_steps": 200, "value_steps": 30, "steps": 100}}
    assert planned_steps(state, last) == count
    assert planned_steps({}, {}) is None
    stopped = {"phase": "ppo", "step": 130, "phase_step": 10, "phase_steps": 100}
    assert planned_steps(state | {"state": "finished"}, stopped) == 130  # by run.stop
    assert planned_steps({}, {"phase": "sft", "step": 3, "phase_step": 3, "phase_steps": 9}) == 9


def test_the_curve_of_effective_time_forgets_after_an_hour_what_the_whole_run_does_not():
    records = [{"step": step, "seconds": 1000.0 * step} for step in range(1, 8)]
    recoveries = [{"step": 2, "lost": 80.0, "seconds": 20.0}, {"step": 2, "lost": 0.0, "seconds": 100.0}]
    found = ettr_curve(records, recoveries)
    assert [one["ettr/whole"] for one in found] == pytest.approx(
        [1, 1, *(1 - 200 / (1000 * s + 200) for s in range(3, 8))]
    )
    assert [one["ettr/hour"] for one in found] == pytest.approx(
        [1, 1, 1 - 200 / 3200, 1 - 200 / 3600, 1 - 200 / 3600, 1 - 200 / 3600, 1]
    )
    assert ettr_curve(records, []) == records
