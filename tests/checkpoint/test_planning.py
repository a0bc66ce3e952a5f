"""A plan: every element is written once, replicas share the work, and every rank computes the same alone."""

import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.checkpoint.cases import columns_of, layouts, least, meshes, specs
from tests.errors import raises
from tests.examples import examples
from tilth.checkpoint import planning
from tilth.checkpoint.planning import (
    ALIGNMENT,
    DTYPES,
    LARGEST_TILE,
    SAFETENSORS_NAMES,
    GroupPlan,
    Spec,
    digest_of,
    plan_group,
    safetensors_header,
    spec_table,
    specs_of,
    tile_counts,
    tiles,
    tiling_problem,
)
from tilth.checkpoint.snapshot import held
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout, Mesh, RaggedShard, Replicate, Shard

quick = settings(max_examples=2 * settings.default.max_examples, deadline=None)


def itemsize(spec):
    return DTYPES[spec.dtype].itemsize


def fresh(group):
    """A plan that comes from no cache."""
    group = tuple(group)
    planning._shares.cache_clear()
    return GroupPlan(digest_of(spec_table(group)), group)


# ---- the plan ----


@pytest.mark.parametrize("nbytes", [planning.LEAST, 16, 1])
@quick
@given(specs())
def test_every_element_is_written_once_and_files_have_no_gaps(nbytes, group):
    """Also where shares are cut."""
    with least(nbytes):
        check_files(group, plan_group(group))


def check_files(group, plan):
    assert list(plan.ranks) == sorted({rank for spec in group for rank in spec.layout.mesh.ranks})
    count = {spec.name: np.zeros(spec.layout.shape, int) for spec in group}
    by_name = {spec.name: spec for spec in group}
    there = Counter()
    for i, rank in enumerate(plan.ranks):
        pieces, end = plan.pieces(rank), 0
        for piece in pieces:
            spec = by_name[piece.name]
            assert any(box.contains(piece.box) for box in held(spec.layout, rank))
            count[piece.name][piece.box.slices] += 1
            there[piece.name] += 1
            assert piece.byte0 == end and piece.byte0 % itemsize(spec) == 0 and piece.dtype == spec.dtype
            assert piece.nbytes == piece.box.numel * itemsize(spec)
            whole = piece.box == Box.whole(spec.layout.shape)
            assert piece.key == piece.name if whole else piece.key.startswith(f"{piece.name}[")
            end += piece.nbytes
        order = [(-itemsize(by_name[p.name]), p.name, p.box) for p in pieces]
        assert order == sorted(order)
        assert plan.data_nbytes(rank) == end == plan.nbytes[i] and plan.writes[i] == bool(pieces)
        assert plan.tiles[i] == sum(tiles(p.box.size, itemsize(by_name[p.name])).total for p in pieces)
    assert all((c == 1).all() for c in count.values())
    assert all(there[spec.name] >= 1 for spec in group)  # those without elements too


@pytest.mark.parametrize("nbytes", [planning.LEAST, 1])
@quick
@given(specs())
def test_the_plan_of_each_rank_is_in_the_columns_of_all(nbytes, group):
    with least(nbytes):
        check_columns(group, plan_group(group))


def check_columns(group, plan):
    from_ranks = sorted(
        (p.name, p.box.offset, p.box.size, rank, p.byte0) for rank in plan.ranks for p in plan.pieces(rank)
    )
    from_columns = []
    for spec, columns in zip(group, columns_of(plan), strict=True):
        offsets = [tuple(o) for o in columns.offset.tolist()]
        assert offsets == sorted(offsets)
        for o, s, w, b in zip(offsets, columns.size.tolist(), columns.file.tolist(), columns.byte0.tolist()):
            from_columns.append((spec.name, o, tuple(s), plan.ranks[w], b))
    assert from_ranks == sorted(from_columns)


@quick
@given(st.data())
def test_shares_are_those_of_the_layout(data):
    mesh = data.draw(meshes())
    layout = data.draw(layouts(mesh, tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))))
    found = planning._shares(layout)
    for place, rank in enumerate(mesh.ranks):
        share = int(found.of[place])
        rows = np.flatnonzero(found.share == share)
        boxes = [Box(tuple(found.offset[row].tolist()), tuple(found.size[row].tolist())) for row in rows]
        assert boxes == held(layout, rank)
        numels = [box.numel for box in boxes]
        assert found.before[rows].tolist() == [sum(numels[:i]) for i in range(len(numels))]
        assert sum(numels) == (int(found.numel[share]) if boxes else 0)
        assert found.largest >= max(numels, default=0)


def reference_owners(group):
    """The rule in plain Python: (tensor, boxes of the share) -> rank."""
    load, owners = Counter(), {}
    shares = {}
    for spec in group:
        by_boxes = shares.setdefault(spec.name, {})
        for rank in spec.layout.mesh.ranks:
            boxes = tuple(held(spec.layout, rank))
            if boxes:
                by_boxes.setdefault(boxes, []).append(rank)

    def nbytes(spec, boxes):
        return sum(box.numel for box in boxes) * itemsize(spec)

    def order(spec):
        by_boxes = shares[spec.name]
        return max(map(len, by_boxes.values())), -max(nbytes(spec, boxes) for boxes in by_boxes), spec.name

    for spec in sorted(group, key=order):
        taken = {boxes: min(ranks, key=lambda rank: load[rank]) for boxes, ranks in shares[spec.name].items()}
        for boxes, rank in taken.items():
            owners[spec.name, boxes] = rank
            load[rank] += nbytes(spec, boxes)
    return owners


@quick
@given(specs(most=9))
def test_owners_follow_the_rule(group):
    plan, expected = plan_group(group), {}
    for (name, boxes), rank in reference_owners(group).items():
        expected.setdefault((name, rank), []).extend(boxes)
    found = {}
    for rank in plan.ranks:
        for piece in plan.pieces(rank):
            found.setdefault((piece.name, rank), []).append(piece.box)
    assert found == expected


@quick
@given(st.data())
def test_replicas_are_balanced(data):
    """Ranks that hold the same differ by at most one share; where all hold all no one exceeds the mean by more."""
    mesh = data.draw(meshes())
    shapes = data.draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=2).map(tuple), min_size=1))
    kinds = [data.draw(layouts(mesh, shape)) for shape in shapes]
    dtypes = st.sampled_from(["int8", "bfloat16", "float32", "float64"])
    group = [Spec(f"t{i}", layout, data.draw(dtypes)) for i, layout in enumerate(kinds)]
    plan = plan_group(group)
    holds = {rank: [held(spec.layout, rank) for spec in group] for rank in mesh.ranks}
    greatest = max(
        itemsize(spec) * sum(box.numel for box in boxes[i]) for boxes in holds.values() for i, spec in enumerate(group)
    )
    for a, b in itertools.combinations(mesh.ranks, 2):
        if holds[a] == holds[b]:
            assert abs(plan.data_nbytes(a) - plan.data_nbytes(b)) <= greatest
    everyone = [Spec(s.name, Layout(mesh, (Replicate(),) * 3, s.layout.shape), s.dtype) for s in group]
    loads = plan_group(everyone).nbytes
    largest = max(math.prod(spec.layout.shape) * itemsize(spec) for spec in group)
    assert max(loads) <= sum(loads) / len(loads) + largest


def test_replicated_parameters_are_spread_over_all_replicas():
    """A model that every rank has whole: each writes about an eighth."""
    mesh = Mesh(("dp",), (8,))
    shapes = [(512, 128), *[(128, 128), (128, 128), (128, 384), (384, 128), (128,)] * 12, (512, 128)]
    plan = plan_group([Spec(f"t{i:03d}", Layout(mesh, (Replicate(),), s), "float32") for i, s in enumerate(shapes)])
    total = 4 * sum(map(math.prod, shapes))
    assert sum(plan.nbytes) == total and max(plan.nbytes) < 1.1 * total / 8


def test_what_all_hold_goes_to_those_with_less():
    """Rank 0 has the large shard: the norm is written by rank 1, though rank 0 comes first."""
    mesh = Mesh(("fsdp",), (2,))
    norm, w = Layout(mesh, (Replicate(),), (2,)), Layout(mesh, (Shard(0),), (5, 4))
    plan = plan_group([Spec("norm", norm, "float32"), Spec("w", w, "float32")])
    assert [piece.key for piece in plan.pieces(0)] == ["w[0:3,0:4]"]
    assert [piece.key for piece in plan.pieces(1)] == ["norm", "w[3:5,0:4]"]


def test_loads_of_different_meshes_add_up():
    """What the second mesh holds goes to the rank that the first one left idle."""
    alone, both = Mesh(("dp",), (1,), (4,)), Mesh(("dp",), (2,), (4, 9))
    group = [Spec("a", Layout(both, (Replicate(),), (3,)), "int8"), Spec("b", Layout.single((100,)), "int8")]
    group += [Spec("c", Layout(alone, (Replicate(),), (2,)), "int8")]
    plan = plan_group(group)
    assert plan.ranks == (0, 4, 9) and plan.nbytes == [100, 2, 3]
    assert [piece.name for piece in plan.pieces(9)] == ["a"]


def test_planning_for_thousands_of_ranks_takes_moments():
    mesh = Mesh(("dp", "fsdp", "tp"), (4, 128, 8))
    matrix, vector = (Replicate(), Shard(0), Shard(1)), (Replicate(), Shard(0), Replicate())
    group = [Spec(f"layers.{i}.w", Layout(mesh, matrix, (4096, 4096)), "float32") for i in range(100)]
    group += [Spec(f"layers.{i}.norm", Layout(mesh, vector, (4096,)), "float32") for i in range(100)]
    plan = plan_group(group)
    assert 27 <= len(plan.pieces(4095)) <= 30  # a quarter of the matrices, 1/32 of the vectors
    assert sum(plan.nbytes) == 400 * (4096**2 + 4096)
    assert sum(len(columns.byte0) for columns in columns_of(plan)) == 100 * (1024 + 128)


def test_ragged_shards_of_many_ranks():
    mesh = Mesh(("fsdp",), (64,))
    units = tuple(random.Random(0).choices(range(5), k=64))
    layout = Layout(mesh, (RaggedShard(units),), (sum(units), 3, 7))
    plan = plan_group([Spec("w", layout, "bfloat16")])
    assert plan.nbytes == [2 * 21 * n for n in units] and plan.writes == [n > 0 for n in units]


# ---- files ----


@settings(max_examples=examples(25), deadline=None)
@given(specs(most=4))
def test_headers_are_those_of_safetensors_files(tmp_path_factory, group):
    plan = plan_group(group)
    for rank in plan.ranks[:4]:
        header, pieces = plan.header(rank), plan.pieces(rank)
        assert len(header) % ALIGNMENT == 0 and int.from_bytes(header[:8], "little") == len(header) - 8
        path = tmp_path_factory.mktemp("file") / "x.safetensors"
        path.write_bytes(header + bytes(plan.data_nbytes(rank)))
        with safe_open(path, "pt") as file:
            assert sorted(file.keys()) == sorted(piece.key for piece in pieces)
            for piece in pieces:
                found = file.get_slice(piece.key)
                assert tuple(found.get_shape()) == piece.box.size
                assert found.get_dtype() == SAFETENSORS_NAMES[DTYPES[piece.dtype]]


def test_a_header_byte_for_byte():
    layout = Layout(Mesh(("tp",), (2,)), (Shard(1),), (2, 3))
    plan = plan_group([Spec("b", Layout.single(()), "bool"), Spec("w", layout, "bfloat16")])
    first = (
        b'{"__metadata__":{"format":"pt"},"w[0:2,0:2]":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}}'
    )
    assert plan.header(0) == (184).to_bytes(8, "little") + first + b" " * (184 - len(first))
    assert json.loads(plan.header(1)[8:])["w[0:2,2:3]"]["data_offsets"] == [0, 4]


def test_a_name_that_a_part_of_another_tensor_needs():
    layout = Layout(Mesh(("fsdp",), (2,)), (Shard(0),), (4,))
    group = [Spec("w", layout, "int8"), Spec("w[0:2]", Layout.single((3,)), "int8")]
    with raises(CheckpointError, "w[0:2].twice"):
        plan_group(group).header(0)


def test_a_group_without_tensors():
    plan = plan_group([])
    assert plan.ranks == () and plan.pieces(0) == () and columns_of(plan) == [] and plan.data_nbytes(0) == 0
    assert plan.header(0) == safetensors_header([])


# ---- the cache ----


def base():
    mesh = Mesh(("dp", "tp"), (2, 2))
    layout = Layout(mesh, (Replicate(), Shard(1)), (4, 6))
    return [Spec("a", layout, "float32"), Spec("b", Layout(mesh, (Shard(0), Shard(0)), (8,)), "bfloat16")]


def changed():
    """Groups that differ from ``base`` in one thing each."""
    a, b = base()
    mesh = a.layout.mesh

    def lay(mesh=mesh, placements=a.layout.placements, shape=(4, 6), order=()):
        return [Spec("a", Layout(mesh, placements, shape, order), "float32"), b]

    return {
        "name": [Spec("c", a.layout, a.dtype), b],
        "dtype": [a._replace(dtype="float16"), b],
        "shape": lay(shape=(4, 8)),
        "mesh names": lay(Mesh(("dp", "fsdp"), (2, 2))),
        "mesh sizes": lay(Mesh(("dp", "tp"), (1, 4))),
        "mesh ranks": lay(Mesh(("dp", "tp"), (2, 2), (0, 2, 1, 3))),
        "dimension": lay(placements=(Replicate(), Shard(0))),
        "copies": lay(placements=(Replicate(), Shard(1, 2))),
        "ragged": lay(placements=(Replicate(), RaggedShard((1, 2)))),
        "ragged units": lay(placements=(Replicate(), RaggedShard((2, 1)))),
        "order": lay(order=(1, 0)),
        "less": [a],
        "sequence": [b, a],
    }


def test_each_difference_is_another_plan():
    digests = [plan_group(base()).digest, *(plan_group(group).digest for group in changed().values())]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 32 and int(digest, 16) >= 0 for digest in digests)


def large():
    """Of which shares are cut, by unlike numbers of holders."""
    mesh = Mesh(("dp", "tp"), (5, 2))
    pairs, everyone = (Replicate(), Shard(1)), (Replicate(), Replicate())
    shapes = [(1500, 800), (3000, 1000), (700, 400), (9,)]
    return [Spec(f"t{i}", Layout(mesh, pairs if i in (0, 2) else everyone, s), "float32") for i, s in enumerate(shapes)]


def files_of(group):
    """A hash of the headers of all files."""
    plan = plan_group(group)
    return xxhash.xxh3_64_hexdigest(b"".join(plan.header(rank) for rank in plan.ranks))


DIGEST = "73c65dccb41f17d9ed36ef3429d206be"


def test_digest_and_plan_are_the_same_everywhere():
    """Through JSON, and in the next version of Tilth; each process of tests has other hashes."""
    table = json.loads(json.dumps(spec_table(base())))
    assert digest_of(table) == plan_group(base()).digest == DIGEST
    assert specs_of(table) == base() and files_of(large()) == "ec90cf41882086f5"
    assert sum(len(columns.size) for columns in columns_of(plan_group(large()))) > 6  # else nothing was cut


@pytest.mark.slow  # it imports torch
def test_digest_and_plan_are_the_same_in_another_process():
    code = "from tests.checkpoint.test_planning import base, large, files_of; from tilth.checkpoint.planning import *; "
    code += "print(digest_of(spec_table(base())), files_of(large()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [DIGEST, files_of(large())]


def test_a_plan_from_the_cache_is_the_same_object_and_gives_the_same_bytes():
    planning._plan.cache_clear()
    first = plan_group(base())
    assert plan_group(base()) is first  # other objects, equal values
    again = fresh(base())
    assert again is not first and again.digest == first.digest
    for rank in first.ranks:
        assert first.header(rank) == again.header(rank) and first.pieces(rank) == again.pieces(rank)
    for a, b in zip(columns_of(first), columns_of(again), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_plan_used_last_stays():
    planning._plan.cache_clear()
    kept = plan_group(base())
    for i in range(3 * planning._PLANS):
        plan_group([Spec(f"other{i}", Layout.single((2,)), "int8")])
        assert plan_group(base()) is kept  # looking it up makes it young again
    info = planning._plan.cache_info()
    assert info.currsize == planning._PLANS and info.misses == 1 + 3 * planning._PLANS
    first = plan_group([Spec("other0", Layout.single((2,)), "int8")])
    for i in range(planning._PLANS):
        plan_group([Spec(f"more{i}", Layout.single((2,)), "int8")])
    assert plan_group([Spec("other0", Layout.single((2,)), "int8")]) is not first and plan_group(base()) is not kept


@quick
@given(specs())
def test_plans_do_not_depend_on_what_was_planned_before(group):
    cached, again = plan_group(group), fresh(group)
    assert [cached.header(rank) for rank in cached.ranks] == [again.header(rank) for rank in again.ranks]
    assert specs_of(json.loads(json.dumps(spec_table(group)))) == list(group)


# ---- what cannot be planned ----


PAIR = Mesh(("d",), (2,))


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ([Spec("w", Layout.single((2,)), "complex128")], "w.dtype"),
        ([Spec("__metadata__", Layout.single((2,)), "int8")], "__metadata__.name"),
        ([Spec("w", Layout.single((2,)), "int8")] * 2, "w.twice"),
        (
            [Spec("v", Layout.single((2,)), "int8"), Spec("w", Layout(PAIR, (RaggedShard((1, 2)),), (4,)), "int8")],
            "w.units",
        ),
        (
            [Spec("w", Layout(Mesh(("d", "e"), (2, 2)), (Shard(0), RaggedShard((1, 2))), (9, 1), (0, 1)), "int8")],
            "w.units",
        ),
        (
            [Spec("w", Layout(Mesh(("d",), (2,)), (RaggedShard((1,)),), (4,)), "int8")],
            "w.units",
        ),
        (
            [Spec("w", Layout(Mesh(("d",), (2,)), (Shard(0, 3),), (4,)), "int8")],
            "w.copies",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_named(group, key):
    with raises(CheckpointError, key) as caught:
        plan_group(group)
    assert "\n" not in str(caught.value)


def test_a_rank_of_another_mesh():
    plan = plan_group([Spec("w", Layout.single((2,)), "int8")])
    for call in (plan.pieces, plan.data_nbytes, plan.header, plan.place):
        with raises(CheckpointError, "rank"):
            call(7)


def test_a_split_that_does_not_tile_is_no_plan(monkeypatch):
    """Were a placement wrong, no checkpoint would be written with it."""
    layout = Layout(Mesh(("d",), (2,)), (Shard(0),), (6, 2))
    planning._shares.cache_clear()
    right = planning._held

    def wrong(layout):
        place, offset, size = right(layout)
        return place, offset, size - np.array([1, 0]) * (place[:, None] == 1)

    monkeypatch.setattr(planning, "_held", wrong)
    with raises(CheckpointError, "w.boxes.missing") as caught:
        plan_group([Spec("w", layout, "int8")])
    assert str(Box((5, 0), (1, 2))) in str(caught.value)
    planning._shares.cache_clear()


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ({}, KeyError),
        ({"layouts": [], "specs": [["w", 0, "int8"]]}, IndexError),
        ({"layouts": [{"mesh": 3, "placements": []}], "specs": []}, TypeError),
        ({"layouts": [], "specs": [["w", 0]]}, ValueError),
    ],
)
def test_a_table_that_is_none(table, cause):
    with raises(CheckpointError, "table") as caught:
        specs_of(table)
    assert type(caught.value.__cause__) is cause


# ---- whether boxes tile ----


def boxes_of(pieces):
    dimensions = len(pieces[0].size) if pieces else 0
    table = np.array([(*p.offset, *p.size) for p in pieces], np.int64).reshape(len(pieces), 2 * dimensions)
    return table[:, :dimensions], table[:, dimensions:]


def problem_of(shape, pieces):
    """Key and text of what is wrong; both empty if nothing is."""
    problem = tiling_problem(shape, *boxes_of(pieces))
    return (problem.key, str(problem)) if problem else ("", "")


@pytest.mark.parametrize("grid", [0, 1 << 20])
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_hole_and_a_double_are_found(grid, shape, data):
    """By counting on the grid, and (grid 0) by taking one after the other."""
    shape = tuple(shape)
    pieces = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        d = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, box.size[d]))
        for start, size in ((0, at), (at, box.size[d] - at)):
            offset = (*box.offset[:d], box.offset[d] + start, *box.offset[d + 1 :])
            pieces.append(Box(offset, (*box.size[:d], size, *box.size[d + 1 :])))
    pieces = data.draw(st.permutations([p for p in pieces if p.numel]))
    i = data.draw(st.integers(0, len(pieces) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_SMALL_GRID", grid)
        assert problem_of(shape, pieces) == ("", "")
        if len(pieces) > 1:
            key, problem = problem_of(shape, [*pieces[:i], *pieces[i + 1 :]])
            assert key == "missing" and pieces[i].contains(eval(problem.removesuffix(" is missing"), {"Box": Box}))
        assert problem_of(shape, [*pieces, pieces[i]]) == ("overlap", f"{pieces[i]} is there twice")
        beyond = Box(pieces[i].offset, (*shape[:-1], shape[-1] + 1))
        assert problem_of(shape, [beyond]) == ("outside", f"{beyond} is not in a tensor of shape {shape}")


@quick
@given(st.lists(st.integers(1, 3), max_size=2).map(tuple), st.data())
def test_any_boxes_are_judged_as_by_counting(shape, data):
    def box():
        offset = [data.draw(st.integers(0, n - 1)) for n in shape]
        return Box(tuple(offset), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset)))

    pieces = [box() for _ in range(data.draw(st.integers(1, 4)))]
    count = np.zeros(shape, int)
    for piece in pieces:
        count[piece.slices] += 1
    assert (problem_of(shape, pieces)[0] == "") == bool((count == 1).all())


def test_a_hole_among_a_million_elements_is_found_at_once():
    pieces = Layout(Mesh(("a", "b"), (64, 64)), (Shard(0), Shard(1)), (1024, 1024))
    boxes = [box for rank in range(4096) for box in pieces.boxes(rank)]
    assert problem_of((1024, 1024), boxes) == ("", "")
    assert problem_of((1024, 1024), boxes[:1000] + boxes[1001:]) == ("missing", f"{boxes[1000]} is missing")


# ---- tiles ----

SIDES = st.one_of(st.integers(0, 9), st.integers(0, 4096), st.sampled_from([64, 256, 512, 1024, 2048, 4096]))


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(SIDES, max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8]))
def test_tiles_tile(size, width):
    numel, last = math.prod(size), size[-1] if size else 1
    cut = tiles(size, width)
    heights, widths = np.diff(cut.rows), np.diff(cut.columns)
    if not numel:
        assert cut.total == 0
        return
    assert cut.rows[0] == cut.columns[0] == 0 and cut.rows[-1] * cut.columns[-1] == numel and cut.columns[-1] == last
    assert (heights > 0).all() and (widths > 0).all() and cut.total == len(heights) * len(widths)
    if len(heights) > 1:
        assert len(set(widths.tolist())) == 1 and len(widths) in (1, 2, 4, 8)
    assert len(set(heights[:-1].tolist())) <= 1 and len(set(widths[:-1].tolist())) <= 1
    largest = int(heights.max()) * int(widths.max()) * width
    assert largest <= LARGEST_TILE or (heights.max() == 1 and last * width > 8 * LARGEST_TILE)
    nbytes = numel * width
    if nbytes < 1 << 16:
        assert cut.total == 1
    assert cut.total <= max(1, nbytes >> 15)  # none is tiny: manifests stay small beside the data
    assert tile_counts(np.array([size], np.int64), width).tolist() == [cut.total]


@pytest.mark.parametrize(
    ("size", "itemsize", "rows", "columns"),
    [
        ((), 8, [0, 1], [0, 1]),
        ((0, 4), 4, [0], [0]),
        ((4, 1000), 4, [0, 4], [0, 1000]),  # small: one
        ((4096, 4096), 4, [*range(0, 4097, 512)], [*range(0, 4097, 512)]),  # 1 MiB each
        ((16, 4096), 4, [0, 16], [*range(0, 4097, 512)]),  # 32 KiB each: columns come first
        ((8, 4096), 4, [0, 8], [*range(0, 4097, 1024)]),
        ((64, 512, 64), 2, [*range(0, 32769, 8192)], [0, 64]),  # rows of 128 bytes are not cut
        ((4096, 1023), 4, [0, 256, *range(512, 3841, 256), 4096], [0, 1023]),  # an odd number of columns neither
        ((1 << 20,), 4, [0, 1], [*range(0, (1 << 20) + 1, 1 << 18)]),
        ((1, 1, 1 << 15), 4, [0, 1], [0, 1 << 14, 1 << 15]),
        ((3, 1 << 22), 4, [0, 1, 2, 3], [*range(0, (1 << 22) + 1, 1 << 19)]),  # rows of 16 MiB: tiles of 2 MiB
    ],
)
def test_tiles_of_some_pieces(size, itemsize, rows, columns):
    assert tiles(size, itemsize) == (rows, columns)


def test_a_quarter_of_the_columns_of_wide_pieces_is_a_quarter_of_the_tiles():
    for size in ((64, 1024), (1024, 4096), (3, 100, 2048), (8, 8192)):
        cut = tiles(size, 4)
        assert (len(cut.columns) - 1) % 4 == 0
        assert size[-1] // 4 in cut.columns and size[-1] // 2 in cut.columns
