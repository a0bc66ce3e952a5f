"""Any box of any tensor out of any pieces: the bits of the slice, only the tiles that are wanted, each one checked."""

import math
import os
import threading
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint import hand
from tests.checkpoint.make import DTYPES, cut, same, tensor
from tests.errors import raises
from tests.examples import examples
from tilth.checkpoint import planning, storage, tile_reader
from tilth.checkpoint.read import open_checkpoint
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Box, Layout, Mesh, RaggedShard, Replicate, Shard

quick = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MIB = 1 << 20
STEP = "step-000001"


def forget():
    for cache in (tile_reader._cut, planning._plan, planning._tile_counts):
        cache.cache_clear()


@contextmanager
def smaller(step=256, small=64, tile=64):
    """Tiles, steps and blocks of a few bytes: small tensors then have many of each, of every kind."""
    changes = [
        (planning, {"SEGMENT": 8, "COLUMN_TILE": 32, "ROW_TILE": 32, "LARGEST_TILE": tile}),
        (tile_reader, {"STEP": step, "SMALL": small, "BLOCK": 512}),
    ]
    before = [(module, {name: getattr(module, name) for name in values}) for module, values in changes]
    for module, values in changes:
        vars(module).update(values)
    forget()
    try:
        yield
    finally:
        for module, values in before:
            vars(module).update(values)
        forget()


def saved(root, tensors, layouts=None, step=1):
    return open_checkpoint(hand.write(root / f"step-{step:06d}", step, {"g": tensors}, layouts and {"g": layouts}))


# ---- the bits ----


@st.composite
def splits(draw, shape):
    """How a tensor was saved: in blocks, in copies, in unequal intervals of its storage, or whole."""
    mesh = Mesh(("a", "b"), (draw(st.integers(1, 3)), draw(st.integers(1, 3))))
    options = [st.just(Replicate()), *(st.just(Shard(d)) for d in range(len(shape)))]
    placements = [draw(st.one_of(options)) for _ in range(2)]
    layout = Layout(mesh, tuple(placements), shape)
    units = draw(st.sampled_from([None, (1, 2, 3), (0, 1, 1), (5, 1, 0)]))
    units = units and units[: mesh.sizes[1]]
    blocks = {b.numel for r in mesh.ranks for b in Layout(mesh, (placements[0], Replicate()), shape).boxes(r)}
    if units and sum(units) and math.prod(shape) and not any(n % sum(units) for n in blocks):
        layout = Layout(mesh, (placements[0], RaggedShard(units)), shape)
    return layout


@st.composite
def boxes(draw, shape):
    offset = tuple(draw(st.integers(0, max(0, n - 1))) for n in shape)
    return Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset)))


@quick
@given(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 24, 64]), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool]),
    st.sampled_from([(64, 32), (256, 64), (100, 10_000)]),
    st.booleans(),
    st.data(),
)
def test_a_box_of_any_pieces_is_the_slice(tmp_path_factory, shape, dtype, sizes, remote, data):
    shape = tuple(shape)
    if math.prod(shape) > 30_000:
        shape = shape[:2]
    whole = tensor(shape, dtype)
    with smaller(step=sizes[0], tile=sizes[1]):
        checkpoint = saved(tmp_path_factory.mktemp("root"), {"x": whole}, {"x": data.draw(splits(shape))})
        if remote:
            checkpoint._storage = Far(checkpoint.path, gap=data.draw(st.sampled_from([0, 16, 1000])))
        assert same(checkpoint.read("g", "x"), whole)
        for _ in range(3):
            box = data.draw(boxes(shape))
            assert same(checkpoint.read("g", "x", box), whole[box.slices])
        turned = torch.zeros(shape[::-1], dtype=dtype).permute(list(range(len(shape)))[::-1])  # of other strides
        checkpoint.restore("g", {"x": turned})
        assert same(turned, whole)
        checkpoint.verify()


@quick
@given(st.data(), st.integers(1, 3))
def test_several_tensors_in_several_files_by_several_threads(tmp_path_factory, data, threads):
    shapes = [(), (5,), (64, 32), (7, 3, 8), (0, 4), (1, 300), (300, 1), (1000,)]
    whole = {f"t{i}": tensor(shape, DTYPES[3 * i % len(DTYPES)], str(i)) for i, shape in enumerate(shapes)}
    mesh = Mesh(("a",), (3,))
    layouts = {
        n: Layout(mesh, (Shard(0) if t.ndim and data.draw(st.booleans()) else Replicate(),), tuple(t.shape))
        for n, t in whole.items()
    }
    with smaller():
        checkpoint = saved(tmp_path_factory.mktemp("root"), whole, layouts)
        wants = [w for n in whole for w in checkpoint._pieces("g", n)]
        into = {n: torch.zeros_like(t) for n, t in whole.items()}
        filled = [
            want._replace(target=into[want.tensor[2:]][piece.box.slices])
            for name in whole
            for want, piece in zip(checkpoint._pieces("g", name), [w.piece for w in wants if w.tensor == f"g/{name}"])
        ]
        found = tile_reader.fetch(checkpoint._storage, filled, threads)
    assert not found.problems and all(same(into[n], t) for n, t in whole.items())
    assert found.nbytes == sum(t.nbytes for t in whole.values())


def test_threads_divide_the_bytes(tmp_path, monkeypatch):
    whole = {f"t{i}": torch.randn(300, 1000, generator=torch.Generator().manual_seed(i)) for i in range(8)}
    checkpoint, seen = saved(tmp_path, whole), []
    original = tile_reader._Reader.read

    def reading(self, wants):
        seen.append((threading.current_thread().name, sum(want.piece.nbytes for want in wants)))
        original(self, wants)

    monkeypatch.setattr(tile_reader._Reader, "read", reading)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    into = {n: torch.zeros_like(t) for n, t in whole.items()}
    checkpoint.restore("g", into)
    assert all(same(into[n], t) for n, t in whole.items())
    total = sum(t.nbytes for t in whole.values())
    assert sum(n for _, n in seen) == total and len(seen) == 2 and max(n for _, n in seen) <= 5 / 8 * total
    assert all(name.startswith("tilth-read") for name, _ in seen)
    checkpoint.read("g", "t0", Box((0, 0), (1, 5)))
    assert seen[2][0] == threading.current_thread().name  # little is read by who asks


# ---- how much is read ----


def rchar():
    """Bytes that this process has asked of files."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    whole = torch.randn(256, 8192, generator=torch.Generator().manual_seed(1))
    return saved(tmp_path_factory.mktemp("wide"), {"x": whole}), whole


@pytest.mark.parametrize(
    ("box", "share"),
    [
        (Box((0, 2048), (256, 2048)), 0.25),
        (Box((0, 6144), (256, 2048)), 0.25),
        (Box((64, 0), (64, 8192)), 0.25),
        (Box((64, 2048), (64, 2048)), 1 / 16),
        (Box((0, 0), (256, 1024)), 1 / 8),
        (Box((0, 1), (256, 1)), 1 / 8),  # a tile is read as a whole, else it could not be checked
        (Box((255, 0), (1, 8192)), 1 / 4),
        (Box((0, 0), (256, 8192)), 1.0),
    ],
)
def test_a_part_costs_its_bytes(wide, box, share):
    checkpoint, whole = wide
    before, asked = checkpoint.bytes_read, rchar()
    part = checkpoint.read("g", "x", box)
    asked = rchar() - asked
    assert same(part, whole[box.slices])
    assert checkpoint.bytes_read - before == share * whole.nbytes
    assert share * whole.nbytes <= asked <= share * whole.nbytes + 4096


def test_columns_of_a_narrow_matrix_cost_their_bytes(tmp_path):
    """Their rows are shorter than a page, and a map has them: the kernel counts nothing."""
    whole = torch.randn(3000, 512, generator=torch.Generator().manual_seed(1))
    checkpoint = saved(tmp_path, {"x": whole})
    for box in (Box((0, 128), (3000, 128)), Box((0, 384), (3000, 128)), Box((1, 130), (2998, 100))):
        before, asked = checkpoint.bytes_read, rchar()
        assert same(checkpoint.read("g", "x", box), whole[box.slices])
        assert checkpoint.bytes_read - before == whole.nbytes / 4 and rchar() - asked <= 4096
    file = next(checkpoint.path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 4096)
    with raises(CheckpointError, file.name):
        checkpoint.read("g", "x", Box((0, 128), (3000, 128)))


def test_ranks_that_split_what_one_process_saved_read_it_once_in_all(wide):
    checkpoint, whole = wide
    for mesh in (Mesh(("fsdp", "tp"), (4, 1)), Mesh(("fsdp", "tp"), (1, 4)), Mesh(("fsdp", "tp"), (2, 4))):
        layout = Layout(mesh, (Shard(0), Shard(1)), tuple(whole.shape))
        before, asked = checkpoint.bytes_read, rchar()
        for rank in mesh.ranks:
            into = torch.zeros(layout.boxes(rank)[0].size)
            checkpoint.restore("g", {"x": into}, {"x": layout}, rank)
            assert same(into, cut(whole, layout, rank))
        assert checkpoint.bytes_read - before == whole.nbytes
        assert rchar() - asked <= whole.nbytes + 4096


def test_every_byte_once_to_verify(tmp_path, wide):
    whole = {"x": wide[1], "y": tensor((77,)), "z": tensor((5, 3), torch.bfloat16)}
    layouts = {n: Layout(Mesh(("d",), (3,)), (Shard(0),), tuple(t.shape)) for n, t in whole.items()}
    checkpoint, told = saved(tmp_path, whole, layouts), []
    total = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
    asked = rchar()
    checkpoint.verify(lambda done, of: told.append((done, of)))
    assert total <= rchar() - asked <= total + 4096 and checkpoint.bytes_read == total
    stored = sum(t.nbytes for t in whole.values())
    assert told[-1] == (stored, stored) and {of for _, of in told} == {stored}
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_small_neighbours_are_read_together(tmp_path, monkeypatch):
    whole = {f"t{i:04d}": tensor((16, 64), salt=str(i)) for i in range(1000)}  # 4 KiB each
    checkpoint, calls = saved(tmp_path, whole), []
    monkeypatch.setattr(storage._LocalRanges, "read_into", counting(storage._LocalRanges.read_into, calls))
    into = {n: torch.zeros_like(t) for n, t in whole.items()}
    checkpoint.restore("g", into)
    assert all(same(into[n], t) for n, t in whole.items())
    total = sum(t.nbytes for t in whole.values())
    assert sum(size for _, size in calls) == total and len(calls) == math.ceil(total / tile_reader.STEP)
    calls.clear()
    some = [f"t{i:04d}" for i in range(0, 1000, 2)]  # what is between is not read
    for name in some[:10]:
        checkpoint.read("g", name)
    assert sum(size for _, size in calls) == 10 * 4096


def counting(original, calls):
    def read_into(self, offset, into):
        calls.append((offset, len(into)))
        original(self, offset, into)

    return read_into


def test_a_large_tensor_goes_straight_into_its_memory(wide, monkeypatch):
    """In steps of one size, none of them through a buffer."""
    checkpoint, whole = wide
    into, places = torch.zeros_like(whole), []
    original = storage._LocalRanges.read_into

    def read_into(self, offset, memory):
        places.append((np.frombuffer(memory, np.uint8).ctypes.data - into.data_ptr(), len(memory)))
        original(self, offset, memory)

    monkeypatch.setattr(storage._LocalRanges, "read_into", read_into)
    checkpoint.restore("g", {"x": into})
    assert same(into, whole)
    assert [at for at, _ in places] == list(range(0, whole.nbytes, tile_reader.STEP))
    assert {size for _, size in places} == {tile_reader.STEP}


# ---- which pieces ----


@quick
@given(st.data())
def test_the_index_finds_what_meets_a_box(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(4, 12), min_size=1, max_size=3)))
    mesh = Mesh(("a", "b"), (4, 4))
    placements = data.draw(st.tuples(*[st.integers(0, len(shape) - 1).map(Shard)] * 2))
    checkpoint = saved(tmp_path_factory.mktemp("root"), {"x": tensor(shape)}, {"x": Layout(mesh, placements, shape)})
    entry = checkpoint.entry("g", "x")
    box = data.draw(boxes(shape))
    wanted = [piece for piece in entry.boxes if piece.box.intersect(box)]
    found = entry.meeting(box)
    assert [p for p in found if p.box.intersect(box)] == wanted
    assert not box.numel or found == wanted


def test_of_thousands_of_pieces_only_those_wanted_are_looked_at(tmp_path, monkeypatch):
    shape = (2048, 64)
    layout = Layout(Mesh(("fsdp", "tp"), (128, 8)), (Shard(0), Shard(1)), shape)
    whole = torch.arange(2048 * 64, dtype=torch.int32).view(shape)
    checkpoint = saved(tmp_path, {"x": whole}, {"x": layout})
    made = []
    original = type(checkpoint.entry("g", "x")).piece

    def piece(self, i):
        made.append(i)
        return original(self, i)

    monkeypatch.setattr(type(checkpoint.entry("g", "x")), "piece", piece)
    box = Box((1000, 10), (32, 12))
    assert same(checkpoint.read("g", "x", box), whole[box.slices])
    assert len(made) == 3 * 2  # three rows of shards, two of columns


# ---- each tile is checked ----


def flip(checkpoint, tensor, element, group="g"):
    """Change a bit of one element, wherever it lies."""
    entry = checkpoint.entry(group, tensor)
    for piece in entry.boxes:
        inside = Box(tuple(element), (1,) * len(element)).intersect(piece.box)
        if inside:
            at = np.ravel_multi_index(inside.within(piece.box).offset, piece.size) if piece.size else 0
            file = checkpoint.path / piece.file
            data = bytearray(file.read_bytes())
            data[piece.byte0 + int(at) * entry.torch_dtype.itemsize] ^= 16
            file.write_bytes(data)
            return piece.file
    raise AssertionError


def test_only_who_reads_the_damaged_tile_is_told(tmp_path):
    whole = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(1))
    checkpoint = saved(tmp_path, {"x": whole, "y": whole[:2]})
    flip(checkpoint, "x", (300, 600))  # second band of rows, third band of columns
    for box in (Box((0, 0), (256, 2048)), Box((0, 0), (1024, 512)), Box((512, 512), (512, 256))):
        assert same(checkpoint.read("g", "x", box), whole[box.slices])
    assert same(checkpoint.read("g", "y"), whole[:2])
    for box in (Box((500, 700), (1, 1)), Box((0, 512), (1024, 512)), Box((256, 0), (256, 2048)), None):
        with raises(CheckpointError, "g/x.checksum"):
            checkpoint.read("g", "x", box)
    with raises(CheckpointError, "g/x.checksum") as caught:
        checkpoint.verify()
    assert str(caught.value) == f"checkpoint {checkpoint.path}: tensor g/x is corrupt in file g.safetensors"


@quick
@given(st.data())
def test_no_bit_of_a_wanted_element_can_change(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 3, 8, 32, 64]), min_size=1, max_size=3)))
    shape = shape if math.prod(shape) < 20_000 else shape[:2]
    with smaller(step=data.draw(st.sampled_from([64, 256]))):
        layout = data.draw(splits(shape))
        checkpoint = saved(tmp_path_factory.mktemp("root"), {"x": tensor(shape)}, {"x": layout})
        box = data.draw(boxes(shape).filter(lambda box: box.numel))
        element = tuple(o + data.draw(st.integers(0, s - 1)) for o, s in zip(box.offset, box.size))
        file = flip(checkpoint, "x", element)
        for attempt in (lambda: checkpoint.read("g", "x", box), checkpoint.verify):
            with raises(CheckpointError, "g/x.checksum") as caught:
                attempt()
            assert file in str(caught.value)


def test_tiles_larger_than_a_step_are_checked(tmp_path, monkeypatch):
    whole = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    checkpoint = saved(tmp_path, {"x": whole, "row": whole[:1], "column": whole[:, :1]})
    monkeypatch.setattr(tile_reader, "STEP", 5000)  # a row has 4096 bytes
    assert all(
        same(checkpoint.read("g", n), t) for n, t in (("x", whole), ("row", whole[:1]), ("column", whole[:, :1]))
    )
    box = Box((3, 100), (50, 600))
    assert same(checkpoint.read("g", "x", box), whole[box.slices])
    monkeypatch.setattr(tile_reader, "STEP", 100)  # less than a row
    assert same(checkpoint.read("g", "x", box), whole[box.slices])
    flip(checkpoint, "x", (40, 333))
    with raises(CheckpointError, "g/x.checksum"):
        checkpoint.read("g", "x", box)


# ---- stores ----


class Far(storage.Local):
    """A folder that is slow to answer: counts requests, and how many were under way at the same time."""

    remote = True

    def __init__(self, root, gap=MIB, seconds=0.0):
        super().__init__(root)
        self.gap, self.seconds, self.requests, self.now, self.most = gap, seconds, [], 0, 0
        self._lock = threading.Lock()

    def ranges(self, path):
        return _FarRanges(self, path)


class _FarRanges:
    def __init__(self, far, path):
        self.far, self.path, self.bytes_read = far, path, 0
        self._near = storage.Local.ranges(far, path)

    def read_into(self, offset, into):
        far = self.far
        with far._lock:
            far.requests.append((self.path, offset, len(into)))
            far.now += 1
            far.most = max(far.most, far.now)
        time.sleep(far.seconds)
        self._near.read_into(offset, into)
        with far._lock:
            far.now -= 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._near.__exit__(*error)


def far_away(checkpoint, **options):
    checkpoint._storage = Far(checkpoint.path, **options)
    return checkpoint._storage


def test_a_store_gets_few_large_requests_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tile_reader, "BLOCK", MIB)
    whole = {f"t{i:03d}": tensor((64, 1024), salt=str(i)) for i in range(40)}  # 10 MiB
    checkpoint = saved(tmp_path, whole)
    far = far_away(checkpoint, seconds=0.02)
    into = {n: torch.zeros_like(t) for n, t in whole.items()}
    checkpoint.restore("g", into)
    assert all(same(into[n], t) for n, t in whole.items())
    assert len(far.requests) == 10 and sum(size for *_, size in far.requests) == 10 * MIB
    assert 2 <= far.most <= tile_reader.REQUESTS and checkpoint.bytes_read == 10 * MIB


def test_a_store_is_asked_for_what_lies_between_rather_than_twice(wide):
    checkpoint, whole = wide
    checkpoint = open_checkpoint(checkpoint.path)
    far = far_away(checkpoint)
    box = Box((0, 2048), (256, 2048))
    assert same(checkpoint.read("g", "x", box), whole[box.slices])
    assert len(far.requests) == 1 and far.requests[0][2] == 255 * 32768 + 8192 == checkpoint.bytes_read
    far = far_away(checkpoint, gap=4096)  # rows are further apart
    assert same(checkpoint.read("g", "x", Box((0, 2048), (128, 2048))), whole[:128, 2048:4096])
    assert len(far.requests) == 128 and {size for *_, size in far.requests} == {8192}


def test_files_of_a_store_are_read_ahead(tmp_path):
    """Thirty files of one tensor each: the next are asked for while one is on its way."""
    whole = {"x": tensor((30, 100))}
    layouts = {"x": Layout(Mesh(("d",), (30,)), (Shard(0),), (30, 100))}
    checkpoint = saved(tmp_path, whole, layouts)
    far = far_away(checkpoint, seconds=0.02)
    assert same(checkpoint.read("g", "x"), whole["x"])
    assert len(far.requests) == 30 and far.most >= 4


def test_two_parts_of_one_tile_do_not_drop_what_was_asked_ahead(tmp_path, monkeypatch):
    """The boxes of an interval of the storage meet in a row: its tile is asked for twice, the files behind it once."""
    monkeypatch.setattr(tile_reader, "BLOCK", 512)
    whole = {"x": tensor((40, 30))}
    layouts = {"x": Layout(Mesh(("d",), (4,)), (Shard(0),), (40, 30))}  # files of 1,200 bytes
    checkpoint = saved(tmp_path, whole, layouts)
    far = far_away(checkpoint)
    ragged = Layout(Mesh(("d",), (2,)), (RaggedShard((7, 1193)),), (40, 30))
    into = {"x": torch.zeros(1193)}
    checkpoint.restore("g", into, {"x": ragged}, 1)
    assert same(into["x"], whole["x"].view(-1)[7:])
    assert Counter(path for path, *_ in far.requests) == {f"g.00{i}.safetensors": 6 if i == 0 else 3 for i in range(4)}


def test_a_store_that_fails_is_no_damage(tmp_path, monkeypatch):
    checkpoint = saved(tmp_path, {"x": tensor((64, 1024))})
    far_away(checkpoint)

    def fail(self, offset, into):
        raise OSError(5, "the store said no", "bucket/g.safetensors")

    monkeypatch.setattr(_FarRanges, "read_into", fail)
    for attempt in (lambda: checkpoint.read("g", "x"), checkpoint.verify):
        with raises(StorageError, "g.safetensors"):
            attempt()


def test_a_file_that_goes_or_shrinks_while_it_is_open(tmp_path):
    checkpoint = saved(tmp_path, {"x": tensor((64, 1024))})
    file = checkpoint.path / "g.safetensors"
    os.truncate(file, 1000)
    with raises(CheckpointError, "g.safetensors"):
        checkpoint.read("g", "x")
    with raises(CheckpointError, "g.safetensors.nbytes"):
        checkpoint.verify()
    file.unlink()
    with raises(CheckpointError, "g.safetensors"):
        checkpoint.read("g", "x")


def test_the_random_state_and_the_source_stay_as_they_are(tmp_path):
    state = torch.get_rng_state()
    checkpoint = saved(tmp_path, {"x": tensor((64, 64))})
    before = (checkpoint.path / "g.safetensors").read_bytes()
    checkpoint.read("g", "x").zero_()
    assert torch.equal(torch.get_rng_state(), state) and (checkpoint.path / "g.safetensors").read_bytes() == before
