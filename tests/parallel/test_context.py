"""Context parallelism: attention over divided tokens beside brute force, and models that are divided so."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.errors import ModelError
from tilth.core.layout import Mesh
from tilth.parallel.context import ContextParallel
from tilth.plan.context import RING_SHARE, ZigZag

ATTENDING = "tests.parallel.attending:"
EXACT = 1e-11
AWKWARD = [1, 2, 3, 40, 5, 1, 17, 140]
CASES = [
    {"lengths": lengths, "heads": 4, "kv_heads": kv_heads, "window": window}
    for lengths in (AWKWARD, [1], [2, 1])
    for kv_heads in (1, 4)
    for window in (None, 1, 33)
]
CASES += [case | {"sinks": True, "narrow": 1} for case in CASES[:12]]


def assert_equal(pool, ranks, style, cases, dtype="float64", most=EXACT):
    for found in pool.run(ranks, ATTENDING + "attend", ranks=ranks, style=style, cases=cases, dtype=dtype):
        worst, case = max(((max(far.values()), str(case)) for far, case in zip(found, cases)))
        assert worst < most, case


@pytest.mark.dist
@pytest.mark.parametrize("style", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_that_of_one_rank(pool, style, ranks):
    assert_equal(pool, ranks, style, CASES)


@st.composite
def batches(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    window = draw(st.none() | st.integers(1, 100))
    return {"lengths": lengths, "heads": 4, "kv_heads": kv_heads, "window": window}


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@settings(max_examples=4)
@given(st.lists(batches(), min_size=4, max_size=8))
def test_attention_of_any_batch_is_that_of_brute_force(pool, ranks, cases):
    for style in ("ring", "ulysses"):
        assert_equal(pool, ranks, style, cases)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-5), ("bfloat16", 0.05)])
def test_long_tiles_and_lower_precision(pool, dtype, most):
    """Tiles of one sequence without padding take torch's fused kernel, those of more than 1024 keys several blocks."""
    cases = [{"lengths": [n], "heads": 4, "kv_heads": 2, "window": w} for n, w in ((1000, None), (2400, 700))]
    assert_equal(pool, 2, "ring", [*cases, CASES[0]], dtype, most)


# ---- the division ----


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 5), st.none() | st.integers(1, 40))
def test_every_pair_that_a_mask_allows_is_in_one_tile(lengths, ranks, window):
    found, width = ZigZag.of(np.array(lengths), ranks), window or sum(lengths)
    own = [found.tokens(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(own)) == list(range(sum(lengths)))
    assert max(map(len, own)) - min(map(len, own)) <= 1
    row, place = np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths])
    apart = place[:, None] - place[None]
    seen = (row[:, None] == row) & (apart >= 0) & (apart < width)
    for rank in range(ranks):
        assert np.array_equal(found.positions(rank), place[own[rank]])
        assert found.pairs(window)[rank] == seen[own[rank]].sum()
        for source in range(ranks):
            wanted, covered = seen[np.ix_(own[rank], own[source])], np.zeros((len(own[rank]), len(own[source])), int)
            for query, queries, key, keys in zip(*found.tiles(rank, source, window)):
                covered[query : query + queries, key : key + keys] += 1
                tile = wanted[query : query + queries, key : key + keys]
                assert tile.any(1).all() and tile.any(0).all()  # no query and no key in vain
            assert covered.max(initial=0) <= 1 and not (wanted & (covered == 0)).any()
            if rank != source:
                assert found.sent(window)[source, rank] == wanted.any(0).sum()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_and_messages_are_balanced(ranks):
    found = ZigZag.of(np.array([4096, 1000, 333, 8192]), ranks)
    assert np.ptp(found.pairs()) < 2e-4 * found.pairs().mean()
    whole = (ranks - 1) * 13621
    assert found.sent().sum() == pytest.approx(RING_SHARE * whole, rel=1e-3)
    assert found.sent(64).sum() < 0.05 * whole


# ---- models ----

MODELS = {
    "ring": {},
    "ulysses": {"style": "ulysses"},
    "windows": {"family": "mistral", "changes": {"sliding_window": 3, "window_layers": (0,)}},
    "dropout": {"changes": {"dropout": 0.4}, "checkpointing": True},
    "dynamic rope": {"changes": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_positions": 8}},
    "values": {"value": True, "style": "ulysses"},
    "ratings": {"value": True, "after": True},
    "a rank without tokens": {"lengths": (2,)},
    "one key head": {"changes": {"num_kv_heads": 1}, "style": "ulysses"},
}
FOURS = {
    "ranks without tokens": {"sizes": {"cp": 4}, "lengths": (2, 3)},
    "ulysses, ranks without tokens": {"sizes": {"cp": 4}, "lengths": (2,), "style": "ulysses"},
    "tp": {"sizes": {"cp": 2, "tp": 2}},
    "tp, sp, ulysses": {"sizes": {"cp": 2, "tp": 2}, "sp": True, "style": "ulysses", "changes": {"dropout": 0.4}},
    "tp, sp, a rank without tokens": {"sizes": {"cp": 2, "tp": 2}, "sp": True, "lengths": (2,)},
}


def worst(results):
    return max((far, f"{name} on rank {rank}") for rank, found in enumerate(results) for name, far in found.items())


@pytest.mark.dist
@pytest.mark.parametrize("case", MODELS)
def test_losses_of_whole_sequences_and_gradients_are_those_of_one_device(pool, case):
    found = pool.run(2, ATTENDING + "compare", **{"sizes": {"cp": 2}, **MODELS[case]})
    rounds = 1e-8 if case == "dynamic rope" else EXACT  # powers of fp32 differ by their place in a vector
    assert worst(found) < (rounds, "") and len(found[0]) > 10


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("case", FOURS)
def test_four_ranks_are_one_device(pool, case):
    assert worst(pool.run(4, ATTENDING + "compare", **FOURS[case])) < (EXACT, "")


@pytest.mark.dist
def test_a_loss_that_counts_on_every_rank_would_be_seen(pool):
    found = pool.run(2, ATTENDING + "compare", sizes={"cp": 2}, wrong="gather_copies")
    assert found[0]["loss"] < EXACT and worst(found) > (0.5, "")


# ---- bytes, and what cannot be divided ----


@pytest.mark.dist
@pytest.mark.parametrize("window", [None, 5])
def test_bytes_are_those_of_the_plan(pool, window):
    lengths, kv_heads = [64, 31, 8, 1], 2
    sent = ZigZag.of(np.array(lengths), 2).sent(window).sum(1) * 2 * kv_heads * 8 * 4
    found = pool.run(2, ATTENDING + "moved", ranks=2, style="ring", lengths=lengths, kv_heads=kv_heads, window=window)
    assert [f["forward"] for f in found] == sent.tolist()
    assert [f["backward"] for f in found] == [sent[0] + sent[1]] * 2  # keys and values again, and their gradients


@pytest.mark.dist
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_bytes_of_ulysses_are_those_of_four_exchanges(pool, kv_heads):
    lengths = [64, 32, 8]
    found = pool.run(2, ATTENDING + "moved", ranks=2, style="ulysses", lengths=lengths, kv_heads=kv_heads, window=None)
    each = sum(lengths) // 2 // 2 * (4 + 4 + 2 * max(kv_heads, 2)) * 8 * 4
    assert [(f["forward"], f["backward"]) for f in found] == [(each, each)] * 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "tp", "said"),
    [(6, 2, 4, 1, "model.heads = 6"), (12, 3, 2, 1, "model.kv_heads = 3"), (8, 8, 4, 4, "model.heads = 8 over tp = 4")],
)
def test_heads_that_ulysses_cannot_divide_are_named(heads, kv_heads, ranks, tp, said):
    group = SimpleNamespace(size=lambda: ranks)
    grid = SimpleNamespace(group=lambda name: group, size=Mesh.of({"cp": ranks, "tp": tp}).size)
    shape = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads)
    with raises(ModelError, "layout.cp") as told:
        ContextParallel.of(grid, "ulysses", shape)
    assert said in str(told.value) and "cp_style=ring" in str(told.value)
    assert ContextParallel.of(grid, "ring", shape) == ContextParallel(group, "ring")
