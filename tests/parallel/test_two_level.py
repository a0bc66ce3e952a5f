"""SDP4Bit: sums of gradients in two levels, and changes of weights in four bits."""

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.layouts import Case, build, engine_of, weights
from tests.parallel.test_comm import Operators
from tests.parallel.test_sync import SMALLEST, copied, step
from tilth.checkpoint import Commit, begin_save
from tilth.config.axes import AXES
from tilth.config.schema import CommConfig
from tilth.core.layout import Mesh
from tilth.core.random import stream
from tilth.guard.snapshots import compare
from tilth.models import row_product
from tilth.parallel.compress import four_bits
from tilth.parallel.dims import ParallelDims
from tilth.parallel.local import reducer_of
from tilth.parallel.quantise import BLOCK, transform
from tilth.parallel.reducer import EXACT, GradientPiece
from tilth.parallel.sharded import shard
from tilth.parallel.sync import CompressedReducer, TwoLevelReducer, TwoLevels
from tilth.roles.state import Learner

HERE = "tests.parallel.test_two_level:"
ONE, DP = Case(dp=2, zero=1), Case(dp=2)
COUNT = 300
"""Values of each rank's part: no multiple of 32 nor of 128."""


def test_the_transform_undoes_itself():
    """Sylvester's matrix is symmetric, its first row is 1, and rows that differ are orthogonal."""
    h = torch.eye(BLOCK)
    transform([h.view(-1)], 1.0)
    assert torch.equal(h, h.t()) and set(h.unique().tolist()) == {-1.0, 1.0} and (h[0] == 1).all()
    transform([h.view(-1)], 1 / BLOCK)
    assert torch.equal(h, torch.eye(BLOCK))


def test_the_kernel_transforms_with_the_bits_of_torch_s_functions(monkeypatch):
    row_product.prepare()
    if not row_product.ready():
        pytest.skip("the kernels cannot be built here")
    given = [stream(0, "values", count).normal(0, count) for count in (1, 31, 32, 33, 64, 1000)]
    fast, slow = ([one.clone() for one in given] for _ in range(2))
    transform(fast, 0.25)
    monkeypatch.setattr(row_product, "_library", None)
    transform(slow, 0.25)
    assert all(map(torch.equal, fast, slow)) and torch.equal(fast[0], given[0])
    assert torch.equal(fast[3][32:], given[3][32:]) and not torch.equal(fast[3][:32], given[3][:32])


def summed(rank, ranks, node_size, smooth, kind, draws=1, count=COUNT):
    """This rank's part of a sum and the exact one, mean over draws; bytes sent by operation and ranks; what it gave."""
    grid = ParallelDims.of(Mesh.of({"dp": ranks}), rank)
    reducer, group = TwoLevelReducer(TwoLevels(smooth=smooth), node_size=node_size), grid.group("dp")
    reducer._grid = grid
    reducer._within.names = reducer._across.names = frozenset({"a"})
    row = [GradientPiece("a", (slice(0, count),), count), GradientPiece("b", (slice(0, 3),), 3)]
    pieces = [row for _ in range(ranks)]
    every = torch.stack([values(r, ranks, kind, count) for r in range(ranks)])
    found = []
    for number in range(draws):
        reducer.begin(number)
        given, out = every[rank].clone(), torch.empty(count + 3)
        with Operators() as operators:
            reducer.code(given.view(-1), group, "sum", pieces)
            reducer.reduce_scatter(out, given.view(-1), group, "sum")()
        found.append(out)
    return torch.stack(found), every.sum(0)[rank], operators.seen, given


def values(rank, ranks, kind, count=COUNT):
    """[ranks, count + 3]: for each part. signs: 1 and -1, the same on all ranks, so that no rounding is needed."""
    x = stream(0, kind, 0 if kind == "signs" else rank).normal(0, ranks * (count + 3)).view(ranks, -1)
    if kind == "signs":
        x = x.sign()
    elif kind == "heavy":
        x[:, ::97] *= 50
    return x


SIZES = [1, 2, 4]


@pytest.mark.dist
@pytest.mark.parametrize("size", SIZES)
def test_each_part_reaches_its_owner_whatever_the_nodes(pool, size):
    """Values that both levels can send exactly are summed exactly, rounded or not."""
    for found, exact, _, _ in pool.run(4, HERE + "summed", ranks=4, node_size=size, smooth=False, kind="signs"):
        assert torch.equal(found[0], exact)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES if n != 2)])
def test_rounded_parts_keep_their_mean(pool, size):
    """Also those of outliers; what is not compressed is exact."""
    how = {"ranks": 4, "node_size": size, "smooth": True, "kind": "heavy", "draws": 60}
    for found, exact, _, _ in pool.run(4, HERE + "summed", **how):
        error, spread = (found.double().mean(0) - exact).abs(), found.double().std(0) / 60**0.5
        assert (error <= 5 * spread + 1e-5 * exact.abs().max()).all()
        torch.testing.assert_close(found[0, COUNT:], exact[COUNT:])  # what is not compressed
        assert (found - exact).norm(dim=1).max() < 0.5 * exact.norm()


def variance(x, bits):
    """Return the variance of rounding x [n] at random in groups of 128, summed: s^2 f (1 - f), f what x / s has behind
    its point."""
    scales = x.view(-1, 128).abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    places = (x.view(-1, 128) / scales).double()
    return float((scales.double() ** 2 * (places - places.floor()) * (places.ceil() - places)).sum())


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_the_error_of_a_sum_is_that_of_its_two_roundings(pool, kind):
    """Of an eighth of a matrix [192, 192], in 2 nodes of 2: the squared error is the variance of 4 codes of 8 bits and
    of 2 of 4 bits, over 32, as blocks of 32 are rounded after a transform of which the square is 32."""
    count, ranks, size = 24 * 192, 4, 2
    every = torch.stack([values(rank, ranks, kind, count) for rank in range(ranks)])[:, :, :count].clone()
    transform([every.view(-1)], 1.0)
    how = {"ranks": ranks, "node_size": size, "smooth": True, "kind": kind, "draws": 12, "count": count}
    for owner, (found, exact, _, _) in enumerate(pool.run(4, HERE + "summed", **how)):
        nodes = every[:, owner].view(ranks // size, size, -1)
        wanted = sum(variance(one, 8) for one in nodes.flatten(0, 1)) + sum(variance(one, 4) for one in nodes.sum(1))
        errors = (found - exact)[:, :count].double()
        assert float(errors.square().sum(1).mean()) == pytest.approx(wanted / BLOCK, rel=0.05)
        assert float(errors.mean()) == pytest.approx(0, abs=5 * (wanted / BLOCK / count / errors.numel()) ** 0.5)


def followed(rank, steps, count):
    """Weights that all ranks have, after steps that follow this rank's exact ones; the greatest distance between the
    two, in scales of what was sent; the greatest error of what is called left out."""
    grid, reducer = ParallelDims.of(Mesh.of({"dp": 2}), rank), CompressedReducer(None, weights=four_bits())
    reducer._weights.names, reducer._weights.left["a"] = frozenset({"a"}), torch.zeros(count)
    pieces, whole = [[GradientPiece("a", (slice(0, count),), count)]] * 2, torch.zeros(2, count)
    exact, apart, wrong = whole[rank].clone(), 0.0, 0.0
    for number in range(steps):
        reducer.begin(number)
        exact += 1e-3 * stream(0, "change", rank, number).normal(0, count) ** 3
        groups = F.pad(exact - whole[rank], (0, -count % 2048)).view(-1, 2048)
        scales = (groups.abs().amax(1) / 7).repeat_interleave(2048)[:count]
        reducer.gather_weights(whole, exact.clone(), grid.group("dp"), pieces)
        reducer.settle(True)
        apart = max(apart, float(((exact - whole[rank]).abs() / scales).max()))
        wrong = max(wrong, float((whole[rank] + reducer._weights.left["a"] - exact).abs().max()))
    return whole, apart, wrong


@pytest.mark.dist
def test_changes_follow_the_exact_weights_within_one_rounding(pool):
    """What a step leaves out is in the next change: the distance after 100 steps is that after one."""
    (first, *_), (second, *_) = found = pool.run(2, HERE + "followed", steps=100, count=3000)
    assert torch.equal(first, second) and first.abs().max() > 0.1
    assert all(apart < 1 + 1e-3 and wrong < 1e-6 for _, apart, wrong in found)


@pytest.mark.dist
def test_the_transform_lowers_the_error_of_outliers(pool):
    errors = {}
    for smooth in (False, True):
        how = {"ranks": 4, "node_size": 2, "smooth": smooth, "kind": "heavy", "draws": 4}
        errors[smooth] = sum(float((f - e).norm()) for f, e, _, _ in pool.run(4, HERE + "summed", **how))
    assert errors[True] < 0.8 * errors[False]


@pytest.mark.dist
def test_bytes_of_each_level_and_what_the_checks_are_told(pool):
    groups, exact = -(-COUNT // 128), 4 + 3 * 4
    within, across = COUNT + 4 * groups + exact, -(-COUNT // 2) + 4 * groups + exact
    found = pool.run(4, HERE + "summed", ranks=4, node_size=2, smooth=True, kind="normal")
    for rank, (_, _, seen, _) in enumerate(found):
        node = "0,1" if rank < 2 else "2,3"
        assert seen == [("all_to_all", node, 2 * within), ("all_to_all", f"{rank % 2},{rank % 2 + 2}", across)]
    given = torch.stack([own.view(4, -1) for _, _, _, own in found]).sum(0)
    for rank, (out, *_) in enumerate(found):
        torch.testing.assert_close(out[0].sum(), given[rank].sum(), rtol=1e-4, atol=1e-3)
    (one, *_) = pool.run(2, HERE + "summed", ranks=2, node_size=2, smooth=True, kind="normal")
    assert [nbytes for *_, nbytes in one[2]] == [within]


# ---- training ----


def engine(rank, case, section):
    reducer = reducer_of(CommConfig(**{"smallest": SMALLEST, **section}), 0) if section else EXACT
    grid = ParallelDims.of(Mesh.of({axis: getattr(case, axis) for axis in AXES}), rank)
    sharded = shard(lambda: build(case), grid, reducer=reducer, zero=case.zero)
    sharded.load_(weights(case))
    return engine_of(case, sharded)


def trained(rank, case, section, steps=3):
    """Losses, weights, state, and digests of copies and verdicts of sums after each step; bytes of the last."""
    role = Learner(engine(rank, case, section), "model", "optimizer")
    plain, wrong, digests, losses = role.sharded.gradients.misreduced, [], [], []
    role.sharded.gradients.misreduced = lambda: wrong.append(plain()) or ""
    for _ in range(steps):
        with Operators() as operators:
            losses.append(step(role.engine, case).loss)
        digests.append(role._copies.digests(role.groups()))
    state = copied(role.sharded.gradients.reducer.state())
    layouts = dict(role.sharded.gradients.reducer.layouts())
    return losses, copied(role.sharded.parameters), state, layouts, digests, wrong, operators.seen


SDP4BIT = {"gradients": "sdp4bit", "weights": "difference4", "node_size": 2}
CASES = [(ONE, SDP4BIT), (DP, {"gradients": "sdp4bit"}), (Case(dp=4, zero=1), SDP4BIT)]


@pytest.mark.dist
@pytest.mark.parametrize(("case", "section"), [*CASES[:2], pytest.param(*CASES[2], marks=pytest.mark.slow)], ids=str)
def test_copies_stay_equal_and_training_goes_on(pool, case, section):
    found = pool.run(case.ranks, HERE + "trained", case=case, section=section)
    plain = pool.run(case.ranks, HERE + "trained", case=case, section={})
    for own, exact in zip(found, plain):
        assert all(torch.equal(t, found[0][1][n]) for n, t in own[1].items())
        assert own[5] == ["", "", ""]
        assert own[0] == pytest.approx(exact[0], rel=0.05) and own[0][1:] != exact[0][1:]
    assert all(compare({r: own[4][at] for r, own in enumerate(found)}) is None for at in range(3))


def trained_in_bf16(rank):
    """Verdicts of sums, where products of matrices are of bf16 if the processor has them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return trained(rank, ONE, SDP4BIT)[5]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.dist
def test_sums_are_those_of_fp32_where_products_are_not(pool):
    assert pool.run(2, HERE + "trained_in_bf16") == [["", "", ""]] * 2


@pytest.mark.dist
def test_weights_and_what_is_left_of_their_change_are_the_exact_weights(pool):
    """After a step with exact gradients; 4 bits a value and 4 bytes a group of 2,048 travel."""
    found = pool.run(2, HERE + "trained", case=ONE, section={"weights": "difference4"}, steps=1)
    plain = pool.run(2, HERE + "trained", case=ONE, section={}, steps=1)
    layouts = found[0][3]
    assert layouts and all(n.startswith("weight_residual.") for n in layouts)
    moved, rows = 0, []
    for rank, own in enumerate(found):
        counts = {n.partition(".")[2]: t.numel() for n, t in own[2].items()}
        rest = {n: t for n, t in own[1].items() if n not in counts}
        for title, left in own[2].items():
            name = title.partition(".")[2]
            for box in layouts[title].boxes(rank):
                whole, exact = own[1][name][box.slices], plain[rank][1][name][box.slices]
                torch.testing.assert_close(whole + left, exact, rtol=1e-6, atol=1e-7)
                moved += bool((whole != exact).any())
        assert all(torch.equal(t, plain[rank][1][n]) for n, t in rest.items())
        rows.append(sum(-(-n // 2) + 4 * -(-n // 2048) for n in counts.values() if n) + 4)
    assert moved
    gathers = [nbytes for op, _, nbytes in found[0][6] if op == "all_gather"]
    small = sum(
        -(-len(t) // 2) * t[0].numel() * 4 for n, t in found[0][1].items() if f"weight_residual.{n}" not in layouts
    )
    assert gathers == [max(rows) + small]


def kept(rank, folder):
    role = Learner(engine(rank, ONE, SDP4BIT), "model", "optimizer")
    step(role.engine, ONE), step(role.engine, ONE)
    assert [role.save(folder, True), role.saving(True)] == ["", ""]
    position = role.position()
    return [step(role.engine, ONE).loss for _ in range(2)], copied(role.sharded.parameters), position


def resumed(rank, path, position):
    role = Learner(engine(rank, ONE, SDP4BIT), "model", "optimizer")
    step(role.engine, ONE)
    role.load(path, position)
    return [step(role.engine, ONE).loss for _ in range(2)], copied(role.sharded.parameters)


@pytest.mark.dist
def test_a_resumed_run_has_the_same_bits(pool, tmp_path):
    folder = str(begin_save(tmp_path, 2))
    found = pool.run(2, HERE + "kept", folder=folder)
    groups = dict.fromkeys(("model", "optimizer", "model_reducer"), range(2))
    path = str(Commit(folder, groups, {}).wait(60))
    for own, again in zip(found, pool.run(2, HERE + "resumed", path=path, position=found[0][2])):
        assert own[0] == again[0] and all(torch.equal(t, again[1][n]) for n, t in own[1].items())


def test_weights_that_are_rounded_themselves_are_stuck_where_their_changes_are_not():
    """The counter-example of the paper: |w|^2 from (1, -1), one coordinate's gradient at a time, three levels."""

    def rounded(x):
        scale = x.abs().max()
        return scale * (x / scale).round() if scale else x

    picks = stream(0, "coordinates").integers(0, 400, 2).tolist()
    direct, model, main = (torch.tensor([1.0, -1.0], dtype=torch.float64) for _ in range(3))
    for pick in picks:
        w = direct.clone()
        w[pick] -= 0.1 * 4 * direct[pick]
        direct = rounded(w)
        main[pick] -= 0.1 * 4 * model[pick]
        model = model + rounded(main - model)
    assert direct.tolist() == [1.0, -1.0] and model.norm() < 1e-3
