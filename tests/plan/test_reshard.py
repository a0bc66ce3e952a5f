"""Who sends which box to whom, against brute force on every element, and HybridFlow's groups and volumes."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import ArgumentError
from tilth.core.layout import Box, Layout, Mesh, Shard
from tilth.models.config import DecoderConfig
from tilth.plan.layout import layouts
from tilth.plan.reshard import ReshardPlan, generation_place, generation_ranks, relay_pieces


def mesh(p: int, t: int, d: int, fsdp: int = 1) -> Mesh:
    return Mesh(("pp", "dp", "fsdp", "tp"), (p, d, fsdp, t))


def shape(**changes) -> DecoderConfig:
    base = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=8, num_kv_heads=8)
    return DecoderConfig(**{**base, **changes})


# ---- generation groups ----


def test_the_example_of_the_paper():
    """1-4-2 becomes 1-2-2-2, ranks counted from 1: micro-DP groups of neighbours, generation groups at a stride."""
    training = mesh(1, 4, 2)
    places = {rank: generation_place(training, rank, 1, 2) for rank in training.ranks}
    micro = {frozenset(r + 1 for r in places if (places[r].dp, places[r].tp) == at) for at in np.ndindex(2, 2)}
    assert micro == {frozenset({1, 2}), frozenset({3, 4}), frozenset({5, 6}), frozenset({7, 8})}
    engines = {frozenset(r + 1 for r in places if (places[r].dp, places[r].micro_dp) == at) for at in np.ndindex(2, 2)}
    assert engines == {frozenset({1, 3}), frozenset({2, 4}), frozenset({5, 7}), frozenset({6, 8})}
    assert generation_ranks(training, 1, 2) == (0, 2, 1, 3, 4, 6, 5, 7)


powers = st.sampled_from([1, 2, 4])


@given(powers, powers, st.integers(1, 3), st.sampled_from([1, 2]), st.data())
def test_generation_groups_partition_the_ranks(p, t, d, fsdp, data):
    pg = data.draw(st.sampled_from([n for n in (1, 2, 4) if p % n == 0]))
    tg = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if (t * fsdp) % n == 0]))
    training = mesh(p, t, d, fsdp)
    places = [generation_place(training, rank, pg, tg) for rank in training.ranks]
    assert len(set(places)) == len(training), "a place each"
    size = p * t * fsdp // (pg * tg)
    assert Counter((g.dp, g.micro_dp) for g in places) == dict.fromkeys(np.ndindex(d, size), pg * tg)
    assert Counter((g.pp, g.dp, g.tp) for g in places) == dict.fromkeys(np.ndindex(pg, d, tg), size)
    if pg * tg == 1:
        assert generation_ranks(training, pg, tg) == training.ranks
        return
    ordered = Mesh(("pp", "dp", "tp"), (pg, d * size, tg), generation_ranks(training, pg, tg))
    for rank, place in zip(training.ranks, places):
        assert ordered.coordinates(rank) == (place.pp, place.dp * size + place.micro_dp, place.tp)


@settings(max_examples=examples(60))
@given(powers, st.integers(1, 2), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4, 8]), st.data())
def test_a_training_shard_is_a_part_of_its_generation_shard(t, d, fsdp, kv_heads, data):
    tg = data.draw(st.sampled_from([n for n in (1, 2, 4) if t % n == 0]))
    config, training = shape(num_kv_heads=kv_heads, qkv_bias=True), mesh(1, t, d, fsdp)
    generation = Mesh(("dp", "tp"), (t * d * fsdp // tg, tg), generation_ranks(training, 1, tg))
    held, wanted = layouts(config, training), layouts(config, generation)
    for rank in training.ranks:
        for name in held:
            (mine,), (whole,) = held[name].boxes(rank), wanted[name].boxes(rank)
            assert whole.contains(mine), (name, rank)
        others = [r for r in training.ranks if generation.index(r, "tp") == generation.index(rank, "tp")]
        name = "model.layers.0.mlp.gate_proj.weight"
        tiles = {box for r in others if r // (t * fsdp) == rank // (t * fsdp) for box in held[name].boxes(r)}
        assert sum(box.numel for box in tiles) == wanted[name].boxes(rank)[0].numel, "shards tile the generation shard"


@pytest.mark.parametrize(("t", "d", "tg"), [(4, 1, 1), (4, 1, 2), (2, 2, 1), (8, 1, 2), (8, 1, 4), (4, 2, 2)])
def test_volumes_are_those_of_the_paper(t, d, tg):
    config, training = shape(), mesh(1, t, d)
    held = layouts(config, training)
    divided = sum(math.prod(w.shape) for n, w in held.items() if "norm" not in n)

    def volumes(ranks):
        generation = Mesh(("dp", "tp"), (t * d // tg, tg), ranks)
        wanted = layouts(config, generation)
        return [ReshardPlan.of(r, training, held, generation, wanted).elements(r) for r in training.ranks]

    assert volumes(generation_ranks(training, 1, tg)) == [divided * (t - tg) // (tg * t)] * (t * d)
    if tg > 1:
        assert max(volumes(training.ranks)) == divided // tg, "neighbours: some rank keeps nothing"


def test_only_the_ranks_of_a_micro_group_exchange():
    config, training = shape(), mesh(1, 4, 2)
    generation = Mesh(("dp", "tp"), (4, 2), generation_ranks(training, 1, 2))
    held, wanted = layouts(config, training), layouts(config, generation)
    groups = {ReshardPlan.of(r, training, held, generation, wanted).ranks for r in training.ranks}
    assert groups == {(0, 1), (2, 3), (4, 5), (6, 7)}


@pytest.mark.parametrize(("pp", "tp", "key"), [(1, 3, "tp"), (2, 1, "pp")])
def test_engines_that_do_not_divide_a_replica_are_refused(pp, tp, key):
    with raises(ArgumentError, key):
        generation_place(mesh(1, 4, 1), 0, pp, tp)
    assert generation_ranks(mesh(1, 4, 1), pp, tp) == (0, 1, 2, 3)


# ---- moves ----


def staged(config: DecoderConfig, training: Mesh) -> dict[str, Layout]:
    """Layouts of a pipeline: layer i on stage i, embedding on the first, the rest on the last."""
    stages = training.size("pp")
    found = {}
    for name in layouts(config, mesh(1, 1, 1)):
        at = int(name.split(".")[2]) * stages // config.num_layers if ".layers." in name else stages - 1
        at = 0 if "embed" in name else at
        ranks = tuple(r for r in training.ranks if training.coordinate("pp", r) == at)
        stage = Mesh(training.names, (1, *training.sizes[1:]), ranks)
        found[name] = layouts(config, stage)[name]
    return found


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_every_rank_gets_each_element_once_and_only_what_it_lacks(data):
    p, t, d, fsdp = (data.draw(st.sampled_from([1, 2])) for _ in range(4))
    config = shape(
        vocab_size=data.draw(st.sampled_from([7, 13, 32])),
        num_kv_heads=data.draw(st.sampled_from([1, 2, 8])),
        tie_embeddings=data.draw(st.booleans()),
    )
    training, tg = mesh(p, t, d, fsdp), data.draw(st.sampled_from([1, 2, 4]))
    start = data.draw(st.sampled_from([0, 1, len(training)]))
    generation = Mesh(("dp", "tp"), (data.draw(st.sampled_from([1, 2])), tg))
    generation = replace(generation, ranks=tuple(r + start for r in generation.ranks))
    held, wanted = staged(config, training), layouts(config, generation)
    plans = {}
    for rank in {*training.ranks, *generation.ranks}:
        plan = plans[rank] = ReshardPlan.of(rank, training, held, generation, wanted)
        assert rank in plan.ranks
    for rank in generation.ranks:
        for name, layout in wanted.items():
            seen = np.zeros(layout.shape, int)
            own = np.zeros(layout.shape, bool)
            for box in held[name].boxes(rank) if rank in held[name].mesh.ranks else ():
                own[box.slices] = True
            for move in (*plans[rank].received(rank, [name]), *plans[rank].kept(rank, [name])):
                giver = [m.box for m in plans[rank].received(move.source, [name], 0)] if move.hop else ()
                assert has(giver or held[name].boxes(move.source), move.box), "it has what it sends"
                assert move.local or not own[move.box.slices].any(), "what the rank has does not travel"
                seen[move.box.slices] += 1
                assert plans[move.source] == plans[rank], "both sides have one plan"
            need = np.zeros(layout.shape, int)
            for box in layout.boxes(rank):
                need[box.slices] = 1
            assert np.array_equal(seen, need)


def has(boxes, wanted: Box) -> bool:
    """True if these boxes, which do not overlap, hold all of another one."""
    return sum(common.numel for box in boxes if (common := box.intersect(wanted)) is not None) == wanted.numel


def test_no_holder_sends_a_box_more_than_once():
    """Eight engines elsewhere, of one, two and eight holders: the slices of each go on among the engines."""
    whole = sum(math.prod(layout.shape) for layout in layouts(shape(), mesh(1, 1, 1)).values())
    for fsdp in (1, 2, 8):
        training, generation = mesh(1, 1, 1, fsdp), Mesh(("dp",), (8,), tuple(range(fsdp, fsdp + 8)))
        held, wanted = layouts(shape(), training), layouts(shape(), generation)
        plan = ReshardPlan.of(0, training, held, generation, wanted)
        sent = {rank: sum(move.box.numel for move in plan.sent(rank)) for rank in plan.ranks}
        assert max(sent.values()) <= whole
        assert {plan.elements(rank) for rank in generation.ranks} == {whole}
        assert plan.hops() == ([0] if fsdp == 8 else [0, 1])


def test_a_parameter_that_nobody_holds_whole_is_named():
    training = mesh(1, 2, 1)
    held = {"w": Layout(Mesh(("tp",), (2,), (0, 1)), (Shard(0),), (4, 2))}
    half = {"w": Layout(Mesh(("tp",), (1,), (0,)), (Shard(0),), (4, 2))}
    wanted = {"w": Layout.single((4, 2))}
    assert ReshardPlan.of(0, training, held, Mesh(("dp",), (1,)), wanted).elements(0) == 4
    short = {"w": Layout(Mesh(("dp",), (1,)), (Shard(0),), (5, 2))}
    with raises(ArgumentError, "w"):
        ReshardPlan.of(0, mesh(1, 1, 1), half, Mesh(("dp",), (1,)), short)


def test_strangers_take_turns_with_the_replicas():
    training, generation = mesh(1, 1, 2), Mesh(("dp", "tp"), (2, 2), (2, 3, 4, 5))
    config = shape()
    held, wanted = layouts(config, training), layouts(config, generation)
    plans = {ReshardPlan.of(r, training, held, generation, wanted).ranks for r in range(6)}
    assert plans == {(0, 2, 3), (1, 4, 5)}


def test_whole_copies_exchange_nothing():
    training = mesh(1, 1, 4)
    held = layouts(shape(), training)
    plan = ReshardPlan.of(2, training, held, Mesh(("dp",), (4,)), layouts(shape(), Mesh(("dp",), (4,))))
    assert plan.ranks == (2,) and not plan.hops() and all(Box.whole(m.box.size) == m.box for m in plan.kept(2))


# ---- relays ----


@settings(max_examples=examples(40))
@given(st.sampled_from([1, 2]), powers, st.integers(1, 2), st.sampled_from([1, 2]), powers, st.integers(1, 3))
def test_a_relay_holds_what_targets_want_once(p, t, d, fsdp, tg, engines):
    """Element by element: each distinct box is tiled once, by boxes that their writers hold, of one replica."""
    config, training = shape(num_layers=2), mesh(p, t, d, fsdp)
    first = len(training)
    generation = Mesh(("dp", "tp"), (engines, tg), tuple(range(first, first + engines * tg)))
    held, wanted = layouts(config, training), layouts(config, generation)
    pieces = relay_pieces(training, held, wanted)
    for name, layout in wanted.items():
        mine = [piece for piece in pieces if piece.name == name]
        boxes = {box for rank in generation.ranks for box in layout.boxes(rank)}
        counts = {box: np.zeros(layout.shape, int) for box in boxes}
        for piece in mine:
            (where,) = [box for box in boxes if box.contains(piece.box)]
            counts[where][piece.box.slices] += 1
            assert any(tile.contains(piece.box) for tile in held[name].boxes(piece.writer))
        for box, count in counts.items():
            assert (count[box.slices] == 1).all() and count.sum() == box.numel
    assert len({piece.writer // (t * fsdp) % d for piece in pieces}) == 1, "one replica gives"


def test_copies_take_turns_at_writing():
    """Norms, which all ranks along tp hold, are not all written by the first."""
    config, training = shape(num_layers=4), mesh(1, 4, 1)
    generation = Mesh(("dp",), (1,), (4,))
    pieces = relay_pieces(training, layouts(config, training), layouts(config, generation))
    assert len({piece.writer for piece in pieces if "norm" in piece.name}) > 1


def test_a_relay_without_a_holder_is_refused():
    config, training = shape(), mesh(1, 1, 1)
    held, wanted = layouts(config, training), layouts(config, Mesh(("dp",), (1,), (1,)))
    name = next(iter(held))
    half = Layout(Mesh(("tp",), (2,), (0, 9)), (Shard(0),), held[name].shape)
    with raises(ArgumentError, name):
        relay_pieces(training, held | {name: half}, wanted)
