"""The run directory: nothing committed is lost, nothing uncommitted stays, whatever stops the process."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import forked
from tests.errors import raises
from tests.examples import examples
from tilth.config.load import from_dict, load_recipe
from tilth.core import write_queue
from tilth.core.errors import CallTimeout, DataError, RecipeError, StorageError, TilthError, WorkerLost
from tilth.core.lines import Lines, read_lines, replace
from tilth.data import trajectories as trajectories_module
from tilth.runs import directory as directory_module
from tilth.runs import files
from tilth.runs.directory import RunDir, read_metrics, read_state, summarise
from tilth.runs.files import Lock, to_json
from tilth.runs.readers import curve, read_recoveries, read_trajectories, read_warnings, steps_of
from tilth.runs.signals import Interrupted


def recipe(tmp_path, **run):
    return from_dict({"seed": run.pop("seed", 0), "run": {"dir": str(tmp_path / "runs"), **run}})


def rows(step, count=2, **columns):
    ids = [step * 100 + i for i in range(count)]
    return pa.table(
        {
            "step": [step] * count, "id": ids, "tokens": [[1, 2, step]] * count,
            "reward": [1.0] + [None] * (count - 1), "text": [f"answer {i}" for i in ids], **columns,
        }
    )  # fmt: skip


def commit(run, *steps, **metrics):
    for step in steps:
        run.trajectories.add(rows(step))
        run.commit_step({"step": step, "phase": "grpo", "reward/mean": step / 10, **metrics})


# ---- choosing the folder ----


def test_a_new_run_has_everything_and_reads_back(tmp_path):
    r = recipe(tmp_path)
    with RunDir.create(r, "demo") as run:
        run.set_plan({"steps": 10, "memory_peak": 5_000})
        commit(run, 1, 2)
        run.log("hello")
        run.end("finished")
    path = tmp_path / "runs" / "demo-001"
    assert run.path == path and not run.resumed and run.attempt == 1
    assert load_recipe(str(path / "recipe.toml")) == r
    state = read_state(path)
    assert state["state"] == "finished" and state["pid"] == os.getpid() and state["plan"]["steps"] == 10
    assert state["memory"]["predicted"] == 5_000 and state["memory"]["peak"] > 1e6
    assert state["environment"]["cpu"] and state["environment"]["packages"]["numpy"]
    assert state["summary"]["steps"] == 2
    assert [(m["step"], m["attempt"], m["phase"], m["reward/mean"]) for m in read_metrics(path)] == [
        (1, 1, "grpo", 0.1), (2, 1, "grpo", 0.2),
    ]  # fmt: skip
    assert read_trajectories(path)["id"].to_pylist() == [100, 101, 200, 201]
    assert read_trajectories(path, step=2, columns=["id", "reward"]).to_pylist() == [
        {"id": 200, "reward": 1.0}, {"id": 201, "reward": None},
    ]  # fmt: skip
    assert "hello" in (path / "log.txt").read_text()
    assert json.loads((path / "metrics_schema.json").read_text())["reward/mean"]["reduction"] == "mean"


def test_finished_runs_are_followed_by_a_new_number_unfinished_ones_continue(tmp_path):
    r = recipe(tmp_path)
    with RunDir.create(r, "demo") as run:
        run.end("finished")
    with pytest.raises(Interrupted), RunDir.create(r, "demo") as run:
        assert run.path.name == "demo-002" and not run.resumed
        commit(run, 1)
        raise Interrupted("stopped")
    assert read_state(run.path)["state"] == "interrupted"
    with RunDir.create(recipe(tmp_path, seed=1), "demo") as other:  # another recipe does not continue it
        assert other.path.name == "demo-003" and not other.resumed
    with RunDir.create(r, "demo") as again:
        assert again.path == run.path and again.resumed and again.attempt == 2
        assert [a["state"] for a in read_state(again.path)["attempts"]] == ["interrupted", "running"]


@pytest.mark.parametrize("lost", [WorkerLost, CallTimeout])
def test_a_lost_writer_does_not_hide_why_a_run_failed(tmp_path, lost):
    class Gone:
        def flush(self, seconds):
            raise lost("gone", key="role writer")

    with pytest.raises(ZeroDivisionError), RunDir.create(recipe(tmp_path), "demo") as run:
        run.trajectories = Gone()
        _ = 1 / 0
    state = read_state(run.path)
    assert (state["state"], state["error"]) == ("failed", "ZeroDivisionError: division by zero")
    with raises(lost, "role writer"), RunDir.create(recipe(tmp_path), "demo") as run:
        run.trajectories = Gone()
        run.end("finished")
    assert read_state(run.path)["state"] == "failed"


def test_a_failed_run_says_why_and_continues(tmp_path):
    r = recipe(tmp_path)
    with pytest.raises(ZeroDivisionError), RunDir.create(r, "demo") as run:
        _ = 1 / 0
    state = read_state(run.path)
    assert (state["state"], state["error"]) == ("failed", "ZeroDivisionError: division by zero")
    with RunDir.create(r, "demo") as again:
        assert again.resumed and read_state(again.path)["error"] is None


def test_a_named_run(tmp_path):
    r = recipe(tmp_path, name="mine")
    with RunDir.create(r, "demo") as run:
        assert run.path == tmp_path / "runs" / "mine"
    with raises(RecipeError, "run.name"):
        RunDir.create(recipe(tmp_path, name="mine", seed=3), "demo")
    with RunDir.create(r, "demo") as run:
        assert run.resumed
        run.end("finished")
    with raises(RecipeError, "run.name"):
        RunDir.create(r, "demo")


def test_two_processes_do_not_write_one_run(tmp_path):
    r = recipe(tmp_path, name="mine")
    with RunDir.create(r, "demo"):
        with raises(StorageError, "run.lock"):
            RunDir.create(r, "demo")
        with RunDir.create(recipe(tmp_path), "demo") as a, RunDir.create(recipe(tmp_path), "demo") as b:
            assert (a.path.name, b.path.name) == ("demo-001", "demo-002")


def test_a_broken_neighbour_is_passed_over(tmp_path):
    broken = tmp_path / "runs" / "demo-007"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    (tmp_path / "runs" / "demo-x").mkdir()
    with RunDir.create(recipe(tmp_path), "demo") as run:
        assert run.path.name == "demo-008"


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = Lock(tmp_path / "lock")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b".")
        time.sleep(20)
        os._exit(0)
    try:
        os.read(read, 1)
        os.close(lock._fd)  # as if this process had been killed
        Lock._held.discard(lock._fd)
        Lock(tmp_path / "lock").release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


# ---- commit and rewind ----


def test_what_is_not_committed_is_not_written(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        commit(run, 1)
        run.trajectories.add(rows(2))
        run.flush()
        assert steps_of(run.path) == [(1, 1)]
        run.commit_step({"step": 2, "phase": "grpo"})
        run.flush()
        run.flush()
        assert steps_of(run.path) == [(1, 1), (2, 2)]


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 20))
def test_rewind_keeps_exactly_the_steps_up_to_it(tmp_path_factory, sizes, target):
    tmp_path = tmp_path_factory.mktemp("rewind")
    with RunDir.create(recipe(tmp_path), "demo") as run:
        step = 0
        for size in sizes:
            commit(run, *range(step + 1, step + size + 1))
            step += size
            run.flush()
        commit(run, step + 1)  # committed, not flushed
    keep = min(target, step)
    with RunDir.create(recipe(tmp_path), "demo") as run:
        run.rewind(keep)
        assert [m["step"] for m in read_metrics(run.path)] == list(range(1, keep + 1))
        assert sorted(set(read_trajectories(run.path)["step"].to_pylist())) == list(range(1, keep + 1))
        commit(run, keep + 1)
        run.flush()
        assert [m["attempt"] for m in read_metrics(run.path)] == [1] * keep + [2]
        assert len(read_trajectories(run.path)) == 2 * (keep + 1)


def test_run_time_goes_on_where_the_rewound_run_left(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with RunDir.create(recipe(tmp_path), "demo") as run:
        for step in (1, 2, 3):
            clock[0] += 10
            commit(run, step)
    clock[0] += 500
    with RunDir.create(recipe(tmp_path), "demo") as run:
        clock[0] += 7  # loading
        run.rewind(2)
        clock[0] += 3
        commit(run, 3)
        state = read_state(run.path)
    assert [m["seconds"] for m in read_metrics(run.path)] == [10, 20, 23]
    assert (state["attempts"][-1]["from_step"], state["attempts"][-1]["from_seconds"]) == (2, 20)


def test_many_rows_are_written_before_the_flush(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectories_module, "PART_BYTES", 300)
    with RunDir.create(recipe(tmp_path), "demo") as run:
        commit(run, 1, 2, 3, 4)
        assert len(steps_of(run.path)) >= 2


def test_trajectory_columns_are_checked(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        with raises(DataError, "trajectories.rewards"):
            run.trajectories.add(rows(1).append_column("rewards", pa.array([1, 2])))
        with raises(DataError, "trajectories.step"):
            run.trajectories.add(rows(1).drop_columns(["step"]))
        with raises(DataError, "trajectories.version.type"):
            run.trajectories.add(rows(1).append_column("version", pa.array(["x", "y"])))


def test_parts_of_a_reward_survive(tmp_path):
    parts = pa.array([[("right", 1.0), ("short", 0.5)], None], pa.map_(pa.string(), pa.float32()))
    with RunDir.create(recipe(tmp_path), "demo") as run:
        run.trajectories.add(rows(1).append_column("parts", parts))
        run.commit_step({"step": 1, "phase": "grpo"})
        run.flush()
        assert read_trajectories(run.path)["parts"].to_pylist() == [[("right", 1.0), ("short", 0.5)], None]


def test_records_are_strict_json(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        run.commit_step({"step": 1, "phase": "grpo", "loss": float("nan"), "grad_norm": float("inf")})
        line = (run.path / "metrics.jsonl").read_text()
        assert json.loads(line, parse_constant=lambda c: pytest.fail(c))["loss"] is None
        assert curve(read_metrics(run.path), "loss") == []


# ---- kills and full disks ----

CHILD = """
import sys
sys.path.insert(0, "src")
from tests.runs.test_directory import commit, recipe
from pathlib import Path
from tilth.runs.directory import RunDir
with RunDir.create(recipe(Path(sys.argv[1])), "demo") as run:
    step = 0
    while True:
        commit(run, *range(step + 1, step + 6))
        step += 5
        run.flush()
        print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_a_readable_run(tmp_path):
    for seen in (1, 3):
        child = subprocess.Popen([*forked.python(), "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
        try:
            for _ in range(seen):
                done = int(child.stdout.readline())
            path = tmp_path / "runs" / "demo-001"
            assert read_state(path)["state"] == "running"
            assert summarise(path)["steps"] >= 5  # while it goes on
        finally:
            forked.kill(child)
        assert read_state(path)["state"] == "interrupted"
        assert len(read_metrics(path)) >= done
        with pytest.raises(Interrupted), RunDir.create(recipe(tmp_path), "demo") as run:
            assert run.resumed
            run.rewind(done)
            assert len(read_metrics(path)) == done and len(read_trajectories(path)) == 2 * done
            run.rewind(0)
            raise Interrupted("next round")


def test_a_torn_last_line_is_left_out_and_dropped(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        commit(run, 1)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    assert len(read_metrics(run.path)) == 1
    with RunDir.create(recipe(tmp_path), "demo") as run:
        commit(run, 2)
    assert [m["step"] for m in read_metrics(run.path)] == [1, 2]


@pytest.mark.parametrize("tail", [b'\x00\xffgarbage{"step":\n', b"[1]\n[1]\n"])
def test_lines_after_the_last_record_that_are_none_are_dropped_on_resume_and_told(tmp_path, tail):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        commit(run, 1)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    with RunDir.create(recipe(tmp_path), "demo") as run:
        assert f"{len(tail.splitlines())} lines at the end of metrics.jsonl" in run.before
        commit(run, 2)
    assert [m["step"] for m in read_metrics(run.path)] == [1, 2]


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"time": "", "step": "1", "kind": "crash"}', "[" * 100_000])
def test_a_line_of_a_record_beside_the_run_that_cannot_be_read_does_not_hide_the_run(tmp_path, line):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        commit(run, 1)
        run.recover({"step": 1, "kind": "crash", "ranks": [], "evidence": "", "seconds": 0.0})
        for name in ("recoveries.jsonl", "warnings.jsonl"):
            with open(run.path / name, "a") as file:
                file.write(f"{line}\n")
        run.recover({"step": 1, "kind": "hang", "ranks": [], "evidence": "", "seconds": 0.0})
        run.end("finished")
    found = summarise(run.path)
    assert [one["kind"] for one in found["recoveries"]] == ["crash", "hang"]
    text = " ".join(one["text"] for one in found["warnings"])
    assert "line 1 of warnings.jsonl" in text


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with raises(DataError, "metrics.jsonl.2"):
        read_metrics(tmp_path)
    path.write_text('{"step": 1}\n[1]\n')
    with raises(DataError, "metrics.jsonl.2.step"):
        read_metrics(tmp_path)


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_once_and_nothing_is_missing_when_it_has_room_again(tmp_path, monkeypatch):
    said = []
    with RunDir.create(recipe(tmp_path), "demo") as run:
        run.say = said.append
        commit(run, 1)
        assert not run.flush()
        before = read_state(run.path)
        with monkeypatch.context() as m:
            m.setattr(pq, "write_table", full)
            m.setattr(os, "replace", full)
            commit(run, 2)
            run.update(note="x")
            run.update(note="y")
            assert run.flush()["reason"] == os.strerror(errno.ENOSPC)
            commit(run, 3, 4)
            assert len([text for text in said if "run.json" in text]) == 1
            # A newer run.json goes behind lines of metrics that wait, which then are written.
            assert read_state(run.path) == before and [m["step"] for m in read_metrics(run.path)][:2] == [1, 2]
        run.end("finished")
        assert any("can be written again" in text for text in said)
    assert not [p for p in run.path.rglob(".*")]
    assert [m["step"] for m in read_metrics(run.path)] == [1, 2, 3, 4]
    assert read_trajectories(run.path)["step"].to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert read_state(run.path)["note"] == "y" and read_state(run.path)["storage"] == []


def test_a_line_that_does_not_fit_is_taken_back(tmp_path, monkeypatch):
    lines = Lines(tmp_path / "log")
    lines.append("first")

    class Full:
        """A file that takes half a line."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            if len(data) < 5:
                full()
            return self.file.write(data[: len(data) // 2])

        def __getattr__(self, name):
            return getattr(self.file, name)

    lines._file = Full(lines._file)
    with raises(StorageError, "log"):
        lines.append("a longer second line")
    assert (tmp_path / "log").read_text() == "first\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    (tmp_path / "runs").mkdir(mode=0o500)
    with raises(StorageError, "runs"):
        RunDir.create(recipe(tmp_path), "demo")


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    with raises(StorageError, "runs"):
        RunDir.create(recipe(tmp_path), "demo")


def test_a_disk_full_to_the_end_of_its_patience_is_an_error_that_names_what_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_module, "PATIENCE", 0.3)
    with monkeypatch.context() as m, raises(StorageError, "run.json") as caught:
        with RunDir.create(recipe(tmp_path), "demo") as run:
            commit(run, 1)
            assert not run.flush(60.0)  # a slow disk may have more to write
            m.setattr(os, "replace", full)
            run.end("finished")
    assert "Lost are" in str(caught.value) and "run.json (1)" in str(caught.value)
    assert [m["step"] for m in read_metrics(run.path)] == [1]


def test_a_disk_full_to_the_end_still_releases_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_module, "SLOW", 0.1)
    with monkeypatch.context() as m, raises(StorageError, "step-000001"):
        with RunDir.create(recipe(tmp_path), "demo") as run:
            m.setattr(os, "replace", full)
            raise StorageError("no room for the checkpoint", key="step-000001")
    with RunDir.create(recipe(tmp_path, name="other"), "demo"):
        Lock(run.path / "run.lock").release()


# ---- readers ----


def test_a_run_that_is_none(tmp_path):
    with raises(DataError, "run.json"):
        read_state(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with raises(DataError, "run.json.digest"):
        read_state(tmp_path)


def test_states_of_other_processes(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        state = read_state(run.path)
        assert state["state"] == "running"
        for changes, want in (
            ({"pid": 2**22 + 5}, "interrupted"),  # nobody
            ({"pid_started": state["pid_started"] - 100}, "interrupted"),  # the number was given to somebody else
            ({"pid": 2**22 + 5, "host": "elsewhere"}, "running"),  # cannot be known from here
        ):
            replace(run.path / "run.json", json.dumps(state | changes).encode())
            assert read_state(run.path)["state"] == want


@pytest.mark.parametrize(
    "records, start",
    [
        ([{"accuracy/heldout": 0.1}, {}, {"accuracy/heldout": 0.3}], 0.1),
        ([{"accuracy/heldout": 0.1}], 0.1),
        ([{}, {"accuracy/heldout": 0.3}], None),
        ([], None),
        ([{"phase": "warmup", "accuracy/heldout": 0.1}, {}], None),  # after the first step: check_every = 1
        ([{"accuracy/heldout": 0.1}, {"accuracy/heldout": 0.3}], None),  # likewise: eval_every = 1
        ([{"accuracy/heldout": 0.1, "phase_steps": 1}], None),  # likewise: it was the last step too
    ],
)
def test_accuracy_start_is_that_before_the_first_step_or_none(tmp_path, records, start):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        for i, record in enumerate(records, 1):
            run.commit_step({"step": i, "phase": "grpo"} | record)
        assert summarise(run.path)["accuracy_start"] == start
        run.end("finished")


def test_a_reward_that_was_neither_0_nor_1_has_no_accuracy(tmp_path):
    """Not even where the first answers happened to earn nothing; the phase of the critic changes no answer."""
    evaluated = [("warmup", {"accuracy/heldout": 0.0, "reward/heldout": 0.0}), ("values", {"reward/heldout": 0.25}),
                 ("ppo", {"reward/heldout": 0.25}), ("ppo", {"reward/heldout": 0.75})]  # fmt: skip
    with RunDir.create(recipe(tmp_path), "demo") as run:
        for step, (phase, record) in enumerate(evaluated, 1):
            run.commit_step({"step": step, "phase": phase} | record)
        found = summarise(run.path)
        run.end("finished")
    assert [found[f"accuracy_{end}"] for end in ("start", "first", "last", "best")] == [None] * 4
    assert [found[f"reward_heldout_{end}"] for end in ("first", "last", "best")] == [0.0, 0.75, 0.75]
    told = [[p[key] for key in ("phase", "steps", "metric", "first", "last")] for p in found["phases"]]
    assert told == [["warmup", 1, "reward/heldout", None, 0.0], ["ppo", 2, "reward/heldout", 0.0, 0.75]]


def test_summary(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        assert summarise(run.path)["accuracy_first"] is None and summarise(run.path)["steps"] == 0
        phases = ["warmup"] * 2 + ["grpo"] * 3
        accuracy = [0.0, 0.62, None, 0.9, 0.97]
        for i, (phase, a) in enumerate(zip(phases, accuracy), 1):
            record = {
                "step": i,
                "phase": phase,
                "mismatch/max": i * 1e-6,
                "reward/missing": 2,
                "time/generate": float(i),
            }
            record |= {} if a is None else {"accuracy/heldout": a}
            run.commit_step(record | {"tokens_per_second/generate": 100.0 * i, "memory/peak": 10 * i})
        found = summarise(run.path)
        run.end("finished")
    assert (found["accuracy_start"], found["accuracy_first"], found["accuracy_last"]) == (None, 0.62, 0.97)
    told = [[p[key] for key in ("phase", "steps", "metric", "first", "last")] for p in found["phases"]]
    assert told == [["warmup", 2, "accuracy/heldout", None, 0.62], ["grpo", 3, "accuracy/heldout", 0.62, 0.97]]
    assert sum(p["seconds"] for p in found["phases"]) == pytest.approx(read_metrics(run.path)[-1]["seconds"], abs=2e-3)
    assert (
        found["mismatch_max"] == pytest.approx(5e-6) and found["rewards_missing"] == 10 and found["state"] == "running"
    )
    assert found["tokens_per_second_generate"] == pytest.approx(100 * (1 + 4 + 9 + 16 + 25) / 15)
    assert found["tokens_per_second_train"] is None and found["memory_peak"] == 50
    assert 0 < found["seconds"] < 60
    assert json.loads(to_json(found)) == found


def test_lines_of_a_missing_file_are_none(tmp_path):
    assert read_lines(tmp_path / "none") == [] and read_metrics(tmp_path) == []
    assert read_trajectories(tmp_path).num_rows == 0


def test_a_torn_trajectory_file_is_named(tmp_path):
    folder = tmp_path / "trajectories"
    folder.mkdir()
    (folder / "steps-000001-000002.parquet").write_bytes(b"PAR1 torn")
    with raises(DataError, "steps-000001-000002.parquet"):
        read_trajectories(tmp_path)


def test_replace_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace(path, b"old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StorageError):
        replace(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def log_of(run):
    """Lines of the log without their times."""
    return [line.partition(" ")[2] for line in (run.path / "log.txt").read_text().splitlines()]


def test_readers_in_the_process_that_writes_see_what_a_busy_disk_has_still_to_take(tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "PROMPT", 0.0)
    taken = write_queue.WriteQueue._try
    monkeypatch.setattr(write_queue.WriteQueue, "_try", lambda queue, write: (time.sleep(0.02), taken(queue, write))[1])
    with RunDir.create(recipe(tmp_path), "demo") as run:
        assert read_state(run.path)["state"] == "running"
        commit(run, 1)
        assert summarise(run.path)["steps"] == 1
        run.recover({"step": 1, "kind": "crash", "ranks": [], "evidence": "", "seconds": 0.0})
        assert [one["kind"] for one in read_recoveries(run.path)] == ["crash"]
        run.note_finding({"step": 1, "kind": "leak", "evidence": ""})
        assert [one["kind"] for one in read_warnings(run.path)] == ["leak"]
        run.trajectories._queue.put(run.path / "trajectories", run.trajectories._write_committed)
        assert steps_of(run.path) == [(1, 1)]


class OwnFault(TilthError):
    """Raised on purpose."""


@pytest.mark.parametrize(
    "error, state, said",
    [
        (None, "interrupted", ""),
        (KeyboardInterrupt(), "interrupted", ": Ctrl-C"),
        (KeyboardInterrupt("SIGTERM"), "interrupted", ": SIGTERM"),
        (Interrupted("stopped by SIGHUP"), "interrupted", ": stopped by SIGHUP"),
        (OwnFault("no such thing"), "failed", ": OwnFault: no such thing"),
        (ZeroDivisionError("by zero"), "failed", ": ZeroDivisionError: by zero"),
    ],
)
def test_the_log_says_how_each_attempt_ended_and_the_next_one_knows(tmp_path, error, state, said):
    with (
        contextlib.suppress(*([type(error)] if error is not None else [])),
        RunDir.create(recipe(tmp_path), "a") as run,
    ):
        commit(run, 1, 2, 3)
        if error is not None:
            raise error
    assert log_of(run)[-1] == f"attempt 1 {state} after step 3{said}"
    assert any("Traceback" in line for line in log_of(run)) == isinstance(error, ZeroDivisionError)
    with RunDir.create(recipe(tmp_path), "a") as again:
        how = "was interrupted" if state == "interrupted" else "failed"
        assert run.before == "" and again.before == f"attempt 1 {how} after step 3{said}"
        again.rewind(2)
        again.end("finished")
    assert log_of(again)[-1] == "attempt 2 finished after step 2"


@pytest.mark.parametrize(
    "changes, cause",
    [({}, "out of memory"), ({"host": "elsewhere"}, "elsewhere"), ({"pid_started": 0.0}, "rebooted")],
)
def test_an_attempt_that_ended_without_a_word(tmp_path, changes, cause):
    with subprocess.Popen([*forked.python(), "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        forked.kill(child)
    path = tmp_path / "runs" / "demo-001"
    state = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(state | changes))
    last = read_metrics(path)[-1]["step"]
    with RunDir.create(recipe(tmp_path), "demo") as run:
        assert run.before.startswith(f"attempt 1 ended without a word after step {last} (") and cause in run.before
        first, second = read_state(path)["attempts"]
        assert first["why"] == run.before and "why" not in second


def test_a_file_of_a_run_that_is_a_link_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "run.json").symlink_to(tmp_path / "target")
    replace(tmp_path / "run.json", b"new")
    assert ((tmp_path / "target").read_text(), (tmp_path / "run.json").read_text()) == ("old", "new")
