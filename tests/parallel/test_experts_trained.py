"""Training with divided experts, beside one process."""

import unittest.mock
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.parallel.layouts import CONFIG, LENGTHS, Case, build, train
from tests.parallel.test_training import apart, check_double, check_floats, gathered, slow
from tilth.core.errors import ModelError
from tilth.core.layout import Mesh
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.experts import check_experts
from tilth.parallel.reducer import GradientReducer
from tilth.parallel.sharded import shard
from tilth.training.experts import ExpertOptions

pytestmark = pytest.mark.dist
HERE = "tests.parallel.test_experts_trained:"
TRAIN = "tests.parallel.layouts:train"
MIXED = {"experts": True, "num_experts": 4}
BOTH = {**MIXED, "both": True}
DOUBLE = [
    Case(ep=2, double=True, **MIXED, zero=2, rows=(1,), tied=False),
    Case(ep=2, fsdp=2, double=True, **BOTH, rows=(1, 0, 6), checkpointing=True),
]
DOUBLE_MORE = [
    Case(ep=2, double=True, **BOTH, dropout=0.1, checkpointing=True),
    Case(dp=2, ep=2, double=True, **MIXED, rows=(3, 0, 4)),
    Case(ep=2, double=True, **MIXED, value=True, rows=(0,)),
    Case(ep=4, double=True, **BOTH, rows=(1, 0, 6)),
    Case(ep=4, double=True, **MIXED, zero=2, dropout=0.1, tied=False),
    Case(ep=2, fsdp=2, double=True, **MIXED, zero=2, dropout=0.1),
    Case(dp=2, ep=2, double=True, **BOTH, zero=2, value=True, rows=(1, 1, 1)),
    Case(ep=2, tp=2, double=True, **BOTH, dropout=0.1, checkpointing=True, rows=(7,)),
    Case(ep=2, tp=2, sp=True, double=True, **MIXED, tied=False, zero=2),
    Case(ep=2, cp=2, double=True, **MIXED, dropout=0.1, rows=(7,)),
    Case(fsdp=2, double=True, **BOTH, dropout=0.1, checkpointing=True),
    Case(dp=2, double=True, **BOTH),
]


@pytest.mark.parametrize("case", [*DOUBLE, *slow(DOUBLE_MORE)], ids=str)
def test_loss_gradients_and_step_are_those_of_one_process_in_float64(pool, case):
    check_double(pool, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(ep=2, **BOTH, dropout=0.1),
        *slow([Case(ep=2, fsdp=2, **MIXED), Case(ep=4, **BOTH), Case(ep=2, tp=2, **BOTH)]),
    ],
    ids=str,
)
@pytest.mark.slow
def test_twenty_steps_in_float32_stay_close(pool, case):
    check_floats(pool, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(ep=2, double=True, **MIXED, rows=(1,), micro_tokens=24),
        *slow([Case(ep=2, fsdp=2, double=True, **BOTH, zero=2), Case(ep=2, tp=2, sp=True, double=True, **MIXED)]),
    ],
    ids=str,
)
def test_losses_of_routers_count_the_tokens_of_all_ranks(pool, case):
    how = {"experts": ExpertOptions(balance=0.3, z=0.1), "steps": 2}
    one, found = train(0, case.alone, **how), pool.run(case.ranks, TRAIN, case=case, **how)
    plain = train(0, case.alone, steps=2)
    assert max(apart(plain["end"][n], w) for n, w in one["end"].items()) > 1e-4
    for got in found:
        for name in ("experts/load_max", "experts/entropy"):
            assert float(got["results"][1].metrics[name]) == float(one["results"][1].metrics[name])
        assert got["results"][1].grad_norm == pytest.approx(one["results"][1].grad_norm, rel=1e-11)
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(ep=2, double=True, **BOTH), Case(ep=2, fsdp=2, double=True, **MIXED)], ids=str)
def test_muon_orthogonalises_each_expert(pool, case):
    how = {"steps": 3, "optimizer": {"name": "muon", "lr": 1e-3, "weight_decay": 0.1}, "ema": 0.5}
    one = train(0, case.alone, **how)
    for got in pool.run(case.ranks, TRAIN, case=case, **how):
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-6
        assert max(apart(got["ema"][n], w) for n, w in one["ema"].items()) < 1e-6


UNEVEN = [((n,), zero) for n in (0, 9) for zero in (2, 3)]
ALTERNATING = [pytest.param(*way, marks=[pytest.mark.slow] * (way not in (((0,), 2), ((9,), 3)))) for way in UNEVEN]


@pytest.mark.parametrize(("rows", "zero"), ALTERNATING)
def test_uneven_micro_batches_do_not_hang_and_blanks_are_counted(pool, rows, zero):
    case = Case(ep=2, zero=zero, rows=rows, micro_tokens=12, **BOTH, checkpointing=zero == 3)
    one = train(0, case.alone)["results"][0]
    results = [got["results"][0] for got in pool.run(2, TRAIN, timeout=60.0, case=case)]
    assert [r.loss for r in results] == pytest.approx([one.loss] * 2, rel=1e-6)
    assert [r.grad_norm for r in results] == pytest.approx([one.grad_norm] * 2, rel=1e-5)
    few, many = sorted(results, key=lambda r: r.tokens)
    assert few.tokens + many.tokens == sum(LENGTHS) and many.padded == 0 and few.padded >= 3


def test_scores_in_parity_have_the_bits_of_one_process_where_a_gather_would_move_less(pool):
    """Each token has more experts than there are ranks, and one of these has more micro-batches than the other."""
    case = Case(ep=2, **BOTH, per_token=3, rows=(2,), micro_tokens=12)
    one, found = train(0, case.alone, parity=True), pool.run(2, TRAIN, timeout=60.0, case=case, parity=True)
    assert np.array_equal(gathered(found, "before"), one["before"].astype(np.float64))
    assert found[0]["results"][0].padded and found[0]["results"][0].loss == pytest.approx(one["results"][0].loss)


def test_a_sum_of_experts_gradients_that_is_forgotten_is_seen(pool):
    """With fsdp = 1 torch does not sum those of experts over copies."""
    case = Case(dp=2, ep=2, double=True, **BOTH)
    one = train(0, case.alone)["results"][0]
    for norm in pool.run(4, HERE + "without_sum", case=case):
        assert norm != pytest.approx(one.grad_norm, rel=1e-4)


def without_sum(rank, case):
    with unittest.mock.patch.object(GradientReducer, "start_sum", lambda *given: lambda: None):
        return train(rank, case)["results"][0].grad_norm


def test_sizes_that_do_not_divide_the_experts_are_refused_with_those_that_would():
    moe = DecoderConfig(**{**CONFIG.__dict__, "family": "qwen3_moe", "num_experts": 6, "experts_per_token": 2,
                           "expert_size": 4, "expert_layers": (0,)})  # fmt: skip
    for ep in (1, 2, 3, 6):
        check_experts(moe, ep)
    with raises(ModelError, "layout.ep") as caught:
        check_experts(moe, 4)
    assert "this model takes ep 1, 2, 3, 6" in str(caught.value)
    with raises(ModelError, "layout.ep"):
        check_experts(CONFIG, 2)


def test_axes_that_share_parameters_are_merged_if_they_are_neighbours():
    mesh = Mesh.of({"dp": 2, "fsdp": 2, "ep": 2})
    assert mesh.shards == ("fsdp", "ep") and mesh.expert_shards == ("fsdp",) and "ep" not in mesh.copies
    merged = mesh.merged("fsdp", "ep")
    assert (merged.size("dp"), merged.size("fsdp"), merged.size("ep")) == (2, 4, 1) and merged.ranks == mesh.ranks
    assert mesh.merged("ep") is mesh


def test_in_parity_mode_sums_of_experts_have_the_bits_of_one_device(pool):
    """Three of four experts on two ranks, where a gather would move less but add in another order."""
    for same in pool.run(2, HERE + "in_parity"):
        assert same == {True: True, False: False}


def in_parity(rank):
    """parity -> this rank's hidden states have the bits of one device."""
    case, lengths = Case(ep=2, **BOTH), [33, 31]
    config = replace(build(case).config, experts_per_token=3, expert_size=32, hidden_size=64, head_dim=16)
    grid = ParallelDims.of(Mesh.of({"ep": 2}), rank)
    ours = shard(lambda: Decoder(config), grid)
    ours.init_(0)
    one = Decoder(config)
    one.init_weights_(0)
    ids, same = torch.arange(64) * (rank + 3) % config.vocab_size, {}
    for parity in (True, False):
        with torch.no_grad():
            pair = [m(ids, PackedContext(lengths, parity=parity)) for m in (ours.model, one)]
        same[parity] = torch.equal(*pair)
    return same
