"""Trajectories in flight come back as they were, from memory and from files, on any rank."""

import numpy as np
import pytest

from tests.errors import raises
from tilth.core.errors import DataError, StorageError
from tilth.core.media import MediaItem
from tilth.core.trajectory import Trajectory
from tilth.rollout.prefixes import PrefixPool, rewind


def made(i, *, filtered=False):
    rng = np.random.default_rng(i)
    start, n = 1 + i % 3, 4 + i
    mask = (np.arange(n) >= start).astype(np.uint8)
    logprobs = np.where(mask, -rng.random(n), 0).astype(np.float32)
    sampling = logprobs / 2 if filtered else None
    t = Trajectory(i, i * 2, i // 2, rng.integers(0, 50, n), mask, logprobs, sampling)
    t.media = () if i % 3 else (MediaItem("eye", 0, 1, bytes(i + 1)),)
    t.versions, t.text, t.finish = [(start, 3), (start + 1, 4)], "ä" * i, "length" if i % 2 else "stop"
    return t


def same(a, b):
    columns = ("tokens", "mask", "logprobs", "sampling_logprobs")
    pairs = [(getattr(a, name), getattr(b, name)) for name in columns]
    alike = all(x is y is None or (np.array_equal(x, y) and x.dtype == y.dtype) for x, y in pairs)
    plain = ("id", "prompt", "group", "versions", "text", "finish", "segments", "media")
    return alike and all(getattr(a, name) == getattr(b, name) for name in plain)


@pytest.mark.parametrize("filtered", [False, True])
def test_any_rank_finds_those_of_all(tmp_path, filtered):
    whole = [made(i, filtered=filtered) for i in range(6)]
    for rank in range(2):
        PrefixPool(tmp_path, rank).keep(7, whole[rank::2], 0)
    found = PrefixPool(tmp_path, 1).take(7, [5, 0, 2])
    assert list(found) == [5, 0, 2] and all(same(found[i], whole[i]) for i in found)
    assert PrefixPool(tmp_path, 0).take(7, []) == {}


def test_a_sample_that_is_not_there_is_named(tmp_path):
    one = PrefixPool(tmp_path, 0)
    one.keep(7, [made(1)], 0)
    for step, i in ((6, 1), (7, 2)):
        with raises(DataError, f"prefixes.{i}"):
            one.take(step, [i])


def test_steps_that_no_resume_returns_to_are_dropped(tmp_path):
    one, other = PrefixPool(tmp_path, 0), PrefixPool(tmp_path, 1)
    for step in range(1, 6):
        one.keep(step, [made(step)], step - 2)
        other.keep(step, [], 0)
    assert sorted(p.name for p in tmp_path.glob("*-rank-0.npz")) == [f"step-00000{i}-rank-0.npz" for i in (3, 4, 5)]
    assert len(list(tmp_path.glob("*-rank-1.npz"))) == 3 and one.take(4, [4])[4].id == 4


def test_what_an_attempt_with_more_ranks_left_is_not_taken(tmp_path):
    """It kept step 3 on two ranks and fell; the next one goes back to step 2, and has one rank."""
    old, new = made(1), made(1, filtered=True)
    PrefixPool(tmp_path, 0).keep(2, [made(5)], 0)
    PrefixPool(tmp_path, 1).keep(3, [old], 0)
    rewind(tmp_path, 2)
    PrefixPool(tmp_path, 0).keep(3, [new], 0)
    assert same(PrefixPool(tmp_path, 0).take(3, [1])[1], new) and PrefixPool(tmp_path, 0).take(2, [5])
    rewind(tmp_path / "none", 0)


def test_a_disk_that_refuses_is_named(tmp_path, monkeypatch):
    one = PrefixPool(tmp_path / "pool", 0)
    with monkeypatch.context() as patch, raises(StorageError, "step-000001-rank-0.npz"):
        patch.setattr(np, "savez", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        one.keep(1, [made(1)], 0)
    with raises(DataError, "prefixes.1"):
        one.take(1, [1])
    (tmp_path / "file").write_text("")
    with raises(StorageError, "file"):
        PrefixPool(tmp_path / "file", 0).keep(1, [made(1)], 0)


def test_a_file_of_an_older_version_is_refused_by_name(tmp_path):
    np.savez(tmp_path / "step-000007-rank-0.npz", rows=np.zeros((1, 5), np.int64), tokens=np.zeros(3, np.int64))
    with raises(DataError, "prefixes.version"):
        PrefixPool(tmp_path, 0).take(7, [0])
