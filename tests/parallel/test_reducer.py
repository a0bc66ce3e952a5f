"""A reducer that loses bits: declared, it trains; undeclared, the checks of sums refuse it."""

import pytest

from tests.parallel.layouts import Case, build, engine_of, loss_of, rows_of, weights
from tests.parallel.layouts import batch as whole_batch
from tilth.core.errors import ReplicaMismatch
from tilth.core.layout import Mesh
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import EXACT, GradientReducer
from tilth.parallel.sharded import shard

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
        super().reduce_scatter(out, self._sent(whole, key), group, key)

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
