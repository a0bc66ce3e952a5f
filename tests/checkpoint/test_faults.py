"""Faults at every stage of a save: the checkpoint before it loads, the error names the stage, the next save works."""

import errno
import os
import re
import signal
import subprocess
import uuid

import pytest
import torch

from tests import forked
from tests.checkpoint.make import group_of, same, tensor
from tests.checkpoint.saving import die_at, layouts, whole, work
from tests.checkpoint.stores import Throttled
from tests.checkpoint.test_crash import small_disk  # noqa: F401 - a fixture
from tests.errors import raises
from tilth.checkpoint import (
    Commit,
    Group,
    Saver,
    abandon_save,
    begin_save,
    complete,
    latest,
    listing,
    open_checkpoint,
    prune,
    save,
    stages,
)
from tilth.checkpoint.storage import storage_of
from tilth.core.errors import StorageError
from tilth.core.layout import Layout

RANKS = 2
BACKGROUND = ("checksum", "write", "sync", "report")
COMMIT = ("manifest", "publish", "retention")


@pytest.fixture(params=["disk", "memory", "slow"])
def root(request, tmp_path):
    """Where checkpoints go."""
    Throttled.reset()
    return {"disk": tmp_path / "r", "memory": f"memory://{uuid.uuid4().hex}"}.get(request.param, f"slow://{tmp_path}/s")


def holds(path, step):
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return checkpoint.step == step and all(same(checkpoint.read("g", n), t) for n, t in whole(step).items())


def save_once(root, step, then=None):
    """Two ranks and their controller, as in a run, all in this process."""
    folder, savers = begin_save(root, step), [Saver() for _ in range(RANKS)]
    commit = Commit(folder, {"g": range(RANKS)}, {"step": step}, then=then or (lambda path: prune(root, 2)))
    try:
        for rank, saver in enumerate(savers):
            saver.start(folder, {"g": group_of(whole(step), layouts(RANKS), rank)}, rank, str(rank))
        return commit.wait(20)
    finally:
        commit.cancel()
        for saver in savers:
            saver.settle()
        abandon_save(folder)  # what a rank wrote that was late to hear of it


def failing(stage, code, at=1):
    """What begins a stage fails the ``at``-th time."""
    calls = [0]

    def reached(name, path):
        calls[0] += name == stage
        if name == stage and calls[0] == at:
            raise OSError(code, os.strerror(code), path)

    return reached


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("stage", stages.STAGES)
def test_a_stage_that_fails(root, monkeypatch, stage, code):
    if stage == "sync" and not str(root).startswith("/"):
        pytest.skip("a store acknowledges what it keeps")
    before = save_once(root, 1)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "stage", failing(stage, code))
        with pytest.raises(StorageError) as caught:
            save_once(root, 2)
    said = str(caught.value)
    assert os.strerror(code) in said and "\n" not in said and "step 2" in said
    assert f"stage {stage}" in said or (stage == "retention" and "retention of" in said)
    assert ("of rank" in said) == (stage in ("snapshot", *BACKGROUND))
    assert holds(before, 1)
    if stage == "retention":
        assert "which is complete" in said and holds(latest(root), 2)
    else:
        assert f"the checkpoint before it, {before}, is intact" in said and latest(root) == before
        assert [(e.path, e.state) for e in listing(root)] == [(before, "complete")]
    assert holds(save_once(root, 3), 3) and storage_of(root).names(), complete(root)


@pytest.mark.parametrize("stage", ["write", "report"])
def test_the_second_rank_fails_or_a_later_part(root, monkeypatch, stage):
    before = save_once(root, 1)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "stage", failing(stage, errno.ENOSPC, 2))
        with pytest.raises(StorageError) as caught:
            save_once(root, 2)
        assert re.fullmatch(rf"(save\.{stage}\.)?rank\d", caught.value.key) and f"stage {stage}" in str(caught.value)
    assert latest(root) == before and holds(before, 1) and len(listing(root)) == 1
    assert holds(save_once(root, 2), 2)


def test_a_rank_is_lost(root):
    """Its report never comes; the controller gives up when it knows."""
    before, folder = save_once(root, 1), begin_save(root, 2)
    commit = Commit(folder, {"g": range(RANKS)}, {})
    Saver().write(folder, {"g": group_of(whole(2), layouts(RANKS), 0)}, 0, "0")
    with pytest.raises(TimeoutError):
        commit.wait(0.2)
    commit.cancel()
    with raises(StorageError, "g.00001.json") as caught:
        commit.wait()
    assert f"{before}, is intact" in str(caught.value)
    assert [e.path for e in listing(root)] == [before] and holds(before, 1)
    assert holds(save_once(root, 2), 2)


def test_a_save_that_is_abandoned_under_a_writer(root):
    """What a slow rank still writes of it is no checkpoint, and goes with the next save."""
    before, folder, saver = save_once(root, 1), begin_save(root, 2), Saver()
    abandon_save(folder)
    saver.start(folder, {"g": group_of(whole(2), layouts(RANKS), 0)}, 0, "0")
    saver.settle()
    assert latest(root) == before and {e.state for e in listing(root)} <= {"complete", "unfinished"}
    save_once(root, 3)
    assert {e.state for e in listing(root)} == {"complete"} and holds(before, 1)


# ---- a process that is killed ----


def killed(root, step, stage, call):
    """How a child of this process ends that saves and dies there."""
    child = os.fork()
    if child == 0:
        try:
            die_at(stage, call)
            work(root, step, 1, 0)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("stage, call", [*((stage, 1) for stage in stages.STAGES), ("write", 2), ("write", 3)])
def test_killed_at_a_stage(tmp_path, stage, call):
    """By a real SIGKILL, in a process of its own, while its threads save."""
    work(tmp_path, 1, 1, 0)
    assert killed(tmp_path, 2, stage, call) == -signal.SIGKILL
    assert holds(latest(tmp_path), 2 if stage == "retention" else 1) and holds(tmp_path / "step-000001", 1)
    work(tmp_path, 3, 1, 0)
    assert [(e.step, e.state) for e in listing(tmp_path)] == [(3, "complete")] and holds(latest(tmp_path), 3)


@pytest.mark.dist
def test_one_of_two_ranks_is_killed_while_it_writes(tmp_path):
    """The controller's commit waits in vain, is given up, and the next save by both works."""
    before = save_once(tmp_path, 1)
    folder = begin_save(tmp_path, 2)
    commit = Commit(folder, {"g": range(RANKS)}, {})
    said = map(str, (tmp_path, 2, "write", 2, RANKS, 1, folder))
    lost = subprocess.Popen([*forked.python(), "-m", "tests.checkpoint.saving", *said])
    Saver().write(folder, {"g": group_of(whole(2), layouts(RANKS), 0)}, 0, "0")
    assert lost.wait(timeout=60) == -signal.SIGKILL and not commit.done()
    commit.cancel()
    with raises(StorageError, "g.00001.json"):
        commit.wait()
    assert [e.path for e in listing(tmp_path)] == [before] and holds(before, 1)
    assert holds(save_once(tmp_path, 2), 2)


# ---- disks and stores that fail by themselves ----


def test_a_folder_that_may_not_be_written(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; EROFS and EACCES are injected above")
    before = save_once(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        with raises(StorageError, "save.begin"):
            save_once(tmp_path, 2)
        assert holds(before, 1)
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_that_is_really_full_in_the_background(small_disk):  # noqa: F811
    before = save(small_disk, 1, {"g": {"x": tensor((100,))}}, {})
    folder, saver = begin_save(small_disk, 2), Saver()
    commit = Commit(folder, {"g": (0,)}, {})
    large = {"x": torch.zeros(3 << 20, dtype=torch.uint8)}
    saver.start(folder, {"g": Group(large, {"x": Layout.single((3 << 20,))})}, 0)
    assert "stage write of rank 0: No space left on device" in saver.settle()
    commit.cancel()
    abandon_save(folder)
    with pytest.raises(StorageError) as caught:
        commit.wait()
    assert caught.value.key in ("rank0", "g.00000.json")
    assert latest(small_disk) == before and len(listing(small_disk)) == 1
    open_checkpoint(save(small_disk, 3, {"g": {"x": tensor((100,))}}, {})).verify()


def test_a_store_that_fails_at_any_request(tmp_path):
    """Also in the middle of putting the manifest in its place."""
    root = f"slow://{tmp_path}/s"
    before, at, failed = save_once(root, 1), 0, 0
    while True:
        Throttled.reset(fail_at=at)
        try:
            save_once(root, 2)
        except StorageError as error:
            assert "SlowDown" in str(error) and "is intact" in str(error)
            Throttled.reset()
            assert holds(before, 1) and latest(root) == before and len(complete(root)) == 1
            failed += 1
        else:
            break
        at += 1
    assert failed > 5
    Throttled.reset()
    assert holds(latest(root), 2)


@pytest.mark.slow
def test_a_slow_store_delays_nobody_but_the_next_save(tmp_path):
    """Two seconds of writing: start is over long before."""
    root, tensors = f"slow://{tmp_path}/s", {"x": tensor((64 << 10,))}
    Throttled.reset(bytes_per_second=1 << 17)
    try:
        folder, saver = begin_save(root, 1), Saver()
        made = {"g": Group(tensors, {"x": Layout.single((64 << 10,))})}
        first = saver.start(folder, made, 0)
        second = saver.start(folder, made, 0, "again")
        assert first.waited + first.seconds < second.waited
        saver.wait()
    finally:
        Throttled.reset()


def test_a_step_is_saved_again_in_a_store(root):
    """The old one counts until the new one is there, and leaves nothing."""
    first = save_once(root, 5)
    files = set(open_checkpoint(first).manifest.files)
    assert save_once(root, 5) == first and holds(first, 5)
    there = set(storage_of(first).names())
    assert there == {"manifest.json", *open_checkpoint(first).manifest.files}
    assert str(root).startswith("/") or not there & files


def test_two_savers_of_two_runs_do_not_meet(tmp_path):
    """Tokens differ even for one step of one root in a store."""
    root = f"memory://{uuid.uuid4().hex}"
    assert begin_save(root, 1) != begin_save(root, 1)
    save_once(root, 1)
    assert [e.state for e in listing(root)] == ["complete"]
