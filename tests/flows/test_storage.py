"""A run whose disk fails for some steps goes on, and leaves the files of an undisturbed run."""

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tests.flows import storage, tiny
from tests.launch.test_survive import assert_same_run, recoveries
from tilth.checkpoint import complete, latest, open_checkpoint
from tilth.checkpoint.directory import step_of
from tilth.cluster.backends import session_dir
from tilth.core import write_queue
from tilth.core.errors import StorageError
from tilth.data.trajectories import TrajectoryFiles
from tilth.flows import run as run_module
from tilth.flows.run import Run
from tilth.runs import directory as directory_module
from tilth.runs.readers import read_metrics, read_state, summarise

SECTIONS = {"run": {"save_every": 4, "keep": 9}, "algorithm": {"steps": 8}}
REAL = {"full": storage.Full, "vanished": storage.Vanished}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny.run(tiny.recipe(tmp_path_factory.mktemp("plain"), **SECTIONS))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(write_queue, "LATEST", 0.05)


def check(ours, plain, seen, fault):
    """Equal numbers, weights, trajectories; every line once; the trouble told with its reason, and its end."""
    assert_same_run(ours, plain)
    assert [r["step"] for r in read_metrics(ours.directory)] == list(range(1, 15))
    state, other = read_state(ours.directory), read_state(plain.directory)
    assert state["state"] == "finished" and state["storage"] == [] and state["best"] == other["best"]
    assert state["saved"] == other["saved"] == step_of(latest(ours.directory / "checkpoints"))
    assert len(state["attempts"]) == 1
    for path in complete(ours.directory / "checkpoints"):
        open_checkpoint(path).verify()
    log = (ours.directory / "log.txt").read_text()
    told = [text for text in seen.messages if text.startswith("cannot write")]
    assert told and os.strerror(fault.number) in told[0] and told[0] in log
    assert len(told) == len([text for text in seen.messages if "nothing is missing" in text]) <= 2
    assert not [text for text in log.splitlines() if "\0" in text]


@pytest.mark.parametrize("kind", ["full", pytest.param("vanished", marks=pytest.mark.slow)])
def test_a_disk_that_fails_while_a_checkpoint_is_due_changes_no_bit(tmp_path, plain, kind):
    with storage.mounted(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("mounts are not permitted here")
        fault = REAL[kind](disk)
        seen = storage.Trouble(fault, 7, 10)
        try:
            ours = tiny.run(tiny.recipe(disk / "runs", **SECTIONS), callbacks=[seen])
            check(ours, plain, seen, fault)
            summarise(ours.directory)
        finally:
            seen.stop()


@pytest.mark.slow
def test_shared_memory_that_is_full_for_some_seconds_changes_no_bit(tmp_path, plain, monkeypatch):
    short = Path(tempfile.mkdtemp())  # a socket's name has few bytes
    with storage.mounted(short / "shm", megabytes=16) as memory:
        if memory is None:
            pytest.skip("mounts are not permitted here")
        monkeypatch.setattr(session_dir, "SHARED_MEMORY", memory)
        monkeypatch.setattr(session_dir, "ROOM", 0)
        seen = storage.Trouble(storage.Full(memory), 7, 99)
        seen.until = "the step is run again"
        ours = tiny.run(tiny.recipe(tmp_path, **SECTIONS, cluster={"backend": "local"}), callbacks=[seen])
    assert_same_run(ours, plain)
    told = [text for text in seen.messages if "No space left" in text and "storage" in text]
    assert len(told) == 1 and str(memory) in told[0]
    assert len([text for text in seen.messages if text.startswith("there is room again")]) == 1
    assert {one["kind"] for one in recoveries(ours.directory)} == {"storage"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EROFS])
def test_a_layer_that_fails_changes_no_bit(tmp_path, plain, number):
    fault = storage.Layer(tmp_path, number)
    seen = storage.Trouble(fault, 7, 10)
    try:
        check(tiny.run(tiny.recipe(tmp_path, **SECTIONS), callbacks=[seen]), plain, seen, fault)
    finally:
        seen.stop()


@pytest.mark.slow
def test_a_disk_that_fails_until_patience_ends_is_an_error_that_names_what_is_lost(tmp_path, plain, monkeypatch):
    for module in (directory_module, run_module):
        monkeypatch.setattr(module, "PATIENCE", 0.3)
    monkeypatch.setattr(run_module.Run.secure, "__defaults__", (0.3,))
    seen = storage.Trouble(storage.Layer(tmp_path, errno.ENOSPC), 11, 99)
    with pytest.raises(StorageError) as caught:
        try:
            tiny.run(tiny.recipe(tmp_path, **SECTIONS), callbacks=[seen])
        finally:
            seen.stop()
    assert os.strerror(errno.ENOSPC) in str(caught.value) and seen.records == list(range(1, 15))
    (directory,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    ours = tiny.run(tiny.recipe(tmp_path, **SECTIONS))  # goes on from the last good checkpoint
    assert Path(ours.directory) == directory
    assert tiny.weights(ours.directory) == tiny.weights(plain.directory)


def test_rows_that_only_their_writer_has_are_told_until_a_file_has_them(tmp_path):
    with storage.mounted(tmp_path / "shm", megabytes=1) as memory:
        if memory is None:
            pytest.skip("mounts are not permitted here")
        files, full = TrajectoryFiles(tmp_path / "trajectories", memory / "trajectories"), storage.Full(memory)
        (tmp_path / "trajectories").mkdir()
        full.begin()
        for step in (1, 2):
            files.add(table_of(step))
            trouble = files.commit(step)
            assert trouble["alone"] and trouble["path"] == str(memory / "trajectories")
        full.end()
        files.add(table_of(3))
        assert files.commit(3)["alone"]  # of step 2
        assert not files.flush() and not files.commit(4)
        files.close()


def test_a_step_whose_rows_only_their_writer_has_is_no_snapshot():
    said, state = [], SimpleNamespace(step=5)
    trouble = {"alone": True, "path": "/dev/shm/x", "reason": "full"}
    run = SimpleNamespace(directory=SimpleNamespace(settle=lambda: trouble), kept_in_memory=True, say=said.append)
    run.state = state
    Run._keep_in_memory(run, None)
    Run._keep_in_memory(run, None)
    assert not run.kept_in_memory and len(said) == 1 and "cannot write its trajectories to /dev/shm/x: full" in said[0]


def table_of(step):
    return pa.Table.from_pylist([{"step": step, "id": step}])
