"""Local methods: ranks learn apart as the papers say, sync, resume with the same bits, and what is wrong is found."""

import itertools
import types

import numpy as np
import pytest
import torch

import tilth
from tests.config.test_plugins import forget
from tests.errors import raises
from tests.parallel.layouts import Case, build, engine_of, loss_of, rows_of, weights
from tests.parallel.layouts import batch as whole_batch
from tests.parallel.test_comm import Operators
from tests.parallel.test_sync import SMALLEST, copied, step
from tests.scripts import script
from tilth.checkpoint import Commit, begin_save, open_checkpoint
from tilth.config.axes import AXES
from tilth.core.errors import RecipeError, ReplicaMismatch
from tilth.core.layout import Box, Layout, Mesh, Replicate
from tilth.core.random import stream
from tilth.guard.snapshots import compare
from tilth.parallel.dims import ParallelDims
from tilth.parallel.local import LOCAL, SHARED, Averaging, ErrorReset, LocalAdaAlter
from tilth.parallel.reducer import EXACT
from tilth.parallel.sharded import shard
from tilth.plan.rules import Parameter
from tilth.roles.state import Learner
from tilth.training.optimizers.adaalter import EPS, INITIAL, AdaAlter

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


def bound(grid, kind=ErrorReset, own=None, **how):
    """A method with tensors of zeros."""
    own = own or {n: torch.zeros(shape, dtype=torch.float64) for n, shape in SIZES.items()}
    held = {n: Layout(grid.mesh, (Replicate(),) * len(grid.mesh.names), shape) for n, shape in SIZES.items()}
    method = kind(smallest=8, **how)
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


def empty(rank):
    """Sizes of the blocks before and of the tensors after a step of ranks without a part of any matrix."""
    own = {n: torch.zeros(0 if n in "ab" else 4, *shape[1:]) for n, shape in SIZES.items()}
    method, own = bound(ParallelDims.of(Mesh.of({"dp": 2}), rank), own=own, changes=4)
    method.prepare()
    before = {n: x.numel() for n, x in method._before.items()}
    method.settle(True)
    return before, {n: x.numel() for n, x in own.items()}


@pytest.mark.dist
def test_a_rank_without_a_part_of_a_tensor_sends_nothing_of_it(pool):
    sizes = {"a": 0, "b": 0, "norm": 4}
    assert pool.run(2, HERE + "empty") == [(sizes, sizes)] * 2


def compared(rank, every, models):
    """Models after each step of the way that ``benchmarks/economy.py`` compares CSER with."""
    late = script("economy_rivals.py").LateResiduals
    return driven(rank, 2, 12, kind=late, every=every, models=models)


@pytest.mark.dist
@pytest.mark.parametrize(("every", "models"), [(1, 3), (4, 2)])
def test_residuals_that_wait_are_those_of_qsparse_local_sgd(pool, every, models):
    """In float64: m += p_i of H steps, z -= mean C(m), m -= C(m), and all ranks go on from z."""
    found, (method, zeros) = pool.run(2, HERE + "compared", every=every, models=models), bound(ParallelDims.alone())
    method.changes, method._places = 0, {n: i for i, n in enumerate(SIZES)}
    z, optimizers = copied(zeros), [Nesterov(), Nesterov()]
    x, left = [copied(z), copied(z)], [copied(zeros), copied(zeros)]
    for number in range(12):
        for rank, n in itertools.product(range(2), SIZES):
            x[rank][n] = x[rank][n] - (p := optimizers[rank].change(n, gradient(rank, number, n, x[rank][n])))
            left[rank][n] = left[rank][n] + p
        if (number + 1) % every == 0:
            method.begin(number + 1)
            for n, block in method.blocks("models", models).items():
                z[n].view(-1)[block] -= sum(own[n].view(-1)[block] for own in left) / 2
                for own in left:
                    own[n].view(-1)[block] = 0
            x = [copied(z), copied(z)]
        for (own, _), wanted in zip((ends[number] for ends in found), x):
            for n, there in wanted.items():
                torch.testing.assert_close(own[n], there, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("option", "value"), [("changes", -1), ("models", 0)])
def test_options_that_cannot_be_are_refused(option, value):
    with raises(RecipeError, f"policy.comm.options.{option}"):
        ErrorReset(**{option: value})


# ---- training ----


@pytest.fixture(autouse=True)
def _undeclared():
    """Training in this process declares an optimizer, which no other test is to see."""
    yield
    forget()


def declare():
    forget()
    tilth.optimizer("sgd", state=())(lambda parameters, section: torch.optim.SGD(parameters, lr=section.lr))


def made(rank, case, name, optimizer="adamw", **how):
    """A learner whose ranks learn apart. name: of ``ALL``; "": as one."""
    declare()
    kind = ALL.get(name)
    optimizer = "adaalter" if name == "adaalter" else optimizer
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


def copies_of(case, found):
    """What ranks found that see other data than the first one, and its own."""
    return [found[rank] for rank in Mesh.of({axis: getattr(case, axis) for axis in AXES}).along(0, "dp")]


def agree(digests):
    return compare(dict(enumerate(digests))) is None


SPREAD = [DP, Case(dp=2, tp=2), Case(dp=2, pp=2, layers=4)]
OPTIMIZERS = [pytest.param("sgd", marks=pytest.mark.slow), "adamw"]


@pytest.mark.dist
@pytest.mark.parametrize("case", [DP, *[pytest.param(case, marks=pytest.mark.slow) for case in SPREAD[1:]]], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_ranks_are_equal_when_it_is_declared_and_learn(pool, case, name):
    found = pool.run(case.ranks, HERE + "trained", case=case, name=name, every=2)
    copies = copies_of(case, found)
    for number in range(4):
        assert agree([own[2][number] for own in found])
        synced = name != "cser" and number % 2 == 1
        assert alike([own[1][number] for own in copies]) == synced
    losses = found[0][0]
    assert losses[3] < losses[0]
    prefixes = {"cser": {LOCAL, SHARED}, "average": set(), "adaalter": set()}[name]
    assert {n.partition(".")[0] + "." for n in found[0][3]} == prefixes


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_whole_changes_a_run_has_the_bits_of_one_that_learns_together(pool, optimizer):
    plain = pool.run(2, HERE + "trained", case=DP, name="", optimizer=optimizer)
    found = pool.run(2, HERE + "trained", case=DP, name="cser", optimizer=optimizer, every=3, changes=1)
    for own, other in zip(found, plain):
        assert own[0] == other[0] and own[2] == other[2] and own[3] == []
        assert all(torch.equal(t, other[1][3][n]) for n, t in own[1][3].items())


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_changes_a_run_has_the_bits_of_local_sgd(pool, optimizer):
    how = {"case": DP, "steps": 3, "optimizer": optimizer, "every": 2}
    plain = pool.run(2, HERE + "trained", name="average", **how)
    found = pool.run(2, HERE + "trained", name="cser", changes=0, models=1, **how)
    for own, other in zip(found, plain):
        for end, there in zip(own[1], other[1]):
            assert all(torch.equal(t, there[n]) for n, t in end.items())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_rank_takes_the_steps_of_its_optimizer_bit_for_bit(name, optimizer):
    optimizer = "adaalter" if name == "adaalter" else optimizer
    plain = trained(0, Case(), "", steps=3, optimizer=optimizer)
    found = trained(0, Case(), name, steps=3, optimizer=optimizer, every=2)
    assert found[0] == plain[0] and found[3] == []  # its model is that of all, also within a period
    for end, there in zip(found[1], plain[1], strict=True):
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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_averages_are_those_of_two_runs_by_hand_bit_for_bit(pool, optimizer):
    found = pool.run(2, HERE + "trained", case=DP, name="average", steps=5, every=2, optimizer=optimizer)
    for own, wanted in zip(found, alone(5, 2, optimizer)):
        assert all(torch.equal(t, wanted[n]) for n, t in own[1][4].items())


LR, KINDS_OF_STATE = 1e-3, ("accumulated", "denominator")


def altered(rank, ranks, steps, every):
    """Models, sums of squares of this rank and of all ranks after each step."""
    own = {n: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for n, shape in SIZES.items()}
    method, _ = bound(ParallelDims.of(Mesh.of({"dp": ranks}), rank), LocalAdaAlter, own, every=every)
    section, found = types.SimpleNamespace(lr=LR, weight_decay=0.0), []
    optimizer = AdaAlter(list(own.values()), section, named=own, table=TABLE)
    for p in own.values():
        optimizer.state[p] = {k: torch.zeros_like(p) for k in KINDS_OF_STATE} | {"step": torch.zeros(())}
    state = {f"{kind}.{n}": tensor for n, p in own.items() for kind, tensor in optimizer.state[p].items()}
    method.follow([optimizer], state)
    for number in range(steps):
        method.begin(number + 5)  # what counts are steps of the optimizer
        for n, p in own.items():
            p.grad = gradient(rank, number, n, p.detach())
        method.prepare()
        optimizer.step()
        method.settle(True)
        found.append([copied({n: values[n] for n in SIZES}) for values in (own, *by_kind(state))])
    return found


def by_kind(state):
    return [{n: state[f"{kind}.{n}"] for n in SIZES} for kind in KINDS_OF_STATE]


@pytest.mark.dist
@pytest.mark.parametrize("every", [1, 3])
def test_local_adaalter_is_that_of_the_paper_and_its_denominators_are_equal(pool, every):
    x, a = ([{n: torch.zeros(s).double() for n, s in SIZES.items()} for _ in range(2)] for _ in range(2))
    b, found = dict(a[0]), pool.run(2, HERE + "altered", ranks=2, steps=8, every=every)
    for number in range(8):
        k = number % every + 1
        for n in SIZES:
            for rank in range(2):
                g = gradient(rank, number, n, x[rank][n])
                x[rank][n] = x[rank][n] - LR * g / (INITIAL**2 + b[n] + k * EPS**2).sqrt()
                a[rank][n] = a[rank][n] + g**2
            known = b[n]
            if k == every:
                x[0][n] = x[1][n] = (x[0][n] + x[1][n]) / 2
                a[0][n] = a[1][n] = b[n] = (a[0][n] + a[1][n]) / 2
            for rank in range(2):
                own, squares, common = found[rank][number]
                torch.testing.assert_close(own[n], x[rank][n], rtol=0, atol=1e-12)
                torch.testing.assert_close(squares[n], a[rank][n], rtol=1e-12, atol=0)
                if every > 1:  # else the sums are the denominators
                    torch.testing.assert_close(common[n], known, rtol=1e-12, atol=0)
                assert torch.equal(common[n], found[0][number][2][n])


# ---- what is sent ----


def sent(rank, **how):
    """Bytes of the sums of models in each of six steps, and the elements of blocks and of what is no block."""
    role, found = made(rank, DP, "cser", **how), []
    method = role._reducer
    for number in range(6):
        with Operators() as operators:
            step(role.engine, DP)
        method.begin(number)
        sizes = [sum(len(range(*block.indices(10**9))) for block in method.blocks("changes", 4).values())]
        method.begin(number + 1)
        sizes.append(sum(block.stop - block.start for block in method.blocks("models", 2).values()))
        found.append(([nbytes for op, _, nbytes in operators.seen if op == "all_reduce"], sizes))
    parameters = role.sharded.parameters
    rest = sum(p.numel() for n, p in parameters.items() if n not in method._places)
    return found, rest, sum(p.numel() for p in parameters.values())


@pytest.mark.dist
def test_bytes_are_those_of_the_blocks(pool):
    """And together 1 / changes + 1 / (H models) of those of gradients, but for what is no block."""
    for found, rest, every in pool.run(2, HERE + "sent", every=3, changes=4, models=2):
        for number, (nbytes, (changes, models)) in enumerate(found):
            sums = [n for n in nbytes if n > 64]  # what decides about a step is less
            assert sums == [4 * (changes + rest)] + [4 * models] * (number % 3 == 2)
        share = sum(changes + models * (number % 3 == 2) for number, (_, (changes, models)) in enumerate(found))
        assert share / 6 == pytest.approx((1 / 4 + 1 / 6) * (every - rest), rel=0.02)


# ---- checkpoints ----


def kept(rank, case, name, folder, **how):
    """Losses and weights of three steps after a save in the middle of a period; position, groups, and models then."""
    role = made(rank, case, name, **how)
    for _ in range(3):
        step(role.engine, case)
    models, moments = copied(role.sharded.parameters), copied(role.engine.optimizers.state_tensors())
    assert [role.save(folder, True), role.saving(True)] == ["", ""]
    assert all(torch.equal(models[n], p) for n, p in role.sharded.parameters.items())
    role.check_at_rest()
    position, groups = role.position(), role.kept()
    losses = [step(role.engine, case).loss for _ in range(3)]
    return losses, copied(role.sharded.parameters), position, groups, models, moments


def resumed(rank, case, name, path, position, steps=3, **how):
    """Losses and weights of steps after a load; models and optimizer state at the load, digests of what is equal."""
    role = made(rank, case, name, **how)
    step(role.engine, case)
    role.load(path, position)
    models, moments = copied(role.sharded.parameters), copied(role.engine.optimizers.state_tensors())
    digests = role._copies.digests(role.groups())
    losses = [step(role.engine, case).loss for _ in range(steps)]
    role.check_at_rest()
    return losses, copied(role.sharded.parameters), models, moments, digests


def saved(pool, tmp_path, case, name, **how):
    folder = str(begin_save(tmp_path, 3))
    found = pool.run(case.ranks, HERE + "kept", case=case, name=name, folder=folder, every=2, **how)
    groups = found[0][3]
    assert groups == ["model", "optimizer", *["model_reducer"] * (case.dp > 1)]
    path = str(Commit(folder, {name: range(case.ranks) for name in groups}, {}).wait(60))
    return found, {"path": path, "position": found[0][2]}


@pytest.mark.dist
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", [DP, *[pytest.param(case, marks=pytest.mark.slow) for case in SPREAD[1:]]], ids=str)
def test_a_run_resumes_in_the_middle_of_a_period_bit_for_bit(pool, tmp_path, case, name):
    found, there = saved(pool, tmp_path, case, name)
    again = pool.run(case.ranks, HERE + "resumed", case=case, name=name, every=2, **there)
    assert not alike([own[4] for own in copies_of(case, found)])
    for (losses, end, _, _, models, moments), (other, finish, loaded, state, _) in zip(found, again):
        assert other == losses
        for there, here in ((models, loaded), (moments, state), (end, finish)):
            assert there.keys() == here.keys() and all(torch.equal(there[n], t) for n, t in here.items())


@pytest.mark.dist
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("case", "after"), [(DP, FOUR), (DP, Case()), (Case(), DP)], ids=str)
def test_another_number_of_ranks_begins_with_the_mean_of_all_models(pool, tmp_path, name, case, after):
    found, there = saved(pool, tmp_path, case, name)
    checkpoint = open_checkpoint(there["path"])
    again = pool.run(after.ranks, HERE + "resumed", case=after, name=name, every=2, steps=1, **there)
    for n in found[0][4]:
        mean = sum(own[4][n] for own in found) / len(found)
        torch.testing.assert_close(checkpoint.read("model", n, Box.whole(mean.shape)), mean)
        for own in again:
            torch.testing.assert_close(own[2][n], mean, rtol=1e-6, atol=1e-7)
            assert torch.equal(own[2][n], again[0][2][n])
    for n in found[0][5]:
        torch.testing.assert_close(again[-1][3][n], sum(own[5][n] for own in found) / len(found))
        if after == DP and n.startswith("denominator."):  # of squares that one rank alone has seen
            assert torch.equal(again[0][3][n], found[0][5][n.replace("denominator", "accumulated")])
    assert agree([own[4] for own in again])


# ---- what is checked ----


class Other(Averaging):
    """The last rank has other bits after a sync."""

    def sync(self):
        super().sync()
        if self._group.rank():
            next(iter(self._own.values())).data.view(-1).view(torch.int32)[3] ^= 1


def flipped(rank, name, where, kind=None):
    """What finds a bit that flips on the last rank after three steps: the digests at rest, or those of copies."""
    if kind is not None:
        ALL["other"] = kind
    role = made(rank, DP, name, every=2)
    for _ in range(2 if where == "sync" else 3):
        step(role.engine, DP)
    found = []
    if rank and where != "sync":
        title = next(n for n in role._reducer.state() if n.startswith(where))
        role._reducer.state()[title].view(-1).view(torch.int32)[3] ^= 1
    try:
        role.check_at_rest()
    except ReplicaMismatch as error:
        found.append(error.key)
    return found, role._copies.digests(role.groups())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "where", "rest"),
    [("cser", LOCAL, True), ("average", LOCAL, True), ("cser", SHARED, False), ("other", "sync", False)],
)
def test_a_flipped_bit_is_found(pool, name, where, rest):
    """Of one rank's model by its digests, of what is equal by those of the copies."""
    kind = Other if name == "other" else None
    (first, one), (last, two) = pool.run(2, HERE + "flipped", name=name, where=where, kind=kind)
    assert (first, last) == ([], ["at_rest"] * rest) and agree([one, two]) == rest


def changed_alone(rank, name):
    """``misreduced`` after a bit flips in a gradient between its backward pass and its use."""
    role, found = made(rank, DP, name, every=2), []
    gradients = role.sharded.gradients
    reduce, plain = gradients.reduce, gradients.misreduced

    def flip():
        if rank and gradients.reducer.step == 1:
            role.sharded.model.model.norm.weight.grad.numpy().view(np.int32)[2] ^= 1 << 20
        reduce()

    gradients.reduce, gradients.misreduced = flip, lambda: found.append(plain()) or ""
    step(role.engine, DP), step(role.engine, DP)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", ["cser", "average"])
def test_a_gradient_that_changes_before_it_is_used_is_found(pool, name):
    first, last = pool.run(2, HERE + "changed_alone", name=name)
    assert first == ["", ""] and last[0] == "" and "model.norm.weight" in last[1]


def broken(rank, name):
    """A step whose gradient is not finite on the last rank, between two others."""
    role, results, ends = made(rank, DP, name, every=2), [], []
    for number in range(3):
        if number == 1 and rank:
            hook = role.sharded.parameters["model.norm.weight"].register_hook(lambda grad: grad * float("inf"))
        results.append(step(role.engine, DP).not_finite)
        if number == 1 and rank:
            hook.remove()
        ends.append(copied(role.sharded.parameters))
    return results, ends


@pytest.mark.dist
@pytest.mark.parametrize("name", ALL)
def test_a_gradient_that_is_not_finite_leaves_the_step_out_on_all_ranks(pool, name):
    found = pool.run(2, HERE + "broken", name=name)
    for results, ends in found:
        assert results == [False, True, False]
        assert all(t.isfinite().all() for t in ends[2].values())
        assert any((ends[2][n] != t).any() for n, t in ends[1].items())
    if name == "average":  # a period is of steps, left out or not
        assert alike([ends[1] for _, ends in found]) and not alike([ends[2] for _, ends in found])
    if name == "adaalter":  # its optimizer counts
        assert not alike([ends[1] for _, ends in found]) and alike([ends[2] for _, ends in found])


def evaluated(rank, name):
    """Models of ranks, and in a block in which they are equal."""
    role = made(rank, DP, name, every=4)
    step(role.engine, DP)
    before = copied(role.sharded.parameters)
    with role.averaged():
        there = copied(role.sharded.parameters)
    return before, there, copied(role.sharded.parameters)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["cser", "average"])
def test_models_are_equal_where_others_read_them_and_go_on_as_they_were(pool, name):
    found = pool.run(2, HERE + "evaluated", name=name)
    assert alike([own[1] for own in found]) and not alike([own[0] for own in found])
    for before, there, after in found:
        assert all(torch.equal(before[n], t) for n, t in after.items())
        for n, t in there.items():
            torch.testing.assert_close(t, (found[0][0][n] + found[1][0][n]) / 2)
