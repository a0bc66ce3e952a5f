"""``tilth trace export``: which events and metrics come into the file, where it lies, and bad input in one line."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from tilth.analysis.events import load
from tilth.analysis.read import read_events
from tilth.cli.main import app
from tilth.trace import recorder, span
from tilth.trace.clock_samples import Origin, RoundsFile

STEPS = range(1, 5)


@pytest.fixture
def run(tmp_path):
    """A run of four steps on a controller, rank 1, and a worker."""
    folder = tmp_path / "some-run"
    for rank in (0, 1):
        with recorder.to(folder / "events", rank=rank, attempt=2, interval=60):
            for step in STEPS:
                with span("step", step=step) if rank else span("call", step, detail="policy.update", seq=step):
                    pass
    lines = [
        {"step": step, "attempt": 2, "phase": "grpo", "memory/rss": 100.0 * step, "tokens_per_second/train": 7.0,
         "loss": 0.5, "time/step": 1.0, "some/text": "x"} for step in (*STEPS, 9)
    ]  # fmt: skip
    lines.append({"step": 3, "attempt": 1, "phase": "grpo", "loss": 99.0})
    lines.append({**lines[2], "loss": 0.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def call(*arguments):
    return CliRunner().invoke(app, ["trace", "export", *map(str, arguments)])


def events_of(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_by_default_into_the_runs_folder(run):
    result = call(run, "--perfetto")
    assert result.exit_code == 0, result.output
    assert "perfetto.json.gz: 8 spans of 2 ranks, 0 arrows, 3 counters" in result.output
    assert "https://ui.perfetto.dev" in result.output and "clocks were not compared" in result.output
    found = events_of(run / "perfetto.json.gz")
    assert sorted(e["args"]["step"] for e in found if e["ph"] == "X") == sorted([*STEPS] * 2)


def test_counters_stand_where_they_are_true(run, tmp_path):
    assert call(run, "--perfetto", tmp_path / "x.json").exit_code == 0
    found = events_of(tmp_path / "x.json")
    steps = {e["args"]["step"]: e for e in found if e["ph"] == "X" and e["name"] == "step"}
    by_name = {}
    for e in found:
        if e["ph"] == "C":
            by_name.setdefault(e["name"], []).append((e["ts"], e["args"]))
    begins = [steps[s]["ts"] for s in STEPS]
    ends = [steps[s]["ts"] + steps[s]["dur"] for s in STEPS]
    assert [at for at, _ in by_name["tokens_per_second/train"]] == begins
    assert [at for at, _ in by_name["memory/rss"]] == pytest.approx(ends)
    assert [value for _, value in by_name["memory/rss"]] == [{"bytes": 100.0 * s} for s in STEPS]
    assert [value["1"] for _, value in by_name["loss"]] == [0.5, 0.5, 0.25, 0.5]
    assert set(by_name) == {"tokens_per_second/train", "memory/rss", "loss"}


def test_some_steps_and_ranks(run, tmp_path):
    result = call(run, tmp_path / "x.json", "--steps", "2:4", "--ranks", "1", "--json")
    said = json.loads(result.output)
    assert said == {
        "path": str(tmp_path / "x.json"), "spans": 2, "arrows": 0, "counters": 3,
        "bytes": (tmp_path / "x.json").stat().st_size, "ranks": [1], "steps": [2, 3], "clock_error": None,
        "notes": [],
    }  # fmt: skip
    assert json.loads(call(run, "--ranks", "0", "--json").output)["counters"] == 0, "they are the controller's"


def test_how_well_the_clocks_are_known(run):
    moments = load(run).start[[0, -1]].tolist()
    first = int(read_events(run)["start"].to_numpy().min())
    file = RoundsFile(run / "events", 2)
    for clock, told, known in (("", "clocks within 54 us", 54e-6), ("one", "ranks on one clock", 0)):
        file.introduce({rank: Origin(0, clock, "here", rank) for rank in (0, 1)})
        file.add({0: [(first + t - 50_000, first + t, first + t + 50_000) for t in moments]})
        assert told in call(run).output
        assert json.loads(call(run, "--json").output)["clock_error"] == pytest.approx(
            known, abs=4e-7
        )  # drift: the run takes its time
        assert told not in call(run, "--ranks", "0").output


def test_a_folder_of_events_alone(run):
    assert call(run / "events", "--json").exit_code == 0
    assert (run / "events" / "perfetto.json.gz").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "7"], "--ranks '7': rank 7 has no events; these ranks have: 0, 1 (controller)"),
        (["--ranks", "0;1"], "--ranks '0;1' is not of the form 0,1"),
        (["--steps", "20:30"], "has no events of steps 20:30; its steps are 1 to 4"),
        (["--steps", "x"], "steps 'x' are not of the form 20:40"),
        (["/none/x.json"], "cannot write /none/x.json"),
    ],
)
def test_bad_input_is_one_line(run, arguments, told):
    result = call(run, *arguments)
    assert result.exit_code == 2
    assert told in result.output and len(result.output.splitlines()) == 1


def test_no_run_and_an_empty_one(tmp_path):
    assert "no run at" in call(tmp_path / "nothing").output
    (tmp_path / "events").mkdir()
    result = call(tmp_path)
    assert result.exit_code == 2 and "has no events yet" in result.output
