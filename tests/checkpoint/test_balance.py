"""How holders of the same shares divide them: all of it once, evenly, in boxes of some size, the same everywhere."""

import heapq
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.cases import columns_of, least, specs
from tilth.checkpoint import planning
from tilth.checkpoint.planning import (
    LEAST,
    Held,
    Spec,
    cuttable,
    deal,
    plan_group,
    spec_table,
    specs_of,
    tiling_problem,
)
from tilth.core.layout import Layout, Mesh, Replicate, Shard
from tilth.models.config import DecoderConfig
from tilth.plan.layout import layouts

quick = settings(max_examples=2 * settings.default.max_examples, deadline=None)

# ---- the level ----


def poured(load, total):
    """Byte after byte to the one with the fewest: what everyone has at the end, sorted."""
    heap = list(load)
    heapq.heapify(heap)
    for _ in range(total):
        heapq.heapreplace(heap, heap[0] + 1)
    return sorted(heap)


@quick
@given(st.lists(st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 60)), min_size=1))
def test_the_level_is_that_of_pouring_byte_after_byte(shares):
    counts = [len(load) for load, _ in shares]
    starts = np.cumsum(counts) - counts
    load = np.array([n for loads, _ in shares for n in loads], np.int64)
    taken = planning._levelled(load, starts, np.array([total for _, total in shares], np.int64))
    assert (taken >= 0).all() and taken.dtype == np.int64
    for (loads, total), start in zip(shares, starts):
        mine = taken[start : start + len(loads)]
        assert mine.sum() == total and sorted((mine + loads).tolist()) == poured(loads, total)


# ---- some tensors and their holders ----


@st.composite
def cases(draw):
    """Tensors [shares * rows, columns] split by rows; holders of each share, with other numbers, and their loads."""
    shares = draw(st.integers(1, 3))
    tensors = []
    for _ in range(draw(st.integers(1, 5))):
        rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 9))
        offset = np.array([[rows * s, 0] for s in range(shares)], np.int64)
        size = np.tile(np.array([rows, columns], np.int64), (shares, 1))
        tensors.append(Held(offset, size, np.arange(shares), draw(st.sampled_from([1, 2, 4]))))
    counts = draw(st.lists(st.integers(1, 5), min_size=shares, max_size=shares))
    holders = np.array(draw(st.permutations(range(10, 10 + sum(counts)))), np.int64)
    load = np.array(draw(st.lists(st.integers(0, 200), min_size=sum(counts), max_size=sum(counts))), np.int64)
    return tensors, np.cumsum(counts) - counts, holders, load


def shape_of(held):
    return tuple((held.offset + held.size).max(0).tolist())


@quick
@given(cases(), st.sampled_from([1, 3, 8, 40]))
def test_holders_write_all_of_their_share_once_in_boxes_of_some_size(case, nbytes):
    tensors, starts, holders, _ = case
    with least(nbytes):
        found = deal(*case)
        whole = {(i, tuple(o)) for i, held in enumerate(tensors) for o in held.offset.tolist()}
        for i, (held, dealt) in enumerate(zip(tensors, found, strict=True)):
            assert not tiling_problem(shape_of(held), dealt.offset, dealt.size)
            assert [tuple(o) for o in dealt.offset.tolist()] == sorted(map(tuple, dealt.offset.tolist()))
            written = dealt.size.prod(1) * held.itemsize
            for offset, size, writer, n in zip(dealt.offset, dealt.size.tolist(), dealt.writer, written):
                share = int(np.flatnonzero((held.offset <= offset).all(1))[-1])
                stop = [*starts, len(holders)][share + 1]
                assert writer in holders[starts[share] : stop]
                assert ((i, tuple(offset.tolist())) in whole and size == held.size[share].tolist()) or n >= nbytes
            assert dict(zip(dealt.writers.tolist(), dealt.nbytes.tolist())) == {
                writer: int(written[dealt.writer == writer].sum()) for writer in set(dealt.writer.tolist())
            }
            for writer in dealt.writers:
                mine = dealt.writer == writer
                assert dealt.before[mine].tolist() == (np.cumsum(written[mine]) - written[mine]).tolist()
        pieces = sum(len(dealt.writer) for dealt in found)
        assert pieces <= sum(len(held.share) for held in tensors) + len(holders) - len(starts)


@quick
@given(cases(), st.sampled_from([1, 3, 8, 40]))
def test_the_level_is_missed_by_no_more_than_is_said(case, nbytes):
    tensors, starts, holders, load = case
    total = sum(held.size.prod(1) * held.itemsize for held in tensors)
    with least(nbytes):
        found = deal(*case)
        wanted = planning._levelled(load, starts, total)
        miss = max(_miss(held) for held in tensors)
    written = dict.fromkeys(holders.tolist(), 0)
    for dealt in found:
        for writer, n in zip(dealt.writers.tolist(), dealt.nbytes.tolist()):
            written[writer] += n
    assert all(abs(written[holder] - n) <= 2 * miss for holder, n in zip(holders.tolist(), wanted.tolist()))


def _miss(held):
    """How far from where it should be a cut through a box of the tensor may lie."""
    rows, columns = held.size[0].tolist()
    along_rows, along_columns = columns * held.itemsize, rows * held.itemsize
    small = along_rows <= planning.LEAST // 2
    unit = along_rows if small or (along_columns > planning.LEAST // 2 and rows >= columns) else along_columns
    part = -(-planning.LEAST // unit) * unit
    nbytes = rows * columns * held.itemsize
    return nbytes / 2 if nbytes < 2 * part else part


def one(size, itemsize=1):
    zero = np.zeros((1, len(size)), np.int64)
    return Held(zero, np.array([size], np.int64), np.zeros(1, np.int64), itemsize)


def dealt_among(load, tensors):
    """The boxes and writers of each tensor that all hold."""
    found = deal(tensors, np.zeros(1, np.int64), np.arange(len(load)), np.array(load, np.int64))
    return [list(zip(d.offset.tolist(), d.size.tolist(), d.writer.tolist())) for d in found]


def test_a_matrix_is_cut_by_rows():
    with least(8):
        assert dealt_among([0, 0], [one((8, 4))]) == [[([0, 0], [4, 4], 0), ([4, 0], [4, 4], 1)]]


def test_who_has_more_takes_less():
    with least(4):
        assert dealt_among([8, 0, 100], [one((8, 4))]) == [[([0, 0], [3, 4], 0), ([3, 0], [5, 4], 1)]]


def test_one_goes_on_where_the_other_stopped():
    with least(4):
        found = dealt_among([0, 0, 0], [one((6, 4)), one((6, 2), 2)])
    assert found == [[([0, 0], [4, 4], 0), ([4, 0], [2, 4], 1)], [([0, 0], [2, 2], 1), ([2, 0], [4, 2], 2)]]


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        ((15,), [[15]]),  # two parts of 8 bytes need 16
        ((16,), [[8], [8]]),
        ((2, 2, 4), [[2, 2, 2], [2, 2, 2]]),  # slices of 8 and of 4 bytes: the smaller ones
        ((2, 3, 3), [[2, 3, 3]]),  # the smallest have 6 bytes, so a part has 12, and there are not two
        ((2, 16), [[2, 8], [2, 8]]),  # rows of 16 bytes are too coarse
        ((2, 16, 1), [[2, 8, 1], [2, 8, 1]]),
        ((4, 4, 1), [[2, 4, 1], [2, 4, 1]]),
        ((1, 1, 1), [[1, 1, 1]]),
    ],
)
def test_along_which_dimension_a_box_is_cut(size, pieces):
    with least(8):
        assert [s for _, s, _ in dealt_among([0, 0], [one(size)])[0]] == pieces


@pytest.mark.parametrize(
    ("load", "first", "second"),
    [
        (0, [([0], [100], 0)], [([0], [50], 0), ([50], [150], 1)]),
        (94, [([0], [100], 0)], [([0], [200], 1)]),  # 3 bytes of the second are nearer to none than to 8
        (90, [([0], [100], 0)], [([0], [8], 0), ([8], [192], 1)]),  # 5 are nearer to 8
        (106, [([0], [100], 0)], [([0], [200], 1)]),  # all but 3 bytes of the first
        (110, [([0], [92], 0), ([92], [8], 1)], [([0], [200], 1)]),
    ],
)
def test_near_the_ends_of_boxes(load, first, second):
    with least(8):
        assert dealt_among([load, 0], [one((100,)), one((200,))]) == [first, second]


def test_many_holders_of_little_cut_at_multiples_of_the_least_part():
    """12 or 13 bytes for each of eight; the last has what is left."""
    with least(8):
        found = dealt_among([0] * 8, [one((100,))])[0]
    assert [offset for (offset,), _, _ in found] == [0, 16, 24, 40, 56, 64, 80, 88]
    assert [writer for _, _, writer in found] == list(range(8))


# ---- plans ----


@pytest.mark.parametrize("nbytes", [1, 12, LEAST])
@given(specs())
def test_the_same_answer_from_a_table_that_travelled(nbytes, group):
    """As the controller makes it of what a rank tells: other objects, nothing kept."""
    with least(nbytes):
        first = plan_group(group)
    with least(nbytes):
        again = plan_group(specs_of(json.loads(json.dumps(spec_table(group)))))
        assert again is not first and again.nbytes == first.nbytes
        assert [again.header(rank) for rank in again.ranks] == [first.header(rank) for rank in first.ranks]
        for a, b in zip(columns_of(again), columns_of(first), strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


LARGE = DecoderConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128,
)  # fmt: skip


def hsdp(ranks):
    """8B parameters in fp32 in copies over 32 ranks each."""
    found = layouts(LARGE, Mesh.of({"dp": ranks // 32, "fsdp": 32}))
    return [Spec(name, layout, "float32") for name, layout in found.items()]


def busiest(plan):
    return max(plan.nbytes) * len(plan.ranks) / sum(plan.nbytes)


@pytest.mark.parametrize(("ranks", "bound"), [(64, 1.01), (2048, 1.03), (8192, 1.1)])
def test_no_rank_of_thousands_writes_much_more_than_the_mean(ranks, bound):
    group = hsdp(ranks)
    plan, boxes = plan_group(group), 0
    assert busiest(plan) < bound
    for spec, columns in zip(group, columns_of(plan), strict=True):
        boxes += len(columns.size)
        assert not tiling_problem(spec.layout.shape, columns.offset, columns.size)
        if len(columns.size) > 32:
            assert columns.size.prod(1).min() * 4 >= LEAST
    assert 32 * len(group) < boxes <= 32 * len(group) + ranks
    if ranks == 2048:
        with least(1 << 60):
            assert busiest(plan_group(group)) > 2.5  # were they not cut


def test_small_tensors_stay_whole():
    """Cutting them would not pay."""
    mesh = Mesh(("dp",), (4,))
    rows = LEAST // 2048
    group = [Spec(n, Layout(mesh, (Replicate(),), (rows, 511)), "float32") for n in "abcd"]
    assert not cuttable(2 * LEAST - 1) and cuttable(2 * LEAST)
    plan = plan_group(group)
    assert sorted(p.key for rank in range(4) for p in plan.pieces(rank)) == list("abcd")
    assert len(set(plan.nbytes)) == 1


def test_small_ones_fill_what_cuts_left():
    """Who has a row less of the large one, which is cut at multiples of two, writes the small one."""
    mesh = Mesh(("dp",), (2,))
    both = (Replicate(),)
    with least(8):
        group = [Spec("w", Layout(mesh, both, (5, 4)), "int8"), Spec("a", Layout(mesh, both, (3,)), "int8")]
        plan = plan_group(group)
        assert [[p.key for p in plan.pieces(rank)] for rank in (0, 1)] == [["a", "w[0:2,0:4]"], ["w[2:5,0:4]"]]


def test_tensors_with_other_holders_level_what_the_first_left():
    """What two hold is cut between them, then what all four hold among those that have less."""
    mesh = Mesh(("dp", "tp"), (2, 2))
    with least(4):
        group = [
            Spec("all", Layout(mesh, (Replicate(), Replicate()), (12, 4)), "int8"),
            Spec("pairs", Layout(mesh, (Replicate(), Shard(0)), (15, 4)), "int8"),
        ]
        plan = plan_group(group)
        assert sum(plan.nbytes) == 27 * 4 and max(plan.nbytes) - min(plan.nbytes) <= 4
