"""A reducer that loses bits: declared, it trains; undeclared, the checks of sums refuse it."""

import pytest
import torch
from torch import nn

from tests.errors import raises
from tests.parallel.layouts import Case, build, engine_of, loss_of, rows_of, weights
from tests.parallel.layouts import batch as whole_batch
from tilth.core.errors import ModelError, ReplicaMismatch
from tilth.core.layout import Mesh
from tilth.parallel.compress import Dither, TopK
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import EXACT, GradientReducer, ReadySums
from tilth.parallel.sharded import shard
from tilth.parallel.sync import CompressedReducer

HERE = "tests.parallel.test_reducer:"


class Rounded(GradientReducer):
    """Sends bf16, and adds what that leaves out to the next gradient (error feedback, Seide et al., 2014).

    It does not declare what it sends, as a compressor does, but how far that is off."""

    def __init__(self, tolerance):
        self.tolerance, self.left = tolerance, {}

    def _sent(self, x, key):
        given = x + self.left.get(key, 0.0)
        sent = given.bfloat16().to(x.dtype)
        self.left[key] = given - sent
        return sent

    def reduce_scatter(self, out, whole, group, key):
        return super().reduce_scatter(out, self._sent(whole, key), group, key)

    def all_reduce(self, x, group, key):
        return super().all_reduce(x.copy_(self._sent(x, key)), group, key)


def made(rank, case, reducer):
    names = ("pp", "dp", "fsdp", "ep", "cp", "tp")
    grid = ParallelDims.of(Mesh(names, tuple(getattr(case, name) for name in names)), rank)
    how = {"sp": case.sp, "zero": case.zero, "schedule": case.schedule}
    sharded = shard(lambda: build(case), grid, reducer=reducer, **how)
    sharded.load_(weights(case))
    return engine_of(case, sharded)


def step(engine, case):
    """Loss of a step."""
    tokens, mask, starts = rows_of(case, engine.sharded)
    return engine.update(tokens, mask, {}, loss_of(case, whole_batch()[1]), starts=starts).loss


def trained(rank, case, reducer):
    """Losses of three steps and the reducer's sums, or what a check says."""
    engine = made(rank, case, reducer)
    try:
        losses = [step(engine, case) for _ in range(3)]
    except ReplicaMismatch as error:
        return error.key
    return losses, {key.split(".")[0] for key in getattr(reducer, "left", ())}


CASES = {Case(fsdp=2): {"fsdp"}, Case(dp=2): {"copies"}, Case(tp=2, sp=True): {"partial"}}
CASES[Case(dp=2, zero=1)] = {"updates"}
CASES[Case(pp=2, fsdp=2, schedule="zero-bubble", tied=False)] = {"fsdp", "deferred"}


@pytest.mark.dist
@pytest.mark.parametrize("case", [*list(CASES)[:4], pytest.param(list(CASES)[4], marks=pytest.mark.slow)], ids=str)
def test_every_sum_of_gradients_goes_through_the_reducer_and_may_lose_what_it_declares(pool, case):
    ranks = {"case": case, "reducer": EXACT}
    exact, lossy = pool.run(case.ranks, HERE + "trained", **ranks), {**ranks, "reducer": Rounded(2.0**-8)}
    for (losses, keys), (plain, none) in zip(pool.run(case.ranks, HERE + "trained", **lossy), exact):
        assert losses == pytest.approx(plain, rel=1e-3) and losses[1:] != plain[1:] and losses[0] == plain[0]
        assert keys == CASES[case] and none == set()


@pytest.mark.dist
def test_a_reducer_that_does_not_declare_its_error_is_refused(pool):
    assert "gradients" in pool.run(2, HERE + "trained", case=Case(fsdp=2), reducer=Rounded(0.0))


# ---- sums beside the last backward pass ----


def ready(order):
    """Sums of a chain of three matrices, of which the first two have gradients last, that note when they start."""
    chain = {name: nn.Parameter(torch.eye(2)) for name in "abc"}
    for name, p in chain.items():
        p.register_hook(lambda grad, name=name: order.append(name))

    def start(number):
        order.append(number)
        return lambda: order.append(f"end {number}")

    def passes():
        order.clear()
        (torch.ones(1, 2) @ chain["a"] @ chain["b"] @ chain["c"]).sum().backward()

    return ReadySums([["c"], ["b", "a"]], chain, start), passes


def test_sums_start_in_the_last_backward_pass_alone():
    order = []
    sums, passes = ready(order)
    passes()
    assert order == ["c", "b", "a"]
    sums.open()
    passes()
    assert order == ["c", 0, "b", "a", 1, "end 0"]
    with raises(ModelError, "c"):
        passes()
    sums.finish()
    assert order[-1] == "end 1"
    passes()
    sums.finish()  # of a step without a last pass
    assert order == ["c", "b", "a", 0, 1, "end 0", "end 1"]


class Early(GradientReducer):
    """Notes what it starts."""

    bucket_bytes = 1 << 11


class EarlyCodes(CompressedReducer):
    bucket_bytes = 1 << 11


def beside(rank, case, compressor, early):
    """Losses of two steps of two micro-batches, weights, and the sums that have started when the passes end."""
    reducer = Early() if compressor is None else EarlyCodes(compressor, smallest=100)
    engine, started = made(rank, case, reducer), []
    gradients = engine.sharded.gradients
    reduce = gradients.reduce
    gradients.reduce = lambda: (started.append(gradients._ready._next), reduce())
    if not early:
        gradients.last_pass = lambda: None
    losses = [step(engine, case) for _ in range(2)]
    return losses, {n: p.detach().clone() for n, p in engine.sharded.parameters.items()}, started


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case(dp=2), Case(dp=2, zero=1), Case(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("compressor", [None, Dither(), TopK()], ids=["exact", "dither", "topk"])
def test_sums_that_start_beside_the_last_pass_have_the_bits_of_later_ones(pool, case, compressor):
    ranks = {"case": case, "compressor": compressor}
    late = pool.run(case.ranks, HERE + "beside", early=False, **ranks)
    for (losses, end, started), (plain, wanted, none) in zip(
        pool.run(case.ranks, HERE + "beside", early=True, **ranks), late
    ):
        assert losses == plain and all(torch.equal(p, wanted[n]) for n, p in end.items())
        assert none == [0, 0] and min(started) > 2
