"""Stages of a pipeline: every schedule computes what one process does, whatever micro-batches the ranks have."""

import unittest.mock
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.parallel.layouts import (
    LENGTHS,
    Case,
    batch,
    build,
    copied,
    engine_of,
    loss_of,
    rows_of,
    spread,
    storage,
    train,
    watch_gradients,
    weights,
)  # fmt: skip
from tests.parallel.test_training import apart, check_double, check_floats, slow
from tilth.config.errors import RecipeError
from tilth.config.load import load_recipe
from tilth.config.schema import LoraConfig
from tilth.core.batch import Jagged
from tilth.core.errors import ModelError, NonFiniteError
from tilth.core.layout import Mesh
from tilth.models.attention import PackedContext
from tilth.models.converters import LowRank, converted
from tilth.parallel import comm
from tilth.parallel.deferred import DeferredGradients
from tilth.parallel.dims import ParallelDims
from tilth.parallel.pipeline import Pipe
from tilth.parallel.sharded import shard

pytestmark = pytest.mark.dist
HERE = "tests.parallel.test_pipeline:"
TRAIN = "tests.parallel.layouts:train"
DEEP = {"layers": 4, "schedule": "interleaved"}
MIXED = {"experts": True, "num_experts": 4, "both": True}

CASES = [
    Case(pp=2, double=True, value=True, **DEEP),
    Case(pp=2, double=True, checkpointing=True, dropout=0.1, schedule="zero-bubble", tied=False),
]
FOURS = [
    Case(pp=4, double=True, layers=4),
    Case(pp=2, ep=2, double=True, **MIXED, rows=(6,), schedule="zero-bubble"),
]
MORE = [
    Case(pp=2, fsdp=2, double=True, checkpointing=True, rows=(2,), schedule="zero-bubble"),
    Case(pp=2, double=True, dropout=0.1),
    Case(pp=2, fsdp=2, double=True, rows=(2,)),
    Case(pp=2, tp=2, sp=True, double=True, dropout=0.1, schedule="zero-bubble"),
    Case(pp=2, cp=2, double=True),
    Case(pp=2, cp=2, cp_style="ulysses", double=True, dropout=0.1, **DEEP),
    Case(pp=2, double=True, tied=False, **DEEP),
    Case(pp=2, double=True, value=True, schedule="zero-bubble"),
    Case(pp=2, double=True, micro_tokens=1000),
    Case(pp=2, double=True, micro_tokens=1000, **DEEP),
    Case(pp=4, double=True, layers=5, schedule="zero-bubble", micro_tokens=40),
    Case(pp=4, double=True, layers=8, schedule="interleaved", checkpointing=True),
    Case(pp=4, double=True, layers=4, value=True),
    Case(pp=2, dp=2, double=True, rows=(0,)),
    Case(pp=2, dp=2, double=True, schedule="zero-bubble", rows=(3,)),
    Case(pp=2, fsdp=2, double=True, zero=2, rows=(1,), tied=False),
    Case(pp=2, fsdp=2, double=True, rows=(3,), **DEEP),
    Case(pp=2, fsdp=2, double=True, value=True, rows=(0,), checkpointing=True),
    Case(pp=2, tp=2, double=True, tied=False),
    Case(pp=2, fsdp=2, double=True, zero=2, rows=(0,), tied=False, schedule="zero-bubble"),
    Case(pp=2, fsdp=2, double=True, value=True, rows=(0,), schedule="zero-bubble"),
    Case(pp=2, fsdp=2, double=True, **MIXED, dropout=0.1, schedule="zero-bubble"),
    Case(pp=2, ep=2, double=True, **MIXED, zero=2, checkpointing=True, schedule="zero-bubble"),
    Case(pp=2, double=True, **MIXED, schedule="zero-bubble"),
    Case(pp=2, tp=2, sp=True, double=True, value=True, **DEEP),
]


@pytest.mark.parametrize("case", [*CASES, *FOURS, *slow(MORE)], ids=str)
def test_loss_gradients_and_step_are_those_of_one_process_in_float64(pool, case):
    check_double(pool, case)


FLOATS = [Case(pp=2, dropout=0.1), Case(pp=2, **DEEP), Case(pp=2, schedule="zero-bubble", tied=False)]


@pytest.mark.slow  # quickly in float64
@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_twenty_steps_in_float32_stay_close_and_begin_with_the_same_bits(pool, case):
    found = check_floats(pool, case)
    assert found[0]["results"] == found[1]["results"] or len(found) > 2


def test_zero_bubble_takes_shards_and_refuses_compile():
    layout = ["policy.layout.pp=2", "policy.layout.pp_schedule=zero-bubble", "policy.layout.fsdp=2"]
    keys = ["cluster.backend=local", "cluster.workers=4", *layout]
    load_recipe("addition-grpo", keys)
    with raises(RecipeError, "policy.layout.pp_schedule.compile"):
        load_recipe("addition-grpo", [*keys, "train.compile=true"])


LAYOUTS = [Case(pp=2, fsdp=2, rows=(2,)), Case(pp=2, ep=2, **MIXED, rows=(6,))]


@pytest.mark.parametrize("case", [LAYOUTS[1], *slow(LAYOUTS[:1])], ids=str)
def test_deferred_gradients_have_the_bits_of_whole_backward_passes(pool, case):
    plain, late = (pool.run(4, TRAIN, case=replace(case, schedule=name)) for name in ("1f1b", "zero-bubble"))
    for a, b in zip(plain, late):
        assert all(torch.equal(a["gradients"][name], grad) for name, grad in b["gradients"].items())


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_stacked_experts_that_are_left_equal_those_of_a_whole_backward_pass(monkeypatch, grouped):
    monkeypatch.setattr("tilth.models.moe.grouped_matmul_serves", lambda rows: grouped)
    case = Case(**{**MIXED, "num_experts": 5}, layers=2)
    plain, late = (build(case) for _ in range(2))
    for model in (plain, late):
        model.load_state_dict(weights(case))
    names = dict(late.named_parameters())
    deferred = DeferredGradients([late], names, names, at_once=True)
    ids = torch.arange(6) * 5
    for model in (plain, late):
        model(ids, PackedContext([4, 2])).square().sum().backward()
    stacks = {name for name in names if ".experts." in name}
    assert len(stacks) == 6 and stacks < deferred.names and all(names[name].grad is None for name in deferred.names)
    deferred.finish(deferred.take(), last=True)
    for name, p in plain.named_parameters():
        assert torch.equal(p.grad, names[name].grad) and (name not in stacks or p.grad.any())


def test_a_gradient_beside_the_deferred_one_is_refused_by_name(pool):
    wanted = [f"model.layers.{stage}.mlp.up_proj.weight" for stage in (0, 0, 1, 1)]
    assert pool.run(4, HERE + "beside", timeout=60.0) == wanted


def beside(rank):
    sharded = spread(case := Case(pp=2, fsdp=2, schedule="zero-bubble"), rank)
    sharded.load_(weights(case))
    for name, p in sharded._own.items():
        if name.endswith("up_proj.weight"):
            p.grad = torch.zeros_like(p)
    with pytest.raises(ModelError) as error:
        sharded.gradients.reduce()
    return error.value.key


def moved(rank, case, share):
    """Weights after two steps, and bytes of activations that went to the host."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    engine, (tokens, mask, starts) = engine_of(case, sharded, offload=share), rows_of(case, sharded)
    for part in sharded.parts if share else ():
        part.offload.least = 1
    for _ in range(2):
        engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
    found = sum(part.offload.bytes for part in sharded.parts if part.offload)
    return copied(sharded.assemble(list(sharded.layouts))), found


OFFLOADED = (
    Case(pp=2, layers=6),
    Case(pp=2, layers=8, schedule="interleaved", tied=False),
    Case(pp=2, fsdp=2, layers=6, schedule="zero-bubble", tied=False, zero=2),
)


@pytest.mark.parametrize("case", [*slow(OFFLOADED[:2]), OFFLOADED[2]], ids=str)
def test_activations_of_several_micro_batches_in_flight_return_from_the_host(pool, case):
    plain, half = (pool.run(case.ranks, HERE + "moved", case=case, share=share) for share in (0.0, 0.5))
    for (kept, none), (found, moved) in zip(plain, half):
        assert none == 0 < moved and all(torch.equal(kept[name], found[name]) for name in kept)


def dropping(rank, ranks):
    """Dropout in the limits of micro-batches, and the loss of a step, with adapters in the first of two layers only."""
    grid = ParallelDims.of(Mesh(("pp",), (ranks,)), rank)
    lora = LoraConfig(rank=2, dropout=0.3, targets=("mlp.gate_proj",))  # not those of experts
    case = Case(experts=True, value=True, micro_tokens=100)
    sharded = shard(lambda: build(replace(case, value=False)), grid, converters=("value_head", LowRank(lora)))
    sharded.init_(3)
    with torch.no_grad():  # adapters that change something
        for name, p in sharded.parameters.items():
            p.fill_(0.1) if name.endswith("lora.B") else None
    engine, sizes = engine_of(case, sharded), [9] * 6
    tokens = Jagged.with_lengths(np.concatenate([[*range(7), i, i + 1] for i in range(6)]), np.array(sizes))
    mask = np.tile(np.array([0] * 7 + [1] * 2, np.uint8), 6)
    found = engine.update(tokens, mask, {}, loss_of(case, mask))
    return engine.limits.dropout, found.loss


def test_stages_plan_alike_where_one_alone_has_adapters_with_dropout(pool):
    (alone,), found = pool.run(1, HERE + "dropping", ranks=1), pool.run(2, HERE + "dropping", ranks=2, timeout=60.0)
    assert alone[0] and all(drops and loss == pytest.approx(alone[1], rel=1e-6) for drops, loss in found)


def test_a_stage_holds_its_layers_only_and_both_ends_the_tied_embedding(pool):
    case = Case(pp=2, layers=3)
    total = {name: p.numel() for name, p in build(case).named_parameters()}
    first, last = pool.run(2, HERE + "held", case=case)
    assert first["elements"].keys() | last["elements"].keys() == total.keys()
    assert first["elements"].keys() & last["elements"].keys() == {"model.embed_tokens.weight"}
    for found in (first, last):
        assert found["elements"] == {name: total[name] for name in found["elements"]}
        assert found["storage"] == found["model"] == 4 * sum(found["elements"].values())


def held(rank, case):
    sharded = spread(case, rank)
    sharded.init_(0)
    elements = {name: p.numel() for name, p in sharded.parameters.items()}
    model = storage(p for part in sharded.parts for p in part.parameters())
    return {"elements": elements, "storage": storage(sharded.parameters.values()), "model": model}


@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_state_of_the_tied_embedding_is_equal_on_both_ends(pool, name, ema):
    case = Case(pp=2, double=True)
    one = train(0, case.alone, steps=3, optimizer={"name": name}, ema=ema)
    found = pool.run(2, HERE + "state", case=case, name=name, ema=ema)
    for key, tensor in found[0][0].items():
        assert torch.equal(tensor, found[1][0][key]) and ("step" in key or tensor.any())
    assert max(apart(found[0][1][n], w) for n, w in one["end"].items()) < (1e-11 if name == "adamw" else 1e-2)


def state(rank, case, name, ema):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    engine = engine_of(case, sharded, optimizer={"name": name}, ema=ema, watch=("layer_norms",))
    tokens, mask, starts = rows_of(case, sharded)
    for _ in range(3):
        metrics = engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts).metrics
    assert {"norm/grad/embedding", "norm/grad/0", "norm/grad/1", "norm/grad/norm"} <= metrics.keys()
    shared = {n: t.clone() for n, t in engine.optimizers.state_tensors().items() if "embed_tokens" in n}
    return shared, copied(sharded.assemble(list(sharded.layouts)))


@pytest.mark.parametrize("lora", [*slow([False]), True])
def test_layers_with_norms_are_those_that_one_process_learns(pool, lora):
    """Beside adapters, the embedding, the final norm and the head are frozen."""
    case, watch = Case(pp=2, double=True, lora=lora, layers=3, tied=False), ("layer_norms",)
    one = norms_of(train(0, case.alone, watch=watch))
    assert len(one) == (6 if lora else 12)
    for got in pool.run(2, TRAIN, case=case, watch=watch):
        assert norms_of(got) == pytest.approx(one, rel=1e-6)


def norms_of(found):
    return {name: float(m) for name, m in found["results"][0].metrics.items() if name.startswith("norm/")}


def test_without_the_sum_over_both_ends_the_tied_embedding_would_learn_otherwise(pool):
    case = Case(pp=2, double=True)
    one = train(0, case.alone)["gradients"]["model.embed_tokens.weight"]
    for got in pool.run(2, HERE + "forgetful", case=case):
        assert apart(got, one) > 1e-2


def forgetful(rank, case):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    sharded.gradients._partial = ()
    engine = engine_of(case, sharded)
    tokens, mask, starts = rows_of(case, sharded)
    found = {}
    watch_gradients(engine, found)
    engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
    return found["model.embed_tokens.weight"]


@pytest.mark.parametrize("rows", [(0,), *slow([(1,), (10,)]), (9,)])
def test_uneven_micro_batches_do_not_hang(pool, rows):
    case = Case(pp=2, fsdp=2, rows=rows, micro_tokens=12)
    one = train(0, case.alone)["results"][0]
    results = [got["results"][0] for got in pool.run(4, TRAIN, timeout=60.0, case=case)]
    assert [r.loss for r in results] == pytest.approx([one.loss] * 4, rel=1e-6)
    assert [r.grad_norm for r in results] == pytest.approx([one.grad_norm] * 4, rel=1e-5)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_on_one_stage_is_skipped_or_stops_on_all(pool, where):
    for skipped, same, told in pool.run(2, HERE + "not_finite", where=where):
        assert skipped and same and "guard.on_nan" in told


def not_finite(rank, where):
    found = []
    for policy in ("skip", "stop"):
        sharded = spread(case := Case(pp=2), rank)
        sharded.load_(weights(case))
        before = copied(sharded.parameters)
        engine = engine_of(case, sharded, on_nan=policy)
        engine.steps = 1
        tokens, mask, starts = rows_of(case, sharded)
        fine = loss_of(case, batch()[1])
        if where == "gradient" and rank == 0:  # on the first stage alone
            sharded.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * torch.inf)
        loss = (lambda micro: (fine(micro)[0] * torch.nan, {})) if where == "loss" else fine
        try:
            result = engine.update(tokens, mask, {}, loss, starts=starts)
            found += [result.skipped, all(torch.equal(before[n], p) for n, p in sharded.parameters.items())]
        except NonFiniteError as error:
            found.append(str(error))
    return found


def test_more_stages_than_layers_are_refused(pool):
    assert pool.run(2, HERE + "refused") == ["layout.pp"] * 2


def refused(rank):
    with pytest.raises(ModelError) as error:
        spread(Case(pp=2, schedule="interleaved"), rank)  # four parts of two layers
    return error.value.key


def test_a_part_without_an_adapter_is_refused_on_all_ranks(pool):
    """Of two layers the second one alone has experts."""
    assert pool.run(2, HERE + "idle") == ["layout.pp.learned"] * 2


def idle(rank):
    lora = LoraConfig(rank=3, targets=("*.experts.up_proj",))
    grid = ParallelDims.of(Mesh.of({"pp": 2}), rank)
    with pytest.raises(ModelError) as error:
        shard(lambda: converted(build(Case(experts=True)), [LowRank(lora)]), grid)
    shard(lambda: converted(build(Case(experts=True)), ["frozen"]), grid)  # which learns nothing anywhere
    return error.value.key


def test_a_first_step_of_one_micro_batch_does_not_hang(pool):
    """Groups of a new generation, so that these messages are the first ones."""
    case = Case(pp=2, micro_tokens=1000)
    one = train(0, case.alone)["results"][0]
    assert pool.run(2, HERE + "first_step", timeout=60.0, case=case) == pytest.approx([one.loss] * 2, rel=1e-6)


def first_step(rank, case):
    grid = ParallelDims.of(Mesh.of({"pp": 2}), rank, generation=77)
    sharded = shard(lambda: build(case), grid)
    sharded.load_(weights(case))
    tokens, mask, starts = rows_of(case, sharded)
    return engine_of(case, sharded).update(tokens, mask, {}, loss_of(case, mask), starts=starts).loss


def test_every_message_is_recorded_with_its_bytes_on_both_sides(pool):
    case = Case(pp=2, micro_tokens=1000)
    tokens = sum(LENGTHS)
    for rank, found in enumerate(pool.run(2, HERE + "messages", case=case)):
        ours, theirs = ("send", "receive") if rank == 0 else ("receive", "send")
        assert found[ours, "0>1"] == found[theirs, "1>0"] == [tokens * 20 * 4]


def messages(rank, case):
    found = {}
    kept = comm._numbered

    def numbered(op, ranks, nbytes):
        if op in ("send", "receive"):
            found.setdefault((op, ranks), []).append(nbytes)
        return kept(op, ranks, nbytes)

    sharded = spread(case, rank)
    sharded.init_(0)
    engine = engine_of(case, sharded)
    rows = rows_of(case, sharded)
    engine.update(*rows[:2], {}, loss_of(case, batch()[1]), starts=rows[2])  # the first one connects the stages
    comm._numbered = numbered
    try:
        engine.update(*rows[:2], {}, loss_of(case, batch()[1]), starts=rows[2])
    finally:
        comm._numbered = kept
    return found


def test_a_receive_is_posted_before_the_pass_before_its_own(pool):
    """So a message may arrive while the stage computes."""
    for found in pool.run(2, HERE + "posted", case=Case(pp=2)):
        order = [one for kind, one in found if kind == "post"]
        taken = [(at, one) for at, (kind, one) in enumerate(found) if kind == "take"]
        assert len(taken) > 4 and all(order[order.index(one) + 1 :][:1] <= _posts(found[:at]) for at, one in taken)


def _posts(found):
    return [one for kind, one in found if kind == "post"][-1:]


def posted(rank, case):
    found = []
    sharded = spread(case, rank)
    sharded.init_(0)
    engine = engine_of(case, sharded)
    rows = rows_of(case, sharded)
    post, take = Pipe.post, Pipe.take

    def posting(self, one, ctx):
        found.append(("post", tuple(one)))
        post(self, one, ctx)

    def taking(self, one):
        found.append(("take", tuple(one)))
        return take(self, one)

    with unittest.mock.patch.multiple(Pipe, post=posting, take=taking):
        engine.update(*rows[:2], {}, loss_of(case, batch()[1]), starts=rows[2])
    return found
