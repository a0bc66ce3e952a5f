"""A snapshot is of the moment of ``start``, whatever becomes of the tensors; the rest happens in threads."""

import errno
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.checkpoint.hand import tile_sums, write
from tests.checkpoint.make import DTYPES, group_of, groups, same, tensor
from tests.errors import raises
from tests.examples import examples
from tilth.checkpoint import (
    Commit,
    Group,
    Saver,
    begin_save,
    latest,
    open_checkpoint,
    save,
    saver,
    snapshot,
    stages,
    tile_reader,
)
from tilth.checkpoint.tile_reader import tile_checksums
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Layout, Mesh, Replicate, Shard
from tilth.trace.spans import recorder

BYTES = torch.arange(30 * 30 * 3000 * 8 // 4, dtype=torch.int32).mul_(2654435761 % 2**31).view(torch.uint8)


def alone(tensors):
    return Group(tensors, {n: Layout.single(tuple(t.shape)) for n, t in tensors.items()})


def committed(root, step, made, then=None, save=None):
    """Save these groups in the background, and the checkpoint."""
    save, folder = save or Saver(), begin_save(root, step)
    save.start(folder, made, 0)
    return open_checkpoint(Commit(folder, dict.fromkeys(made, (0,)), {}, then=then).wait(20))


class Gate:
    """Holds a stage until it is opened."""

    def __init__(self, monkeypatch, *names):
        self.reached, self._open = threading.Event(), threading.Event()

        def stage(name, path):
            if name in names:
                self.reached.set()
                assert self._open.wait(20)

        monkeypatch.setattr(stages, "stage", stage)

    def open(self):
        self._open.set()


# ---- what is saved ----


def odd_ones():
    """Tensors that are not simply their storage."""
    base = tensor((6, 8), torch.float32, "base")
    wide = tensor((40, 50), torch.bfloat16, "wide")
    found = {
        "transposed": base.t(), "strided": base[::2, 1::3], "view": base[2:4], "flipped": base.flip(0)[1:],
        "expanded": base[:, :1].expand(6, 5), "offset": wide.view(-1)[3:17],
        "permuted": wide.view(4, 10, 50).permute(2, 0, 1), "hollow": torch.empty(3, 0, 2),
        "conj": tensor((3, 2), torch.complex64).conj(), "scalar": base[1, 1], "empty": base[:0],
        "leaf": base.clone().requires_grad_(),
    }  # fmt: skip
    return found | {f"dtype.{dtype}": tensor((5, 3), dtype) for dtype in DTYPES} | {"zero": tensor((), torch.uint8)}


def test_every_kind_of_tensor(tmp_path):
    tensors = odd_ones()
    checkpoint = committed(tmp_path, 1, {"g": alone(tensors), "none": Group({}, {})})
    checkpoint.verify()
    assert [n for n, t in tensors.items() if not same(checkpoint.read("g", n), t.detach().resolve_conj())] == []
    stored = load_file(checkpoint.path / "g.safetensors")
    assert stored.keys() == tensors.keys() and same(stored["strided"], tensors["strided"].contiguous())


def test_the_files_are_those_that_are_written_by_hand(tmp_path):
    whole = {"model": {"w": tensor((300, 520)), "v": tensor((70_000,), torch.bfloat16), "s": tensor(())}}
    mine = committed(tmp_path, 1, {g: alone(ts) for g, ts in whole.items()}).path
    other = write(tmp_path / "hand" / "step-000001", 1, whole)
    assert (mine / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert open_checkpoint(mine).manifest.files == open_checkpoint(other).manifest.files


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(1, 30), max_size=3), st.sampled_from(DTYPES), st.sampled_from([1, 16, 100]))
def test_checksums_of_tiles(sizes, dtype, wide):
    shape = (*sizes[:-1], sizes[-1] * wide) if sizes else ()
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    values = (BYTES[:count] % 2 if dtype == torch.bool else BYTES[:count]).view(dtype).view(shape)
    raw = values.reshape(-1).view(torch.uint8).numpy().data
    assert tile_checksums(raw, tuple(values.shape), values.element_size()) == tile_sums(values)


def test_checksums_of_bands_that_take_several_steps(monkeypatch):
    monkeypatch.setattr(tile_reader, "STEP", 5000)
    values = tensor((700, 2048), torch.float16)
    assert tile_checksums(values.view(-1).view(torch.uint8).numpy().data, (700, 2048), 2) == tile_sums(values)
    assert len(tile_sums(values)) > 8


# ---- the moment ----


def test_what_changes_after_start_is_not_saved(tmp_path, monkeypatch):
    tensors = {"a": tensor((1000, 300)), "b": tensor((77,), torch.float64)}
    before = {n: t.clone() for n, t in tensors.items()}
    gate, save, folder = Gate(monkeypatch, "checksum"), Saver(), begin_save(tmp_path, 1)
    save.start(folder, {"g": alone(tensors)}, 0)
    assert gate.reached.wait(20)
    for values in tensors.values():
        values.zero_()
    gate.open()
    checkpoint = open_checkpoint(Commit(folder, {"g": (0,)}, {}).wait(20))
    checkpoint.verify()
    assert all(same(checkpoint.read("g", n), t) for n, t in before.items())


def test_a_thread_that_trains_on(tmp_path):
    """Every tensor is counted up as soon as start returns, many times, over and over: each save is of one moment."""
    tensors, save = {f"t{i}": torch.zeros(64, 1024) for i in range(16)}, Saver()
    for step in range(1, 6):
        folder = begin_save(tmp_path, step)
        save.start(folder, {"g": alone(tensors)}, 0)
        commit = Commit(folder, {"g": (0,)}, {})
        for values in tensors.values():
            values.add_(1)
        checkpoint = open_checkpoint(commit.wait(20))
        assert all((checkpoint.read("g", n) == step - 1).all() for n in tensors)


def test_start_waits_for_the_copy_alone_and_the_next_start_for_the_disk(tmp_path, monkeypatch):
    gate, save = Gate(monkeypatch, "write"), Saver()
    one, two = begin_save(tmp_path / "a", 1), begin_save(tmp_path / "b", 2)
    taken = save.start(one, {"g": alone({"x": tensor((9,))})}, 0)
    assert taken.nbytes > 36 and taken.waited < 1 and gate.reached.wait(20) and save.problem() == ""
    late = []
    second = threading.Thread(target=lambda: late.append(save.start(two, {"g": alone({"x": tensor((9,))})}, 0)))
    second.start()
    time.sleep(0.1)
    assert not late
    gate.open()
    second.join(20)
    save.wait()
    assert late[0].waited > 0.05 and list(one.glob("*.safetensors")) and list(two.glob("*.safetensors"))


def test_not_in_the_background(tmp_path):
    folder = begin_save(tmp_path, 1)
    Saver().start(folder, {"g": alone({"x": tensor((9,))})}, 0, "p", background=False)
    assert sorted(p.name for p in folder.rglob("*")) == [".reports", "g.00000.json", "g.p.safetensors"]


def test_an_error_is_told_once_and_the_next_save_works(tmp_path, monkeypatch):
    save, made = Saver(), {"g": alone({"x": tensor((9,))})}

    def fails(name, path):
        if name == "sync":
            raise OSError(5, "Input/output error")

    for told in (save.wait, lambda: save.start(begin_save(tmp_path, 9), made, 0), None):
        with monkeypatch.context() as patch:
            patch.setattr(stages, "stage", fails)
            save.start(begin_save(tmp_path, 1), made, 0)
            while not save.problem():
                time.sleep(0.001)
        if told is None:
            assert "stage sync" in save.settle()
        else:
            with raises(StorageError, "save.sync.rank0") as caught:
                told()
            assert (Path(caught.value.path).name, caught.value.reason) == ("g.safetensors", "Input/output error")
        assert save.problem() == "" == save.settle()
        save.wait()
    assert committed(tmp_path, 3, made, save=save).step == 3


def test_what_is_not_the_disks_fault_is_raised_too(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot.FileImage, "entry", lambda self: 1 / 0)
    save = Saver()
    save.start(begin_save(tmp_path, 1), {"g": alone({"x": tensor((9,))})}, 0)
    with pytest.raises(ZeroDivisionError):
        save.wait()


# ---- what is kept between saves ----


def test_memory_and_plans_are_kept(tmp_path, monkeypatch):
    save, sizes, plans = Saver(), [], []
    real, plan = snapshot._allocate, snapshot.plan_group
    monkeypatch.setattr(snapshot, "_allocate", lambda n, pinned: sizes.append(n) or real(n, pinned))
    monkeypatch.setattr(snapshot, "plan_group", lambda specs: plans.append(specs) or plan(specs))
    tensors = {f"x{i}": tensor((64, 64)) for i in range(8)}
    for step in range(1, 4):
        committed(tmp_path, step, {"g": alone(dict(tensors))}, save=save)
    assert len(sizes) == len(plans) == 1
    tensors["x9"] = tensor((999, 99))
    assert same(committed(tmp_path, 4, {"g": alone(tensors)}, save=save).read("g", "x9"), tensors["x9"])
    assert len(sizes) == len(plans) == 2 and sizes[1] > sizes[0]
    del tensors["x9"]
    committed(tmp_path, 5, {"g": alone(tensors)}, save=save)
    committed(tmp_path, 6, {"h": alone({"x": tensor((300, 99))})}, save=save)
    assert len(sizes) == 4 - 1 and sizes[2] < sizes[1]  # much too large: given back


def test_a_tensor_of_another_shape_is_refused_before_anything_is_copied(tmp_path):
    layouts = {"x": Layout(Mesh(("fsdp",), (2,)), (Shard(0),), (4, 2))}
    save, folder = Saver(), begin_save(tmp_path, 1)
    save.prepare({"g": Group({"x": tensor((2, 2))}, layouts)}, 0)
    with raises(CheckpointError, "g/x.shape"):
        save.start(folder, {"g": Group({"x": tensor((4, 2))}, layouts)}, 0)
    assert [p.name for p in folder.rglob("*")] == [".reports"]


def test_no_memory_for_a_snapshot(tmp_path, monkeypatch):
    def none(nbytes, pinned):
        raise OSError(12, "Cannot allocate memory")

    save = Saver()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_allocate", none)
        with raises(StorageError, "save.snapshot.rank0"):
            save.start(begin_save(tmp_path, 1), {"g": alone({"x": tensor((9,))})}, 0)
    committed(tmp_path, 1, {"g": alone({"x": tensor((9,))})}, save=save)


def test_every_stage_is_a_span_with_its_bytes(tmp_path):
    recorder.totals()
    committed(tmp_path, 1, {g: alone(ts) for g, ts in groups().items()}, then=lambda path: None)
    found = recorder.totals()
    assert {f"save.{name}" for name in stages.STAGES} <= found.keys()
    data = sum(path.stat().st_size for path in (tmp_path / "step-000001").glob("*.safetensors"))
    assert all(found[f"save.{name}"].bytes == data for name in ("snapshot", "checksum", "write"))
    assert found["save.manifest"].bytes == (tmp_path / "step-000001" / "manifest.json").stat().st_size


# ---- the commit ----

MESH = Mesh(("fsdp",), (3,))
SPREAD = {"w": Layout(MESH, (Shard(0),), (9, 4)), "step": Layout(MESH, (Replicate(),), ())}
WHOLE = {"w": tensor((9, 4)), "step": tensor((), torch.int64)}


def test_a_commit_waits_for_the_last_rank(tmp_path):
    folder, after = begin_save(tmp_path, 1), []
    commit = Commit(folder, {"g": range(3)}, {"a": [1]}, MESH, then=after.append)
    savers = [Saver() for _ in range(3)]
    for rank in (2, 0):
        savers[rank].start(folder, {"g": group_of(WHOLE, SPREAD, rank)}, rank, str(rank))
    with pytest.raises(TimeoutError):
        commit.wait(0.3)
    assert not commit.done() and commit.error is None and latest(tmp_path) is None and not after
    savers[1].start(folder, {"g": group_of(WHOLE, SPREAD, 1)}, 1, "1")
    path = commit.wait(20)
    assert commit.done() and after == [path] == [latest(tmp_path)]
    checkpoint = open_checkpoint(path)
    assert checkpoint.objects == {"a": [1]} and all(same(checkpoint.read("g", n), t) for n, t in WHOLE.items())
    assert not [p for p in path.iterdir() if p.suffix not in (".safetensors", ".json")]
    commit.cancel()  # too late
    assert latest(tmp_path) == path


def test_a_commit_that_is_cancelled_ends_at_once(tmp_path):
    folder = begin_save(tmp_path, 1)
    commit = Commit(folder, {"g": range(3)}, {})
    Saver().write(folder, {"g": group_of(WHOLE, SPREAD, 1)}, 1, "1")
    commit.cancel()
    assert commit.done() and not list(tmp_path.iterdir())
    with raises(StorageError, "g.00000.json") as caught:
        commit.wait()
    assert "g.00002" in str(caught.value) and "g.00001" not in str(caught.value)


def test_a_rank_that_failed_ends_the_commit(tmp_path, monkeypatch):
    folder = begin_save(tmp_path, 1)
    commit = Commit(folder, {"g": range(3)}, {})
    Saver().write(folder, {"g": group_of(WHOLE, SPREAD, 1)}, 1, "1")

    def fails(name, path):
        if name == "write":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(stages, "stage", fails)
    save = Saver()
    save.start(folder, {"g": group_of(WHOLE, SPREAD, 2)}, 2, "2")
    with raises(StorageError, "rank2") as caught:
        commit.wait(20)
    assert all(some in str(caught.value) for some in ("step 1", "g.2.safetensors", "stage write", "No space left"))
    assert not list(tmp_path.iterdir()) and "rank 2" in save.settle()


def test_what_follows_a_commit_may_fail_alone(tmp_path):
    def fails(path):
        raise StorageError("no room for the mark", key="best.json")

    folder = begin_save(tmp_path, 1)
    Saver().start(folder, {"g": alone({"x": tensor((3,))})}, 0)
    commit = Commit(folder, {"g": (0,)}, {}, then=fails)
    with raises(StorageError, "best.json") as caught:
        commit.wait(20)
    assert caught.value.stage == "retention" and caught.value.reason == "no room for the mark"
    open_checkpoint(latest(tmp_path)).verify()


def test_a_report_that_is_none(tmp_path):
    folder = begin_save(tmp_path, 1)
    (folder / ".reports" / "g.00000.json").write_text(json.dumps({"rank": 0}))
    with raises(CheckpointError, "report.folder"):
        Commit(folder, {"g": (0,)}, {}).wait(20)
    assert not list(tmp_path.iterdir())


def test_objects_are_looked_at_before_anything_waits(tmp_path):
    with raises(CheckpointError, "objects.a"):
        Commit(begin_save(tmp_path, 1), {}, {"a": {1}})


def test_looks_become_rare(tmp_path, monkeypatch):
    looks = []
    real = saver.Commit._new_reports
    monkeypatch.setattr(saver.Commit, "_new_reports", lambda self, wanted: looks.append(1) or real(self, wanted))
    commit = Commit(begin_save(tmp_path, 1), {"g": (0,)}, {})
    time.sleep(0.5)
    commit.cancel()
    assert 2 <= len(looks) <= 40  # 10 in the first 0.05 s, then each a tenth later


def test_a_look_is_at_most_a_tenth_late(tmp_path, monkeypatch):
    now, pauses = [100.0], []

    class Clock:
        perf_counter = staticmethod(lambda: now[0])

    class Cancelled(threading.Event):
        def wait(self, timeout=None):
            pauses.append((now[0] - 100, timeout))
            now[0] += timeout
            return now[0] > 105

    monkeypatch.setattr(saver, "time", Clock)
    monkeypatch.setattr(saver, "Event", Cancelled)
    with raises(StorageError, "g.00000.json"):
        Commit(begin_save(tmp_path, 1), {"g": (0,)}, {}).wait(20)
    assert all(pause == pytest.approx(min(max(passed / 10, 0.005), 0.1)) for passed, pause in pauses)
    assert pauses[0] == (0, 0.005) and pauses[-1][1] == 0.1


def large():
    """A file that is hashed while it is written."""
    return {"w": torch.arange((5 << 20) + 3, dtype=torch.int32).view(-1, 1), "s": torch.arange(9.0)}


def test_a_large_file_is_hashed_while_it_is_written(tmp_path, monkeypatch):
    """Neither waits for the other: both wait here until both have begun."""
    met = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(stages, "stage", lambda name, path: met.wait() if name in ("checksum", "sync") else None)
    path = save(tmp_path, 1, {"g": large()}, {})
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    assert all(same(checkpoint.read("g", n), t) for n, t in large().items())


@pytest.mark.parametrize("stage", ["checksum", "write"])
def test_a_large_file_of_which_one_half_fails(tmp_path, monkeypatch, stage):
    def fail(name, path):
        if name == stage:
            raise OSError(errno.EIO, "no luck")

    before = threading.active_count()
    monkeypatch.setattr(stages, "stage", fail)
    with raises(StorageError, f"save.{stage}.rank0"):
        save(tmp_path, 1, {"g": large()}, {})
    assert threading.active_count() <= before and not list(tmp_path.iterdir())


# ---- from a device ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_a_device(tmp_path):
    """Values change on the device, in its own order, right behind start; memory is pinned and kept."""
    tensors = {f"t{i}": torch.zeros(512, 4096, device="cuda") for i in range(8)}
    tensors |= {"columns": torch.zeros(64, 64, device="cuda").t(), "host": torch.zeros(7)}
    save = Saver()
    for step in range(1, 6):
        folder = begin_save(tmp_path, step)
        save.start(folder, {"g": alone(tensors)}, 0)
        for values in tensors.values():
            values.add_(1)
        checkpoint = open_checkpoint(Commit(folder, {"g": (0,)}, {}).wait(60))
        assert all((checkpoint.read("g", n) == step - 1).all() for n in tensors)
        assert save._buffer._memory.is_pinned() and save._buffer._memory.data_ptr() % 4096 == 0
