"""Local methods: ranks learn apart as the papers say, meet, resume with the same bits, and what is wrong is found."""


import pytest
import torch

import tilth
from tests.config.test_plugins import forget
from tests.errors import raises
from tests.parallel.layouts import Case, build, engine_of, loss_of, rows_of, weights
from tests.parallel.layouts import batch as whole_batch
from tests.parallel.test_sync import SMALLEST, copied, step
from tilth.config.axes import AXES
from tilth.core.errors import RecipeError
from tilth.core.layout import Layout, Mesh, Replicate
from tilth.core.random import stream
from tilth.guard.snapshots import compare
from tilth.parallel.dims import ParallelDims
from tilth.parallel.local import LOCAL, SHARED, SQUARES, Averaging, ErrorReset, LocalAdaAlter
from tilth.parallel.reducer import EXACT
from tilth.parallel.sharded import shard
from tilth.plan.rules import Parameter
from tilth.roles.state import Learner

HERE = "tests.parallel.test_local:"
DP, FOUR = Case(dp=2), Case(dp=4)
ALL = {"cser": ErrorReset, "average": Averaging, "adaalter": LocalAdaAlter}


# ---- against the papers, in float64 ----

SIZES = {"a": (7, 5), "b": (33,), "norm": (4,)}
KINDS = {"a": "matrix", "b": "embedding", "norm": "norm"}
TABLE = tuple(Parameter(n, shape, KINDS[n], "whole", "normal") for n, shape in SIZES.items())


def gradient(rank, number, name, x):
    """Of a quadratic with another centre on each rank, with noise."""
    noise = stream(1, "noise", rank, number, name).normal(0, x.numel()).double().view(x.shape)
    return x - rank + noise


class Nesterov:
    """Plain SGD with Nesterov momentum on each rank (M-CSER)."""

    def __init__(self):
        self.m = {}

    def change(self, name, g):
        self.m[name] = 0.9 * self.m.get(name, 0) + g
        return 0.05 * (g + 0.9 * self.m[name])


def bound(grid, **how):
    """A method with tensors of zeros."""
    own = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in SIZES.items()}
    held = {n: Layout(grid.mesh, (Replicate(),) * len(grid.mesh.names), shape) for n, shape in SIZES.items()}
    method = ErrorReset(smallest=8, **how)
    method.bind(grid, held, held, TABLE, own)
    return method, own


def driven(rank, ranks, steps, **how):
    """Models and what is shared after each step, of a method that the rank's optimizer is driven with."""
    method, own = bound(ParallelDims.of(Mesh.of({"dp": ranks}), rank), **how)
    optimizer, found = Nesterov(), []
    for number in range(steps):
        method.begin(number)
        method.prepare()
        for n, x in own.items():
            x -= optimizer.change(n, gradient(rank, number, n, x))
        method.settle(True)
        found.append((copied(own), copied(method._shared)))
    return found


def simulated(ranks, steps, every, changes, models):
    """The steps of the paper: x_i and e_i of all ranks, with the blocks that ``ErrorReset`` draws."""
    method, zeros = bound(ParallelDims.alone(), every=every, changes=changes, models=models)
    x, e = ([copied(zeros) for _ in range(ranks)] for _ in range(2))
    optimizers, found = [Nesterov() for _ in range(ranks)], []

    def synced(values, block):
        """PSync: what all ranks have of v, and what stays."""
        sent = [torch.zeros_like(v).view(-1) for v in values]
        for c, v in zip(sent, values):
            c[block] = v.reshape(-1)[block]
        sent = [c.view(v.shape) for c, v in zip(sent, values)]
        rest = [v - c for v, c in zip(values, sent)]
        mean = sum(sent) / ranks
        return [mean + r for r in rest], rest

    for number in range(steps):
        method.begin(number)
        blocks = {"norm": slice(None)} | method.blocks("changes", changes)
        for n in SIZES:
            p = [o.change(n, gradient(i, number, n, x[i][n])) for i, o in enumerate(optimizers)]
            p, r = synced(p, blocks[n])
            for i in range(ranks):
                x[i][n], e[i][n] = x[i][n] - p[i], e[i][n] - r[i]
        if (number + 1) % every == 0:
            method.begin(number + 1)
            for n, block in method.blocks("models", models).items():
                new, rest = synced([own[n] for own in e], block)
                for i in range(ranks):
                    x[i][n], e[i][n] = x[i][n] - e[i][n] + new[i], rest[i]
        found.append(([copied(own) for own in x], [copied(own) for own in e]))
    return found


CSER = [(2, 3, 4, 2), (2, 1, 5, 1), (4, 4, 8, 3), (2, 3, 0, 1), (2, 3, 0, 4)]


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "every", "changes", "models"), CSER)
def test_models_and_errors_are_those_of_the_paper_in_every_step(pool, ranks, every, changes, models):
    """x_i, and x_i - e_i, which is the same on all ranks, to 1e-12."""
    how = {"every": every, "changes": changes, "models": models}
    found, steps = pool.run(ranks, HERE + "driven", ranks=ranks, steps=20, **how), simulated(ranks, 20, **how)
    for number, (x, e) in enumerate(steps):
        for i, (own, shared) in enumerate(one[number] for one in found):
            for n in SIZES:
                torch.testing.assert_close(own[n], x[i][n], rtol=0, atol=1e-12)
                z = shared.get(n, own[n])
                torch.testing.assert_close(z, x[i][n] - e[i][n], rtol=0, atol=1e-12)
                assert torch.equal(z, found[0][number][1].get(n, found[0][number][0][n]))
    apart = [(found[0][-1][0][n] - found[1][-1][0][n]).abs().max() > 1e-3 for n in ("a", "b")]
    assert any(apart) or every == models == 1 or (changes, models) == (0, 1)


def test_blocks_are_drawn_by_step_and_tensor_and_reach_every_element():
    (method, _), seen = bound(ParallelDims.alone(), changes=4), {}
    for number in range(60):
        method.begin(number)
        blocks = method.blocks("changes", 4)
        assert blocks == method.blocks("changes", 4)
        for n, block in blocks.items():
            seen.setdefault(n, []).append((block.start, block.stop))
    assert set(seen) == {"a", "b"} and seen["a"] != seen["b"]
    assert sorted(set(seen["a"])) == [(0, 8), (8, 17), (17, 26), (26, 35)]


@pytest.mark.parametrize(("option", "value"), [("changes", -1), ("models", 0)])
def test_options_that_cannot_be_are_refused(option, value):
    with raises(RecipeError, f"policy.comm.options.{option}"):
        ErrorReset(**{option: value})


# ---- training ----


class Alter(torch.optim.Optimizer):
    """Steps with the squares that it has, then adds to them."""

    def __init__(self, parameters, section):
        super().__init__(parameters, {"lr": section.lr})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            squares = self.state[p]["exp_avg_sq"]
            p -= self.param_groups[0]["lr"] * p.grad / (squares + 1).sqrt()
            squares += p.grad**2


class Lazy(LocalAdaAlter):
    kinds = ("exp_avg_sq",)


def declare():
    forget()
    tilth.optimizer("alter", state=("exp_avg_sq",))(Alter)
    tilth.optimizer("sgd", state=())(lambda parameters, section: torch.optim.SGD(parameters, lr=section.lr))


def made(rank, case, name, optimizer="adamw", **how):
    """A learner whose ranks learn apart. name: of ``ALL``; "": as one."""
    declare()
    kind = {"": None, "adaalter": Lazy}.get(name, ALL.get(name))
    optimizer = "alter" if name == "adaalter" else optimizer
    reducer = EXACT if kind is None else kind(**{"smallest": SMALLEST, **how})
    grid = ParallelDims.of(Mesh.of({axis: getattr(case, axis) for axis in AXES}), rank)
    sharded = shard(lambda: build(case), grid, reducer=reducer, schedule=case.schedule, sp=case.sp)
    sharded.load_(weights(case))
    rule = {"name": optimizer} | ({"clip_norm": 0.0} if optimizer == "sgd" else {})
    return Learner(engine_of(case, sharded, optimizer=rule), "model", "optimizer")


def trained(rank, case, name, steps=4, **how):
    """Losses, and after each step weights and digests of what is equal; names of the reducer's state."""
    role, losses, ends, digests = made(rank, case, name, **how), [], [], []
    for _ in range(steps):
        losses.append(step(role.engine, case).loss)
        ends.append(copied(role.sharded.parameters))
        digests.append(role._copies.digests(role.groups()))
    return losses, ends, digests, list(role._reducer.state())


def alike(ends):
    return all(torch.equal(ends[0][n], t) for own in ends for n, t in own.items())


def agree(digests):
    return compare(dict(enumerate(digests))) is None


SPREAD = [DP, Case(dp=2, tp=2), Case(dp=2, pp=2, layers=4)]


@pytest.mark.dist
@pytest.mark.parametrize("case", [DP, *[pytest.param(case, marks=pytest.mark.slow) for case in SPREAD[1:]]], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_ranks_are_equal_when_it_is_declared_and_learn(pool, case, name):
    found = pool.run(case.ranks, HERE + "trained", case=case, name=name, every=2)
    mesh = Mesh.of({axis: getattr(case, axis) for axis in AXES})
    copies = [found[rank] for rank in mesh.along(0, "dp")]
    for number in range(4):
        assert agree([own[2][number] for own in found])
        met = name != "cser" and number % 2 == 1
        assert alike([own[1][number] for own in copies]) == met
    losses = found[0][0]
    assert losses[3] < losses[0]
    prefixes = {"cser": {LOCAL, SHARED}, "average": set(), "adaalter": {SQUARES}}[name]
    assert {n.partition(".")[0] + "." for n in found[0][3]} == prefixes


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_with_whole_changes_a_run_has_the_bits_of_one_that_learns_together(pool, optimizer):
    plain = pool.run(2, HERE + "trained", case=DP, name="", optimizer=optimizer)
    found = pool.run(2, HERE + "trained", case=DP, name="cser", optimizer=optimizer, every=3, changes=1)
    for own, other in zip(found, plain):
        assert own[0] == other[0] and own[2] == other[2] and own[3] == []
        assert all(torch.equal(t, other[1][3][n]) for n, t in own[1][3].items())


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_without_changes_a_run_has_the_bits_of_local_sgd(pool, optimizer):
    how = {"case": DP, "steps": 5, "optimizer": optimizer, "every": 2}
    plain = pool.run(2, HERE + "trained", name="average", **how)
    found = pool.run(2, HERE + "trained", name="cser", changes=0, models=1, **how)
    for own, other in zip(found, plain):
        for end, there in zip(own[1], other[1]):
            assert all(torch.equal(t, there[n]) for n, t in end.items())


def alone(steps, every, optimizer):
    """Local steps of two processes in one: each on its rows with twice its gradient, averaged after each period."""
    declare()
    parts, case = [], Case()
    for _ in range(2):
        sharded = shard(lambda: build(case), ParallelDims.alone())
        sharded.load_(weights(case))
        section = {"name": optimizer} | ({"clip_norm": 0.0} if optimizer == "sgd" else {})
        parts.append(engine_of(case, sharded, optimizer=section))
    mask = whole_batch()[1]
    plain = loss_of(DP, mask)
    for number in range(steps):
        for rank, engine in enumerate(parts):
            grid = ParallelDims.of(Mesh.of({"dp": 2}), rank)
            own, some, starts = rows_of(DP, type("Of", (), {"grid": grid}))
            engine.update(own, some, {}, lambda micro: (2 * plain(micro)[0], {}), starts=starts)
        if (number + 1) % every == 0:
            for one, other in zip(*(engine.sharded.parameters.values() for engine in parts)):
                one.data = (one.data + other.data) / 2
                other.data = one.data.clone()
    return [copied(engine.sharded.parameters) for engine in parts]


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_averages_are_those_of_two_runs_by_hand_bit_for_bit(pool, optimizer):
    found = pool.run(2, HERE + "trained", case=DP, name="average", steps=5, every=2, optimizer=optimizer)
    for own, wanted in zip(found, alone(5, 2, optimizer)):
        assert all(torch.equal(t, wanted[n]) for n, t in own[1][4].items())
