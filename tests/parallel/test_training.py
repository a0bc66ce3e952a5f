from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.parallel.layouts import (
    CONFIG,
    LENGTHS,
    Case,
    batch,
    copied,
    engine_of,
    loss_of,
    rows_of,
    share,
    spread,
    train,
    weights,
)  # fmt: skip
from tilth.core.batch import Jagged
from tilth.core.errors import NonFiniteError, RecipeError, ReplicaMismatch
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.sharded import ShardedModel
from tilth.plan.batch import MicroBatchPlan, PlannedMicroBatch
from tilth.rl.metrics import merge_metrics
from tilth.training import engine as engine_room
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.experts import ExpertOptions

pytestmark = pytest.mark.dist
HERE = "tests.parallel.test_training:"
TRAIN = "tests.parallel.layouts:train"

FIRST = Case(dropout=0.1, checkpointing=True)
DOUBLE = [
    Case(fsdp=2, double=True, zero=2, value=True, checkpointing="selective", rows=(0,)),
    Case(cp=2, double=True, dropout=0.1, checkpointing="selective"),
    Case(fsdp=2, experts=True, double=True, dropout=0.1, checkpointing=True, rows=(1,)),
    Case(tp=2, sp=True, double=True, lora=True, experts=True, tied=False),
]
DOUBLE_MORE = [
    Case(dp=2, fsdp=2, double=True, dropout=0.1, rows=(3, 0, 4)),
    Case(dp=2, double=True, dropout=0.1, tied=False),
    Case(fsdp=2, double=True, dropout=0.1, checkpointing=True),
    Case(tp=2, sp=True, double=True, dropout=0.1, tied=False),
    Case(cp=2, double=True, cp_style="ulysses", dropout=0.1, tied=False, micro_tokens=30),
    Case(fsdp=2, double=True, lora=True, value=True, rows=(1,), checkpointing=True),
    Case(fsdp=4, double=True, tied=False, rows=(1, 0, 6)),
    Case(tp=2, double=True, lora=True, lora_dropout=0.3, checkpointing=True),
    Case(tp=2, double=True, dropout=0.1, checkpointing="selective"),
    Case(fsdp=2, double=True, value=True, rows=(10,)),
    Case(fsdp=2, double=True, zero=2, tied=False, rows=(1,)),
    Case(fsdp=4, double=True, value=True, zero=2, dropout=0.1),
    Case(dp=2, fsdp=2, double=True, zero=2, value=True, rows=(1, 1, 1), checkpointing=True),
    Case(fsdp=2, tp=2, double=True, dropout=0.1, checkpointing=True, rows=(7,)),
    Case(fsdp=2, tp=2, sp=True, double=True, dropout=0.1, tied=False, zero=2),
    Case(fsdp=2, tp=2, sp=True, double=True, value=True),
    Case(dp=2, tp=2, double=True, tied=False, rows=(0,)),
    Case(tp=4, double=True, dropout=0.1),
    Case(tp=4, sp=True, double=True, dropout=0.1, tied=False, checkpointing="selective"),
    Case(dp=4, double=True, value=True),
    Case(cp=4, double=True, dropout=0.1, tied=False),
    Case(cp=4, double=True, cp_style="ulysses", value=True, micro_tokens=40),
    Case(cp=2, tp=2, double=True, dropout=0.1, tied=False),
    Case(cp=2, tp=2, sp=True, double=True, cp_style="ulysses", dropout=0.1, checkpointing=True),
    Case(dp=2, cp=2, double=True, value=True, rows=(3,)),
    Case(dp=2, cp=2, double=True, cp_style="ulysses", rows=(0,)),
    Case(fsdp=2, cp=2, double=True, dropout=0.1, rows=(7,)),
    Case(fsdp=2, cp=2, double=True, cp_style="ulysses", zero=2, value=True, rows=(1,)),
    Case(dp=2, experts=True, double=True),
    Case(tp=2, sp=True, experts=True, double=True, dropout=0.1),
    Case(dp=2, fsdp=2, experts=True, double=True, zero=2, value=True, rows=(1, 0, 6)),
    Case(fsdp=2, tp=2, experts=True, double=True, checkpointing=True, rows=(7,)),
]
DOUBLE_LORA = [
    Case(dp=2, double=True, lora=True),
    Case(fsdp=2, double=True, lora=True, zero=2, experts=True, dropout=0.1),
    Case(tp=2, double=True, lora=True, checkpointing="selective"),
    Case(tp=4, double=True, lora=True, tied=False),
    Case(cp=2, double=True, lora=True, lora_dropout=0.3),
    Case(pp=2, double=True, lora=True, layers=3, lora_dropout=0.3, checkpointing=True),
    Case(dp=2, fsdp=2, double=True, lora=True, lora_dropout=0.3, dropout=0.1, rows=(3, 0, 4)),
    Case(ep=2, double=True, lora=True, experts=True, num_experts=4),
    Case(pp=2, double=True, lora=True, layers=3),
    Case(pp=2, double=True, lora=True, layers=4, schedule="zero-bubble"),
    Case(pp=2, double=True, lora=True, layers=4, schedule="interleaved", value=True),
    Case(fsdp=2, tp=2, sp=True, double=True, lora=True, rows=(7,)),
    Case(fsdp=2, ep=2, double=True, lora=True, experts=True, num_experts=4),
]
"""Adapters: their base is frozen, and has no gradients."""
HSDP = Case(dp=2, fsdp=2)


def slow(cases):
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def apart(a, b):
    """Greatest difference, relative to the greatest element."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def gathered(results, what):
    """Per-token scores of all ranks, in the order of the whole batch."""
    tokens, _ = batch()
    whole = np.full(len(tokens.values), np.nan)
    for got in results:
        parts = np.split(got[what], np.cumsum([LENGTHS[r] for r in got["rows"]])[:-1]) if len(got["rows"]) else []
        for row, part in zip(got["rows"], parts):
            whole[tokens.offsets[row] : tokens.offsets[row + 1]] = part
    return whole


def check_double(pool, case):
    """Two steps in float64 are those of one process: loss, gradients, weights, and scores before and after."""
    one, found = train(0, case.alone, steps=2), pool.run(case.ranks, TRAIN, case=case, steps=2)
    for got in found:
        for a, b in zip(got["results"], one["results"]):
            assert a.loss == pytest.approx(b.loss, rel=1e-11) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-11)
        assert max(apart(got["gradients"][n], g) for n, g in one["gradients"].items()) < 1e-11
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-11
    np.testing.assert_allclose(gathered(found, "before"), one["before"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gathered(found, "after"), one["after"], rtol=1e-5, atol=1e-6)
    assert np.abs(one["after"] - one["before"]).max() > 1e-3


def check_floats(pool, case, within=1e-4):
    """Twenty steps in fp32 begin with the bits of one process and stay close. Returns what the ranks found."""
    one, found = train(0, case.alone, steps=20, init=True), pool.run(case.ranks, TRAIN, case=case, steps=20, init=True)
    for got in found:
        assert all(torch.equal(got["start"][n], w) for n, w in one["start"].items())
        first, last = got["results"][0], got["results"][-1]
        assert first.loss == pytest.approx(one["results"][0].loss, rel=1e-5)
        assert first.grad_norm == pytest.approx(one["results"][0].grad_norm, rel=1e-5)
        assert last.loss == pytest.approx(one["results"][-1].loss, rel=within)
        assert last.loss < first.loss - 0.01
    return found


@pytest.mark.parametrize("case", [*DOUBLE, *slow(DOUBLE_MORE + DOUBLE_LORA)], ids=str)
def test_loss_gradients_and_step_are_those_of_one_process_in_float64(pool, case):
    check_double(pool, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(fsdp=2, dropout=0.1),
        Case(dp=2, tied=False),
        *slow(
            [
                Case(cp=2, dropout=0.1),
                Case(fsdp=2, zero=2),
                Case(dp=2, fsdp=2, rows=(2, 3, 1)),
                Case(fsdp=4),
                Case(fsdp=2, tp=2, sp=True),
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_twenty_steps_in_float32_stay_close(pool, case):
    check_floats(pool, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(fsdp=2, experts=True, double=True, rows=(1,), micro_tokens=24),
        *slow(
            [
                Case(tp=2, sp=True, experts=True, double=True),
                Case(dp=2, experts=True, double=True, zero=2),
                Case(fsdp=2, tp=2, experts=True, double=True),
                Case(cp=2, experts=True, double=True),
                Case(hdp=2, micro_tokens=6, experts=True, double=True),
            ]
        ),
    ],
    ids=str,
)
def test_losses_of_routers_count_the_whole_step_in_every_layout(pool, case):
    options = {"experts": ExpertOptions(balance=0.3, z=0.1), "steps": 2}
    one, found = train(0, case.alone, **options), pool.run(case.ranks, TRAIN, case=case, **options)
    plain = train(0, case.alone, steps=2)
    assert max(apart(plain["end"][n], w) for n, w in one["end"].items()) > 1e-4
    for name in ("experts/load_max", "experts/entropy"):
        assert all(float(got["results"][1].metrics[name]) == float(one["results"][1].metrics[name]) for got in found)
    for name in ("experts/balance_loss", "experts/z_loss"):
        own = [got["results"][1].metrics[name] for got in found[:: case.tp]]
        assert float(merge_metrics([{name: m} for m in own])[name]) == pytest.approx(
            float(one["results"][1].metrics[name]), rel=1e-6
        )
    for got in found:
        assert got["results"][1].grad_norm == pytest.approx(one["results"][1].grad_norm, rel=1e-11)
        assert max(apart(got["gradients"][n], g) for n, g in one["gradients"].items()) < 1e-11
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-11


def test_without_starts_the_dropout_masks_would_be_others(pool):
    case = Case(fsdp=2, double=True, dropout=0.3)
    one = train(0, case.alone)["results"][0].loss
    with_starts, without = pool.run(2, HERE + "two_ways_to_drop", case=case)[0]
    assert with_starts == pytest.approx(one, rel=1e-11)
    assert without != pytest.approx(one, rel=1e-4)


def two_ways_to_drop(rank, case):
    found = []
    for known in (True, False):
        sharded = spread(case, rank)
        sharded.load_(weights(case))
        tokens, mask, starts = rows_of(case, sharded)
        loss = loss_of(case, batch()[1])
        found.append(engine_of(case, sharded).update(tokens, mask, {}, loss, starts=starts if known else None).loss)
    return found


def test_a_denominator_of_each_rank_would_be_seen(pool):
    case = Case(fsdp=2, double=True, rows=(2,))
    one = train(0, case.alone)["results"][0]
    for loss, norm in pool.run(2, HERE + "own_denominator", case=case):
        assert abs(loss / 2 / one.loss - 1) > 1e-3 and abs(norm / 2 / one.grad_norm - 1) > 1e-3


def own_denominator(rank, case):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    tokens, mask, starts = rows_of(case, sharded)
    result = engine_of(case, sharded).update(tokens, mask, {}, loss_of(case, mask), starts=starts)
    return result.loss, result.grad_norm


UNEVEN = [((n,), zero) for n in (0, 1, 9, 10) for zero in (2, 3)]
ALTERNATING = [pytest.param(*way, marks=[pytest.mark.slow] * (way not in (((0,), 2), ((9,), 3)))) for way in UNEVEN]


@pytest.mark.parametrize(("rows", "zero"), ALTERNATING)
def test_uneven_micro_batches_do_not_hang_and_blanks_are_counted(pool, rows, zero):
    case = Case(fsdp=2, zero=zero, rows=rows, micro_tokens=12)
    one = train(0, case.alone)["results"][0]
    results = [got["results"][0] for got in pool.run(2, TRAIN, timeout=60.0, case=case)]
    assert [r.loss for r in results] == pytest.approx([one.loss] * 2, rel=1e-6)
    assert [r.grad_norm for r in results] == pytest.approx([one.grad_norm] * 2, rel=1e-5)
    tokens = [sum(LENGTHS[: rows[0]]), sum(LENGTHS[rows[0] :])]
    assert [r.tokens for r in results] == [r.computed for r in results] == tokens
    few, many = sorted(results, key=lambda r: r.tokens)
    assert many.padded == 0
    assert few.padded == int(few.tokens == 0) if zero == 2 else few.padded >= 3


def test_dp_alone_needs_no_blanks(pool):
    case = Case(dp=2, rows=(0,))
    assert [got["results"][0].padded for got in pool.run(2, TRAIN, case=case)] == [0, 0]


@pytest.mark.parametrize("case", [Case(fsdp=2), Case(fsdp=2, zero=2), Case(dp=2)], ids=str)
def test_a_batch_without_any_row_is_a_skipped_step_everywhere(pool, case):
    for result, same in pool.run(2, HERE + "no_rows", case=case):
        assert result.skipped and result.loss == 0.0 and result.tokens == 0 and same


def no_rows(rank, case):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    before = copied(sharded.parameters)
    none = Jagged.with_lengths(np.zeros(0, np.int64), np.zeros(0, np.int64))
    engine = engine_of(case, sharded)
    result = engine.update(none, np.zeros(0, np.uint8), {}, negative_log_likelihood(1.0), starts=np.zeros(0, np.int64))
    return result, all(torch.equal(before[n], p) for n, p in sharded.parameters.items())


@pytest.mark.parametrize("case", [Case(fsdp=2), Case(dp=2), Case(fsdp=2, zero=2, value=True)], ids=str)
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_or_stops_on_all(pool, case):
    for got in pool.run(2, HERE + "not_finite", case=case):
        assert got["skip"].skipped and not np.isfinite(got["skip"].loss) and got["same"]
        assert not got["next"].skipped and np.isfinite(got["next"].loss)
        assert "guard.on_nan" in got["stop"]


def not_finite(rank, case):
    found = {}
    for policy in ("skip", "stop"):
        sharded = spread(case, rank)
        sharded.load_(weights(case))
        before = copied(sharded.parameters)
        engine = engine_of(case, sharded, on_nan=policy)
        tokens, mask, starts = rows_of(case, sharded)
        fine = loss_of(case, batch()[1])

        def broken(micro):
            value, parts = fine(micro)
            return (value * float("nan") if rank == 1 else value), parts

        try:
            found[policy] = engine.update(tokens, mask, {}, broken, starts=starts)
            found["same"] = all(torch.equal(before[n], p) for n, p in sharded.parameters.items())
            found["next"] = engine.update(tokens, mask, {}, fine, starts=starts)
        except NonFiniteError as error:
            found[policy] = str(error)
    return found


@pytest.mark.parametrize("case", [Case(dp=2), *slow([Case(cp=2)])], ids=str)  # of shards sums tell before
def test_a_bit_that_flips_in_one_copy_of_the_reduced_gradient_leaves_the_step_out_on_all_ranks(pool, case):
    for got in pool.run(case.ranks, HERE + "flipped_gradient", case=case):
        assert got["result"].not_finite and got["same"]
        assert not got["next"].skipped and np.isfinite(got["next"].grad_norm)


def flipped_gradient(rank, case):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    before = copied(sharded.parameters)
    engine = engine_of(case, sharded, on_nan="skip")
    tokens, mask, starts = rows_of(case, sharded)
    reduce_grads, fine = sharded.gradients.reduce, loss_of(case, batch()[1])

    def flipping():
        reduce_grads()
        if rank == 1:
            next(p.grad for p in sharded.parameters.values()).view(torch.int32).bitwise_xor_(1 << 30)

    sharded.gradients.reduce = flipping
    result = engine.update(tokens, mask, {}, fine, starts=starts)
    same = all(torch.equal(before[n], p) for n, p in sharded.parameters.items())
    sharded.gradients.reduce = reduce_grads
    return {"result": result, "same": same, "next": engine.update(tokens, mask, {}, fine, starts=starts)}


@pytest.mark.parametrize(
    "case", [Case(tp=2, double=True), *slow([Case(fsdp=2, double=True), MORE := Case(dp=2, fsdp=2)])], ids=str
)
def test_averages_and_norms_of_layers_are_those_of_one_process(pool, case):
    how = {"steps": 3, "ema": 0.5, "watch": ("layer_norms",)}
    one = train(0, case.alone, **how)
    for got in pool.run(case.ranks, TRAIN, case=case, **how):
        a, b = (found["results"][-1].metrics for found in (got, one))
        norms = {name for name in b if name.startswith("norm/")}
        assert len(norms) == 8 and norms <= a.keys()
        for name in norms:
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-6)
        assert max(apart(got["ema"][n], average) for n, average in one["ema"].items()) < 1e-6
        assert apart(got["ema"]["model.norm.weight"], one["end"]["model.norm.weight"].float()) > 1e-5


MUON = {"name": "muon", "lr": 1e-3, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "case",
    [
        Case(fsdp=2, double=True, experts=True),
        *slow([Case(tp=2, double=True), Case(fsdp=2, double=True), Case(tp=2, double=True, experts=True)]),
    ],
    ids=str,
)
def test_muon_orthogonalises_whole_matrices_though_no_rank_holds_one(pool, case):
    one = train(0, case.alone, steps=3, optimizer=MUON)
    for got in pool.run(2, TRAIN, case=case, steps=3, optimizer=MUON):
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-9
        assert got["results"][2].loss == pytest.approx(one["results"][2].loss, rel=1e-9)


@pytest.mark.parametrize(
    "options", [{"optimizer": {"name": "muon"}}, {"watch": ("noise_scale",)}], ids=["muon", "noise"]
)
def test_what_needs_whole_matrices_works_with_dp_alone(pool, options):
    case = Case(dp=2, double=True)
    one = train(0, case.alone, steps=2, **options)
    for got in pool.run(2, TRAIN, case=case, steps=2, **options):
        assert got["results"][1].loss == pytest.approx(one["results"][1].loss, rel=1e-9)
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-6
        if "watch" in options:
            metrics = got["results"][1].metrics
            assert float(metrics["noise/trace"]) > 0 and {"noise/signal"} <= metrics.keys()


def test_the_noise_scale_sees_the_parts_of_all_ranks(pool):
    """Two ranks with one micro-batch each have two parts, as one device with the same two micro-batches has."""
    case = Case(dp=2, double=True, rows=(4,), micro_tokens=1000)
    with halves():
        alone = train(0, case.alone, watch=("noise_scale",))["results"][0].metrics
    for got in pool.run(2, HERE + "one_part_each", case=case):
        found = got["results"][0].metrics
        for name in ("noise/trace", "noise/signal"):
            assert float(found[name]) == pytest.approx(float(alone[name]), rel=1e-6)


@contextmanager
def halves():
    """Rows up to 3 and from 4 on are a micro-batch each, where there are both."""
    plan = engine_room.plan_micros
    every = [np.arange(4), np.arange(4, len(LENGTHS))]

    def two(tokens, *args, **how):
        n = len(tokens.lengths)
        parts = every if n == len(LENGTHS) else [np.arange(n)]
        micros = tuple(PlannedMicroBatch((rows,), shared=False, cost=0.0, check=0) for rows in parts)
        return MicroBatchPlan(micros, micros)

    engine_room.plan_micros = two
    try:
        yield
    finally:
        engine_room.plan_micros = plan


def one_part_each(rank, case):
    with halves():
        return train(rank, case, watch=("noise_scale",))


def test_what_needs_whole_gradients_is_refused_where_no_rank_has_one(pool):
    for told in pool.run(2, HERE + "refused"):
        assert "noise_scale" in told and "fsdp=2" in told and "dp alone" in told


def refused(rank):
    case = Case(fsdp=2)
    try:
        engine_of(case, spread(case, rank), watch=("noise_scale",))
    except RecipeError as error:
        return str(error)


def test_scoring_with_any_number_of_rows_does_not_hang(pool):
    for rows in ((0,), (10,)):
        case = Case(fsdp=2, rows=rows, micro_tokens=8)
        one = train(0, case.alone)
        found = pool.run(2, TRAIN, timeout=60.0, case=case)
        np.testing.assert_allclose(gathered(found, "before"), one["before"], rtol=1e-4, atol=1e-5)


def test_one_device_makes_no_collective_and_no_copy(monkeypatch):
    case = Case()
    sharded = ShardedModel.alone(Decoder(DecoderConfig(**{**CONFIG.__dict__})))
    sharded.load_(weights(case))

    def never(*args, **kwargs):
        raise AssertionError("a collective with one rank")

    for name in ("all_reduce", "all_gather", "new_group"):
        monkeypatch.setattr(torch.distributed, name, never)
    engine = TrainEngine(sharded, engine_of(case, sharded).section, total_steps=3, micro_tokens=16)
    pointers = {n: p.data_ptr() for n, p in sharded.model.named_parameters()}
    tokens, mask = batch()
    engine.update(tokens, mask, {}, loss_of(case, mask))
    assert pointers == {n: p.data_ptr() for n, p in engine.optimizers.parameters.items()}
    assert share(case, sharded).tolist() == list(range(len(LENGTHS)))


SHARDED = [(Case(fsdp=2), False), (Case(fsdp=2, experts=True), False), (Case(fsdp=2, experts=True), True)]
FOUR = {"experts": True, "num_experts": 4}
SHARDED_MORE = [
    *((case, False) for case in (
        Case(fsdp=2, zero=2), Case(dp=2, fsdp=2), Case(dp=2, fsdp=2, zero=2, rows=(1, 0, 6)), Case(fsdp=2, cp=2),
        Case(fsdp=2, tp=2), Case(fsdp=2, ep=2, **FOUR), Case(pp=2, fsdp=2, tied=False),
    )),
    *((case, True) for case in (
        Case(fsdp=2, ep=2, **FOUR), Case(fsdp=2, ep=2, zero=2, rows=(1, 0, 6), **FOUR),
        Case(dp=2, fsdp=2, experts=True), Case(fsdp=2, tp=2, experts=True),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    "case, experts", [*SHARDED, *(pytest.param(*c, marks=pytest.mark.slow) for c in SHARDED_MORE)], ids=str
)
def test_a_shard_of_gradients_that_is_not_what_all_ranks_gave_is_seen_on_its_rank_alone(pool, case, experts):
    found = pool.run(case.ranks, HERE + "misreduced", case=case, experts=experts)
    for rank, (clean, small, large) in enumerate(found):
        assert clean == small == ""
        assert bool(large) == (rank == case.ranks - 1), large


def misreduced(rank, case, experts):
    """Results of three steps: unharmed, with the last bit of a gradient flipped, with its sign flipped."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    assert [given.every for given in sharded.gradients.given] == [1, round(case.num_experts / 2 / case.ep)][
        : 1 + case.experts
    ]
    for given in sharded.gradients.given:
        given.every = 1
    engine, found, plain = engine_of(case, sharded), [], sharded.gradients.misreduced
    tokens, mask, starts = rows_of(case, sharded)

    def looked():
        if found and rank == case.ranks - 1:
            grads = [sharded.parameters[name].grad for name in sharded.gradients.given[experts].names]
            grad = max((g for g in grads if g.numel()), key=lambda g: float(g.abs().max()))
            place = int(grad.abs().argmax())
            grad.view(-1).view(torch.int32)[place] ^= 1 if len(found) == 1 else -(1 << 31)
        found.append(plain())
        return ""  # or this rank leaves the others alone in the step

    sharded.gradients.misreduced = looked
    for _ in range(3):
        engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
    return found


def test_what_changed_on_its_way_is_an_error_of_the_update():
    case = Case()
    sharded = spread(case)
    sharded.load_(weights(case))
    sharded.gradients.misreduced = lambda: "the sum is another one"
    tokens, mask, starts = rows_of(case, sharded)
    with raises(ReplicaMismatch, "gradients"):
        engine_of(case, sharded).update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
