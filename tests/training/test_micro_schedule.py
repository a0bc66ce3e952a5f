"""Schedules: what is declared here and nowhere else drives an engine, and what could not work is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.errors import raises
from tests.parallel.layouts import CONFIG, Case, engine_of, loss_of, rows_of, spread, weights
from tilth.core.errors import ScheduleError
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel
from tilth.plan.layout import nested
from tilth.plan.pipeline import SCHEDULES, Pass, passes, sequential


def all_forward_first(stage, stages, chunks, micro_batches):
    parts = range(stage, stages * chunks, stages)
    for i in range(micro_batches):
        yield from (Pass("forward", part, i) for part in parts)
    for i in range(micro_batches):
        yield from (Pass("backward", part, i) for part in reversed(parts))


SCHEDULES["all_forward_first"] = all_forward_first


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def trained(rank, case, order):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    return steps(sharded, case, order)


def steps(sharded, case, order):
    engine = engine_of(case, sharded, schedule=order)
    tokens, mask, starts = rows_of(case, sharded)
    results = [engine.update(tokens, mask, {}, loss_of(case, mask), starts=starts) for _ in range(2)]
    return [r.loss for r in results], [r.flops for r in results], sharded.assemble(list(sharded.parameters))


def same(one, other):
    return one[:2] == other[:2] and all(torch.equal(one[2][name], other[2][name]) for name in one[2])


@pytest.mark.parametrize("case", [Case(value=True, dropout=0.2, checkpointing=True), *slow(Case())], ids=str)
def test_another_order_of_passes_gives_the_same_bits(case):
    assert same(trained(0, case, "sequential"), trained(0, case, "all_forward_first"))


ORDERS = ("all_forward_first", "sequential")


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case(fsdp=2, rows=(1,)), *slow(Case(dp=2, rows=(1,)), Case(tp=2, sp=True))], ids=str)
def test_on_ranks_that_have_more_or_fewer_micro_batches(pool, case):
    every = [pool.run(2, "tests.training.test_micro_schedule:trained", case=case, order=o) for o in ORDERS]
    assert all(same(one, other) for one, other in zip(*every))


class Beginning(nn.Module):
    """The embedding and the first layers of a decoder."""

    def __init__(self, model, layers):
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, given, ctx):
        x, tables = given.ids, self.model.rope.tables(ctx.positions, None, self.model.dtype)
        x = self.model.model.embed_tokens(x) if x.dtype == torch.int64 else x
        for layer in self.layers:
            x = layer(x, tables, ctx)
        return x


class Rest(Decoder):
    """The last layers, the norm and the head; its parameters are the whole decoder's."""

    def forward(self, given, ctx):
        return self.model.norm(Beginning.forward(self.beginning, given, ctx))


def in_two_parts(case, cut):
    model = Rest(CONFIG)
    held = (Beginning(model, list(model.model.layers)[:cut]), Beginning(model, list(model.model.layers)[cut:]))
    object.__setattr__(model, "beginning", held[1])  # no child of its own
    first = Decoder.__new__(Decoder)
    nn.Module.__init__(first)
    first.config, first.offload, first.forward, first.checkpointing = CONFIG, None, held[0].forward, False
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    grid = ParallelDims.alone()
    return ShardedModel([first, model], grid, {n: nested(grid.mesh, s, {}) for n, s in shapes.items()})


@pytest.mark.parametrize("order", ["sequential", "all_forward_first"])
@pytest.mark.parametrize("cut", [1, *slow(0, 2)])
def test_a_model_in_two_parts_learns_as_one(order, cut):
    case = Case()
    parts = in_two_parts(case, cut)
    parts.load_(weights(case))
    ids = torch.arange(9)
    whole = ShardedModel.alone(Decoder(CONFIG))
    whole.load_(weights(case))
    ctx = PackedContext([9])
    assert torch.equal(parts.forward(ModelInput(ids), ctx), whole.forward(ModelInput(ids), ctx))
    found, wanted = steps(parts, case, order), steps(whole, case, "sequential")
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    for name in wanted[2]:  # the tied embedding gets the gradients of its two uses in another order
        torch.testing.assert_close(found[2][name], wanted[2][name], rtol=1e-4, atol=1e-5)


BROKEN = {
    "forgets": lambda *sizes: list(sequential(*sizes))[:-1],
    "repeats": lambda *sizes: [*sequential(*sizes), Pass("forward", 0, 0)],
    "goes_back_first": lambda *sizes: list(sequential(*sizes))[::-1],
    "begins_with_the_second": lambda *sizes: second_first(list(sequential(*sizes))),
    "goes_on": lambda stage, stages, chunks, n: sequential(stage, stages, chunks, n + 1),
    "skips_a_part": lambda *sizes: (p for p in sequential(*sizes) if p.part != 1),
}


def second_first(order):
    order.remove(Pass("forward", 0, 1))
    return [Pass("forward", 0, 1), *order]


@pytest.mark.parametrize("name", BROKEN)
def test_a_schedule_that_could_not_work_is_refused(name, monkeypatch):
    wrong = "passes" if name in ("forgets", "goes_on", "skips_a_part") else "order"
    monkeypatch.setitem(SCHEDULES, name, BROKEN[name])
    with raises(ScheduleError, f"{name}.{wrong}"):
        passes(name, 1, 3, 2)


def test_an_unknown_schedule_names_those_that_there_are():
    with raises(ScheduleError, "schedule"):
        passes("zigzag", 1, 1, 1)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", ["sequential", "all_forward_first"])
def test_every_pass_is_there_once(name, parts):
    (found,) = passes(name, 1, parts, 4)
    assert len(set(found)) == len(found) == 2 * parts * 4 and passes(name, 1, parts, 0) == ((),)
