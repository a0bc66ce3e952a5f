"""``tilth top``: what it says is what is on disk, now and after more was written; nothing is read twice; bad input."""

import dataclasses
import io
import json
import os
import re
import threading

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from tests.analysis.tree import s, two_workers
from tests.cli.test_trace_run import keep, make
from tests.examples import examples
from tests.ui.fake import fake_run
from tilth.cli.main import app
from tilth.cli.top import _follow, _lines
from tilth.config.load import load_recipe
from tilth.core.lines import replace
from tilth.runs.directory import RunDir
from tilth.ui import top as ui
from tilth.ui.top import KeptFiles, RunWatcher, Tail, as_dict, drawn, last_line

RECORD = {"phase": "grpo", "phase_steps": 250, "reward/mean": 0.5, "loss": 0.25, "time/step": 2.0, "memory/peak": 4e8}


def call(*arguments):
    return CliRunner().invoke(app, ["top", *map(str, arguments)])


def shown(look, width=100):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    console.print(drawn(look, width))
    return console.export_text()


@pytest.fixture
def directory(tmp_path):
    with RunDir.create(load_recipe("addition-grpo", [f"run.dir={tmp_path}"]), "addition-grpo") as made:
        yield made


@pytest.mark.parametrize("away, state", [(0.0, "restarting"), (100.0, "interrupted")])
def test_between_two_controllers_a_run_goes_on(directory, away, state):
    """A controller that has ended, under a supervisor that lives or does not."""
    me = psutil.Process()
    owner = {"pid": me.pid, "started": me.create_time() - away}
    on_disk = json.loads((directory.path / "run.json").read_text())
    replace(directory.path / "run.json", json.dumps({**on_disk, "pid": 2**22 + 5, "supervisor": owner}).encode())
    look = RunWatcher(directory.path).look()
    assert look.running == (state == "restarting") and state in shown(look)


def test_a_look_follows_the_run(directory):
    watch = RunWatcher(directory.path)
    look = watch.look()
    assert look.running and look.recent is None and look.silent is None and look.progress.record == {}
    assert "running" in shown(look)
    directory.commit_step({"step": 1, "phase_step": 1, **RECORD})
    directory.log("first words")
    look = watch.look()
    assert look.progress.done == 1 and look.message == "first words" and look.silent is not None
    keep(directory.events, *two_workers())
    directory.commit_step({"step": 2, "phase_step": 2, **RECORD, "loss": 0.125})
    look = watch.look()
    assert look.progress.record["loss"] == 0.125 and look.recent.steps.tolist() == [1, 2]
    text = shown(look)
    assert "step 2 of 250" in text and "rank 1" in text and "steps 1 to 2" in text and "first words" in text
    directory.end("finished")
    assert not watch.look().running


def test_the_first_step_shows_how_far_it_is(directory):
    now = {"phase": "warmup", "step": 1, "steps": 85, "what": "generating", "done": 31, "of": 64, "since": 1.0}
    (directory.path / "progress.json").write_text(json.dumps(now))
    look = RunWatcher(directory.path).look()
    assert "generating 31 of 64" in shown(look) and "step 0 of 85" in shown(look)
    assert json.loads(call(directory.path, "--json").stdout)["doing"] == now
    directory.end("finished")
    assert "generating" not in shown(RunWatcher(directory.path).look())


def test_json_is_what_is_on_disk(directory):
    directory.update(memory={"predicted": 5e8})
    directory.commit_step({"step": 1, "phase_step": 1, **RECORD, "tokens_per_second/train": 70.0, "time/update": 1.5})
    keep(directory.events, *two_workers())
    found = json.loads(call(directory.path, "--json").stdout)
    assert found["state"] == "running" and (found["step"], found["phase_step"], found["phase_steps"]) == (1, 1, 250)
    assert (found["loss"], found["reward"], found["accuracy"], found["reward_heldout"]) == (0.25, 0.5, None, None)
    assert found["tokens_per_second"] == {"generate": None, "train": 70.0} and found["time"]["update"] == 1.5
    assert found["memory"] == {"now": None, "peak": 4e8, "predicted": 5e8}
    assert found["left"] == pytest.approx(249 * 2.0) and found["recent"]["last"] == 2
    for rank in found["recent"]["ranks"]:
        assert sum(v for k, v in rank.items() if k != "rank") == pytest.approx(1)
    assert found["recent"]["ranks"][1]["busy"] == pytest.approx(95 / 180)
    assert sum(found["recent"]["parts"].values()) == pytest.approx(1)


def test_unchanged_files_are_not_read_again(directory, monkeypatch):
    keep(directory.events, *two_workers())
    watch, read = RunWatcher(directory.path), []
    monkeypatch.setattr(ui, "recent", lambda folder: read.append(folder) or (None, range(0)))
    watch.look(), watch.look()
    assert len(read) == 1
    keep(directory.events, *two_workers(), part=2)
    watch.look()
    assert len(read) == 2


def test_what_a_file_says_is_kept_until_it_is_written_replaced_or_removed(tmp_path):
    file, read, kept = tmp_path / "log.txt", [], KeptFiles(tmp_path)

    def look():
        return kept.of("log.txt", lambda run: read.append(1) or (file.read_text() if file.exists() else ""))

    assert look() == look() == "" and len(read) == 1
    file.write_text("one")
    assert look() == look() == "one" and len(read) == 2
    with open(file, "a") as opened:
        opened.write("two")
    assert look() == "onetwo"
    times = file.stat()
    (tmp_path / "new").write_text("eight!")
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").rename(file)  # as long, and as old
    assert look() == "eight!"
    file.unlink()
    assert look() == "" and len(read) == 5


def test_a_look_sees_what_was_replaced_and_an_ended_process(directory, monkeypatch):
    watch = RunWatcher(directory.path)
    directory.log("first words")
    assert watch.look().message == "first words" and watch.look().running
    directory.log("other words")
    made = {"time": "2026-01-01T00:00:00+00:00", "step": 1, "kind": "slow", "evidence": "x"}
    replace(directory.path / "warnings.jsonl", json.dumps(made).encode() + b"\n")
    look = watch.look()
    assert look.message == "other words" and look.warnings == [made]
    monkeypatch.setattr("tilth.runs.readers._lives", lambda pid, started: False)
    assert watch.look().state["state"] == "interrupted"  # nothing was written
    monkeypatch.undo()
    assert watch.look().state["state"] == "running"


def test_a_torn_file_of_events_is_no_end(directory):
    (directory.events / "attempt-1-rank-0-000001.parquet").write_bytes(b"PAR1")
    assert RunWatcher(directory.path).look().recent is None


def test_of_a_long_run_only_the_end_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in range(100_000)))
    tail = Tail(path, reach=1000)
    records, again = tail.new()
    assert again and records[-1]["step"] == 99_999 and 1 < len(records) < 100
    assert [r["step"] for r in records] == list(range(records[0]["step"], 100_000))
    assert tail.new() == ([], False)


@pytest.mark.parametrize("steps", [(5, 6), (5, 6, 7)])
def test_a_file_that_was_written_anew_in_its_place_voids_what_was_read(tmp_path, steps):
    """As one in the inode of a run that was removed."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = Tail(path)
    tail.new()
    path.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    assert tail.new() == ([{"step": step} for step in steps], True)


def test_a_run_that_was_set_back_begins_anew(directory):
    for step in (1, 2, 3):
        directory.commit_step({"step": step, "phase_step": step, **RECORD})
    watch = RunWatcher(directory.path)
    assert watch.look().progress.record["step"] == 3
    directory.rewind(1)
    look = watch.look()
    assert look.progress.record["step"] == 1 and look.progress.series["loss"].values == [0.25]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=12), st.lists(st.integers(1, 40), max_size=12))
def test_a_file_that_grows_by_any_bytes_is_read_once(tmp_path_factory, numbers, cuts):
    path = tmp_path_factory.mktemp("tail") / "lines"
    text = "".join(json.dumps({"step": n}) + "\n" for n in numbers).encode()
    tail, found, at = Tail(path), [], 0
    assert tail.new() == ([], False)
    with open(path, "wb", buffering=0) as file:
        for cut in [*cuts, len(text)]:
            file.write(text[at : at + cut])
            at += cut
            found += tail.new()[0]
    assert [r["step"] for r in found] == numbers


def test_last_line(tmp_path):
    assert last_line(tmp_path / "none") == ""
    (tmp_path / "log").write_text("2026-01-01T00:00:00Z a\n" * 1000 + "2026-01-01T00:00:01Z the last one\n")
    assert last_line(tmp_path / "log") == "the last one"


def test_silence_is_told(directory):
    directory.commit_step({"step": 1, "phase_step": 1, **RECORD})
    os.utime(directory.path / "metrics.jsonl", (0, 0))
    assert "no step for" in shown(RunWatcher(directory.path).look())


@pytest.mark.parametrize("width", [40, 80, 110])
def test_it_fits_any_width_and_marks_are_whole(directory, width):
    keep(directory.events, *two_workers())
    directory.commit_step({"step": 1, "phase_step": 1, **RECORD})
    lines = shown(RunWatcher(directory.path).look(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line.rstrip().endswith("■")]


def test_the_rank_of_a_line_stays_whole_where_its_state_is_long(directory):
    row = {"rank": 11, "state": "stopped", "call": "rollout.generate", "operation": "forward of micro-batch 17",
           "heartbeat_age": 1234.5, "progress_age": 4000.0, "memory": 4e8, "cores": 0.5}  # fmt: skip
    look = dataclasses.replace(RunWatcher(directory.path).look(), workers=[row, row | {"rank": 2}])
    assert {"rank 11", "rank 2 "} <= {line[:7] for line in shown(look, 60).splitlines()}


def test_hostile_text_stays_text(directory):
    directory.log("[bold]not markup[/bold] [/nothing]")
    assert "[bold]not markup[/bold] [/nothing]" in shown(RunWatcher(directory.path).look())


def test_many_ranks(tmp_path):
    calls = [s("call", 0, 10 + r, rank=r, step=1, seq=r) for r in range(40)]
    run = make(tmp_path, s("step", 0, 60, rank=40, step=1), *calls, records=[{"step": 1}])
    look = RunWatcher(run).look()
    assert "and 24 more" in shown(look) and len(as_dict(look)["recent"]["ranks"]) == 40
    assert look.recent.shares(0)["waiting"] == pytest.approx(50 / 60)


def test_an_ended_run_is_shown_once(tmp_path):
    run = fake_run(tmp_path, warmup=5, steps=30)
    result = call(run)
    assert result.exit_code == 0 and "finished" in result.stdout and "step 30 of 400" in result.stdout
    assert "held-out accuracy" in result.stdout and "rank 0" not in result.stdout
    assert call(run, "--once").stdout == result.stdout


def test_without_a_terminal_a_line_and_the_end(directory):
    directory.commit_step({"step": 1, "phase_step": 1, **RECORD})
    watch, console = RunWatcher(directory.path), Console(width=200, record=True, file=open(os.devnull, "w"))
    following = threading.Thread(target=_lines, args=(watch, watch.look(), console, 0.01))
    following.start()
    directory.commit_step({"step": 2, "phase_step": 2, **RECORD})
    directory.end("finished")
    following.join(timeout=60)
    lines = console.export_text().splitlines()
    assert lines[0].startswith("GRPO 1/250") and lines[-2].startswith("GRPO 2/250")
    assert lines[-1] == f"{directory.path.name}: finished"


def test_in_a_terminal_the_last_picture_stays(directory):
    directory.commit_step({"step": 1, "phase_step": 1, **RECORD})
    screen = io.StringIO()
    watch, console = RunWatcher(directory.path), Console(width=90, force_terminal=True, file=screen)
    following = threading.Thread(target=_follow, args=(watch, watch.look(), console, 0.01))
    following.start()
    directory.commit_step({"step": 2, "phase_step": 2, **RECORD})
    directory.end("finished")
    following.join(timeout=60)
    assert not following.is_alive()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).rpartition(directory.path.name)[2]
    assert "finished" in last and "step 2 of 250" in last


def test_bad_runs(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "no", "no run at"), (tmp_path / "empty", "is not a run: it has no run.json")):
        result = call(path)
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert call(tmp_path, "--every", "0").exit_code == 2
