"""Boxes and layouts: over all ranks they tile the tensor exactly, as brute force and DTensor say."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.errors import raises
from tilth.core.errors import ArgumentError
from tilth.core.layout import Box, Layout, Mesh, RaggedShard, Replicate, Shard, interval_boxes, runs
from tilth.core.random import fill_normal_, stream

many = settings(max_examples=3 * settings.default.max_examples, deadline=None)


@st.composite
def boxes_in(draw, shape):
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset)))


@st.composite
def box_pairs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(box.offset, box.size))))


@many
@given(box_pairs())
def test_box_algebra_against_sets_of_cells(case):
    shape, a, b = case
    assert a.numel == len(cells(a))
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    assert common == b.intersect(a)
    if cells(b):
        assert a.contains(b) == (cells(b) <= cells(a))
    assert Box.whole(shape).contains(a)


@many
@given(box_pairs())
def test_slices_and_relative_boxes(case):
    shape, a, b = case
    tensor = np.arange(math.prod(shape)).reshape(shape)
    assert tensor[a.slices].shape == a.size
    common = a.intersect(b) or Box(a.offset, (0,) * len(shape))
    np.testing.assert_array_equal(tensor[a.slices][common.within(a).slices], tensor[common.slices])
    assert common.within(a).shifted(a.offset) == common


def test_a_scalar_is_one_box():
    box = Box.whole(())
    assert box == Box((), ()) and box.numel == 1 and box.intersect(box) == box
    assert interval_boxes((), 0, 1) == [box] and interval_boxes((), 0, 0) == []
    assert Layout.single(()).boxes(0) == [box]


@many
@given(box_pairs())
def test_runs_are_the_flat_indices_in_order(case):
    shape, box, _ = case
    expected = np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel()
    starts, length = runs(box, shape)
    np.testing.assert_array_equal([s + i for s in starts for i in range(length)], expected)


@pytest.mark.parametrize(
    ("box", "shape", "expected"),
    [
        (Box((2, 0), (3, 5)), (9, 5), ([10], 15)),
        (Box((1, 2), (2, 3)), (4, 6), ([8, 14], 3)),
        (Box((1, 2, 0), (1, 2, 4)), (2, 5, 4), ([28], 8)),
        (Box((0,), (0,)), (3,), ([], 0)),
    ],
)
def test_runs_are_as_long_as_they_can_be(box, shape, expected):
    assert runs(box, shape) == expected


@many
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_interval_boxes_are_the_interval_in_flat_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    pieces = interval_boxes(tuple(shape), start, stop)
    flat = np.arange(numel).reshape(shape)
    got = [index for box in pieces for index in flat[box.slices].ravel()]
    assert got == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * (len(shape) - 1) + 1)
    assert all(box.numel for box in pieces)


def test_mesh_is_a_table():
    mesh = Mesh(("dp", "tp"), (2, 3))
    assert len(mesh) == 6
    assert [mesh.coordinates(r) for r in range(6)] == list(itertools.product(range(2), range(3)))
    assert all(mesh.rank(mesh.coordinates(r)) == r for r in range(6))
    permuted = Mesh(("dp", "tp"), (2, 2), (3, 1, 0, 2))
    assert permuted.coordinates(0) == (1, 0) and permuted.rank((0, 0)) == 3


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Mesh(("dp",), (2, 2)), "names"),
        (lambda: Mesh(("dp", "dp"), (2, 2)), "names"),
        (lambda: Mesh(("dp",), (2,), (0, 0)), "ranks"),
        (lambda: Mesh(("dp",), (2,), (0, 1, 2)), "ranks"),
        (lambda: Mesh(("dp",), (2,)).coordinates(2), "rank"),
        (lambda: Mesh(("dp",), (2,)).rank((2,)), "coordinates"),
        (lambda: Layout(Mesh(("dp",), (2,)), (), (4,)), "placements"),
        (lambda: Layout(Mesh(("dp",), (2,)), (Shard(1),), (4,)), "dim"),
        (lambda: Layout(Mesh(("dp", "tp"), (2, 2)), (RaggedShard((1, 1)), Shard(0)), (4,)), "order"),
        (lambda: Layout(Mesh(("dp", "tp"), (2, 2)), (Shard(0), Shard(0)), (4,), (0, 0)), "placements"),
        (lambda: Layout(Mesh(("dp",), (2,)), (RaggedShard((1, 2)),), (4,)).boxes(0), "units"),
        (lambda: Layout(Mesh(("dp",), (2,)), (RaggedShard((1, 1, 2)),), (4,)).boxes(0), "units"),
        (lambda: Layout(Mesh(("dp",), (2,)), (RaggedShard((0, 0)),), (4,)).boxes(0), "units"),
        (lambda: Layout(Mesh(("dp",), (2,)), (RaggedShard((-1, 2)),), (4,)).boxes(0), "units"),
        (lambda: Layout(Mesh(("tp",), (4,)), (Shard(0, copies=3),), (4,)).boxes(0), "copies"),
        (lambda: Layout(Mesh(("tp",), (4,)), (Shard(0, copies=0),), (4,)).boxes(0), "copies"),
    ],
)
def test_what_cannot_be(make, key):
    with raises(ArgumentError, key):
        make()


@st.composite
def layouts(draw, ragged=True, ordered=True, copied=None):
    """Any mesh up to 3-D over permuted ranks, shards of any dimension (even twice), maybe a ragged split at the end.

    copied (default: as ragged): pieces may lie on several neighbouring ranks.
    """
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = tuple(draw(st.permutations(range(math.prod(sizes)))))
    mesh = Mesh(("a", "b", "c")[: len(sizes)], sizes, ranks)
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    placements = [draw(st.one_of(st.just(Replicate()), shards(len(shape), n, ragged, copied))) for n in sizes]
    order = tuple(draw(st.permutations(range(len(sizes))))) if ordered else tuple(range(len(sizes)))
    if ragged and draw(st.booleans()):
        units = tuple(draw(st.lists(st.integers(0, 3), min_size=sizes[order[-1]], max_size=sizes[order[-1]])))
        placements = [p if i in order[:0] else Replicate() for i, p in enumerate(placements)]
        placements[order[-1]] = RaggedShard(units)
        assume(sum(units) and math.prod(shape) % sum(units) == 0)
    return Layout(mesh, tuple(placements), shape, order)


def shards(dimensions: int, parts: int, ragged: bool, copied: bool | None):
    copies = [c for c in range(1, parts + 1) if parts % c == 0] if (ragged if copied is None else copied) else [1]
    return st.builds(Shard, st.integers(0, dimensions - 1), st.sampled_from(copies))


def replicas(layout: Layout) -> int:
    copies = {Replicate: lambda p, n: n, Shard: lambda p, n: p.copies, RaggedShard: lambda p, n: 1}
    return math.prod(copies[type(p)](p, n) for n, p in zip(layout.mesh.sizes, layout.placements))


def test_copies_lie_on_neighbouring_ranks():
    """Two key heads on four ranks: ranks 0 and 1 hold the first, 2 and 3 the second."""
    layout = Layout(Mesh(("tp",), (4,)), (Shard(0, copies=2),), (6, 5))
    assert [layout.boxes(r)[0].offset[0] for r in range(4)] == [0, 0, 3, 3]
    assert layout.to_json()["placements"] == [{"shard": 0, "copies": 2}]


@many
@given(layouts())
def test_boxes_over_ranks_tile_the_tensor(layout):
    count = np.zeros(layout.shape, int)
    for rank in layout.mesh.ranks:
        for box in layout.boxes(rank):
            assert box.numel
            count[box.slices] += 1
    assert (count == replicas(layout)).all()


@many
@given(layouts())
def test_shards_of_a_random_fill_are_the_global_tensor(layout):
    whole = fill_normal_(torch.empty(layout.shape), stream(0, "weight"))
    got = torch.full(layout.shape, torch.nan)
    for rank in layout.mesh.ranks:
        for box in layout.boxes(rank):
            got[box.slices] = fill_normal_(torch.empty(box.size), stream(0, "weight"), 1.0, box, layout.shape)
    assert torch.equal(got, whole)


@many
@given(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(1, 4), max_size=2))
def test_ragged_shards_are_flat_intervals_in_order(scale, units, rest):
    assume(sum(units))
    shape = (sum(units) * scale, *rest)
    layout = Layout(Mesh(("dp",), (len(units),)), (RaggedShard(tuple(units)),), shape)
    flat = torch.arange(math.prod(shape)).view(shape)
    parts = [
        torch.cat([flat[b.slices].flatten() for b in layout.boxes(r)] or [flat.new_empty(0)]) for r in range(len(units))
    ]
    assert torch.equal(torch.cat(parts), flat.flatten())
    assert [len(p) for p in parts] == [u * scale * math.prod(rest) for u in units]


def test_ragged_inside_a_shard():
    layout = Layout(Mesh(("tp", "dp"), (2, 3)), (Shard(1), RaggedShard((1, 0, 3))), (4, 4))
    assert layout.boxes(0) == [Box((0, 0), (1, 2))]
    assert layout.boxes(1) == []
    assert layout.boxes(5) == [Box((1, 2), (3, 2))]
    count = np.zeros((4, 4), int)
    for rank in range(6):
        for box in layout.boxes(rank):
            count[box.slices] += 1
    assert (count == 1).all()


def test_boxes_on_a_large_mesh():
    layout = Layout(Mesh(("pp", "dp", "tp"), (12, 125, 8)), (Replicate(), Shard(0), Shard(1)), (100_000, 4096))
    assert layout.boxes(11_999) == [Box((99_200, 3584), (800, 512))]


@many
@given(layouts())
def test_json_round_trip(layout):
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@many
@given(layouts(ragged=False, ordered=False))
def test_boxes_equal_dtensor(layout):
    placements = tuple(TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in layout.placements)
    for rank in layout.mesh.ranks:
        at = layout.mesh.coordinates(rank)
        size, offset = _compute_local_shape_and_global_offset(layout.shape, layout.mesh.sizes, at, placements)
        expected = [Box(tuple(offset), tuple(size))] if math.prod(size) else []
        assert layout.boxes(rank) == expected


def test_split_from_right_to_left_is_a_strided_shard():
    """FSDP over tensor parallelism: the tensor dimension is split by tp first."""
    mesh = Mesh(("dp", "tp"), (2, 2))
    layout = Layout(mesh, (Shard(0), Shard(0)), (8, 8), (1, 0))
    placements = _StridedShard(0, split_factor=2), TorchShard(0)
    assert [layout.boxes(r)[0].offset[0] for r in range(4)] == [0, 4, 2, 6]
    for rank in range(4):
        size, _ = _compute_local_shape_and_global_offset((8, 8), (2, 2), mesh.coordinates(rank), placements)
        assert layout.boxes(rank)[0].size == tuple(size)
