"""Compressed sums of gradients: nothing is lost, copies stay equal, and a resumed run has the same bits."""

import types
from dataclasses import replace

import pytest
import torch

from tests.config.test_plugins import forget
from tests.errors import raises
from tests.parallel.layouts import Case, build, engine_of, loss_of, rows_of, watch_gradients, weights, whole
from tests.parallel.layouts import batch as whole_batch
from tests.parallel.test_comm import Operators
from tests.parallel.test_compress import NAMES, TERNARY, made
from tilth.checkpoint import Commit, begin_save
from tilth.config.axes import AXES
from tilth.core.errors import CheckpointError, PluginError, ReplicaMismatch
from tilth.core.layout import Layout, Mesh, Replicate, Shard
from tilth.guard.snapshots import compare
from tilth.parallel.compress import Compressor, Dither
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import GradientPiece, split
from tilth.parallel.sharded import shard
from tilth.parallel.sync import GIVEN, SUMS, Coder, CompressedReducer, by_rank
from tilth.roles.state import Learner

HERE = "tests.parallel.test_sync:"
SMALLEST = 100
"""All matrices of the model under test are compressed, its norms are not."""
DP, ONE, TWO = Case(dp=2), Case(dp=2, zero=1), Case(fsdp=2, zero=2)


class Spy(CompressedReducer):
    """Remembers what ranks gave before it was coded, by name."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = {}

    def code(self, gradients, group, key, pieces):
        for row, own in zip(gradients.view(len(pieces), -1), pieces):
            for part, piece in split(row, own):
                if piece.numel and GIVEN + piece.name in self.state():
                    seen = self.seen.setdefault(piece.name, torch.zeros_like(self.state()[GIVEN + piece.name][0]))
                    seen[piece.slices] += part.view_as(seen[piece.slices])
        super().code(gradients, group, key, pieces)


def engine(rank, case, name, kind=CompressedReducer, **how):
    """A train engine whose gradients are compressed. name: of ``NAMES``."""
    if name == "ternary":
        forget()
        exec(TERNARY, vars(types.ModuleType("ternary")))
    reducer = kind(name() if isinstance(name, type) else made(name), **{"smallest": SMALLEST, **how})
    grid = ParallelDims.of(Mesh.of({axis: getattr(case, axis) for axis in AXES}), rank)
    layout = {"sp": case.sp, "zero": case.zero, "schedule": case.schedule, "cp_style": case.cp_style}
    sharded = shard(lambda: build(case), grid, reducer=reducer, **layout)
    sharded.load_(weights(case))
    return engine_of(case, sharded)


def step(made, case):
    tokens, mask, starts = rows_of(case, made.sharded)
    return made.update(tokens, mask, {}, loss_of(case, whole_batch()[1]), starts=starts)


def copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def summed(rank, case, name, **how):
    """What was given and applied in three steps, what is left, weights and digests of copies after each step."""
    found = engine(rank, case, name, Spy, **how)
    role, gradients, applied, digests = Learner(found, "model", "optimizer"), {}, {}, []
    watch_gradients(found, gradients)
    losses = []
    for _ in range(3):
        losses.append(step(found, case).loss)
        every = whole(found.sharded, found.sharded.learned, gradients)
        applied = {n: applied.get(n, 0) + t.clone() for n, t in every.items()}
        digests.append(role._copies.digests(role.groups()))
    reducer = found.sharded.gradients.reducer
    return {
        "given": reducer.seen, "applied": applied, "left": copied(reducer.state()), "losses": losses,
        "digests": digests, "layouts": dict(reducer.layouts()), "end": copied(found.sharded.assemble([*applied])),
    }  # fmt: skip


ONE_WAY = [(DP, name, {}) for name in NAMES]
ALL = [
    *ONE_WAY,
    *[(DP, name, {"two_way": True}) for name in ("onebit", "topk", "randomk", "dither")],
    *[(ONE, name, {}) for name in ("topk", "randomk")],
    *[(TWO, name, {}) for name in ("topk", "randomk")],
    (Case(dp=2, tp=2), "dither", {}),
    (Case(dp=2, pp=2, layers=4), "topk", {}),
    (Case(dp=2, fsdp=2, zero=2), "topk", {}),
    (Case(dp=2, tp=2, family="deepseek_v3"), "topk", {}),
    (Case(dp=2, tp=2, ffn=2), "topk", {"smallest": 10}),  # one of two ranks has the only row of its part of the MLP
]
FEW = [ALL[1], ALL[3], ALL[7], ALL[11], ALL[13], ALL[-1]]


def called(case, name, how):
    return "-".join([str(case), name, *how])


def cases(some, more):
    rest = [pytest.param(*one, marks=pytest.mark.slow) for one in more if one not in some]
    return [*[pytest.param(*one) for one in some], *rest]


@pytest.mark.dist
@pytest.mark.parametrize(("case", "name", "how"), cases(FEW, ALL), ids=lambda value: str(value))
def test_what_was_applied_and_what_is_left_is_what_was_given(pool, case, name, how):
    """In float64: the sum over steps and ranks; copies are equal after each step; training goes on as without."""
    case = replace(case, double=True)
    found = pool.run(case.ranks, HERE + "summed", case=case, name=name, **how)
    layouts, names = found[0]["layouts"], {n.removeprefix(GIVEN) for n in found[0]["layouts"] if n.startswith(GIVEN)}
    assert names and not any("norm" in n for n in names)
    for n in sorted(names):
        given, left = torch.zeros(layouts[GIVEN + n].shape), torch.zeros(layouts[GIVEN + n].shape)
        given, left, sums = given.double(), left.double(), torch.zeros(given.shape[1:]).double()
        for rank, own in enumerate(found):
            for box in layouts[GIVEN + n].boxes(rank):
                given[box.slices], left[box.slices] = own["given"][n][None], own["left"][GIVEN + n]
            for box in layouts[SUMS + n].boxes(rank) if SUMS + n in layouts else ():
                sums[box.slices] = own["left"][SUMS + n]
        applied = found[0]["applied"][n]
        assert float((applied + left.sum(0) + sums - given.sum(0)).norm()) < 1e-6 * float(given.sum(0).norm())
        assert left.any()
    for n, tensor in found[0]["end"].items():
        assert all(torch.equal(tensor, own["end"][n]) for own in found)
    assert all(compare({r: own["digests"][at] for r, own in enumerate(found)}) is None for at in range(3))
    assert found[0]["losses"][2] < found[0]["losses"][0]


class Clips(Dither):
    """A plugin that changes what is shipped."""

    def encode(self, x, random):
        return super().encode(x.clamp(-1, 1), random)


class Narrow(Compressor):
    """Short tensors travel as float16."""

    def delta(self, count):
        return 1.0

    def encode(self, x, random):
        return x.half() if len(x) < 10 else x.clone()

    def decode(self, code, count, random):
        return code.float()


def round_trip(compressor, row, sizes):
    pieces = [GradientPiece(f"p{i}", (slice(0, size),), size) for i, size in enumerate(sizes)]
    coder = Coder(compressor, 0, GIVEN, feedback=False)
    coder.names = frozenset(piece.name for piece in pieces)
    (code,) = coder.pack(row.clone()[None], [pieces], [0])
    found = torch.zeros_like(row)
    assert len(code) == coder.length(pieces, row.dtype)
    coder.unpack([found], [code], [pieces], [0], [0])
    return found


def test_a_plugin_that_changes_a_shipped_compressor_codes_by_itself():
    assert round_trip(Clips(bits=8, group=4), torch.tensor([5.0, 0.5, -3.0, 0.2]), [4]).abs().max() <= 1.01


def test_codes_of_a_plugin_may_have_a_dtype_for_each_length():
    row = torch.arange(20.0)
    assert torch.equal(round_trip(Narrow(), row, [4, 16]), row)


@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_rows_that_are_coded_together_have_the_bits_of_rows_alone(monkeypatch, rows_at_once):
    monkeypatch.setattr("tilth.parallel.sync.BUCKET", rows_at_once * 4 * 12)
    pieces = [[GradientPiece(f"p{i}", (slice(0, 12),), 12)] for i in range(5)]
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    coder = Coder(Dither(bits=4, group=4), 0, GIVEN, feedback=False)
    coder.names = frozenset(own[0].name for own in pieces)
    codes = coder.pack(rows.clone(), pieces, range(5))
    for i, code in enumerate(codes):
        (alone,) = coder.pack(rows[i : i + 1].clone(), [pieces[i]], [i])
        assert torch.equal(code, alone)
    found, apart = torch.zeros(5, 12), torch.zeros(5, 12)
    coder.unpack(found.unbind(), codes, pieces, range(5), [0] * 5)
    for i, code in enumerate(codes):
        coder.unpack([apart[i]], [code], [pieces[i]], [i], [0])
    assert torch.equal(found, apart)


def test_forms_of_codes_are_learned_on_the_device_of_gradients():
    seen = []

    class Seen(Narrow):
        def encode(self, x, random):
            seen.append(x.device.type)
            return super().encode(x, random)

    reducer = CompressedReducer(Seen(), feedback=False)
    reducer.bind(None, {}, {}, (), {"a": torch.zeros(1, device="meta")})
    coder, pieces = reducer._gradients, [GradientPiece("a", (slice(0, 16),), 16)]
    coder.names = frozenset({"a"})
    assert coder.length(pieces, torch.float32) == 4 + 64 and seen == ["meta"]


@pytest.mark.parametrize(("feedback", "learned", "sent"), [(True, True, 1.0), (False, True, 0.0), (True, False, 0.0)])
def test_a_small_gradient_is_sent_in_time_by_feedback(feedback, learned, sent):
    """The greatest of two values travels: noise of no mean each step, so that the small one never would."""
    coder = Coder(made("topk"), 0, GIVEN, feedback=feedback)
    coder.names, total, pieces = frozenset({"a"}), torch.zeros(2), [GradientPiece("a", (slice(0, 2),), 2)]
    coder.left |= {"a": torch.zeros(2)} if feedback else {}
    for number in range(200):
        coder.begin(number)
        row = torch.tensor([(-1.0) ** number, 0.05])
        coder.pack(row[None], [pieces], [0])
        coder.settle(learned)
        total += row
    assert float(total[1]) == pytest.approx(200 * 0.05 * sent, abs=1.1) and abs(float(total[0])) <= 2.0


@pytest.mark.dist
def test_without_feedback_nothing_is_kept(pool):
    (own, _) = pool.run(2, HERE + "summed", case=DP, name="dither", feedback=False)
    assert own["left"] == {} == own["layouts"] and own["losses"][2] < own["losses"][0]


# ---- what is sent ----


def counted(rank, case, name, **how):
    """Bytes of gradients of a step by operation, and how many elements this rank gets in how many buckets."""
    found = engine(rank, case, name, **how)
    pieces = [[*own] for bucket in found.sharded.gradients._shards.buckets for own in bucket.pieces]
    coded, place = found.sharded.gradients.reducer._gradients.names, found.sharded.grid.rank
    step(found, case)
    with Operators() as operators:
        found.sharded.begin(1)
        tokens, mask, starts = rows_of(case, found.sharded)
        found.accumulate(tokens, mask, {}, loss_of(case, whole_batch()[1]), starts=starts)
        operators.seen.clear()
        found.sharded.gradients.reduce()
    exact = [[p.numel for p in own if p.name not in coded] for own in pieces]
    return operators.seen, [[p.numel for p in own if p.name in coded] for own in pieces], exact, place


def dithered(counts, exact):
    return 4 + sum(-(-n // 2) + 4 * -(-n // 128) for n in counts) + 4 * sum(exact)


@pytest.mark.dist
def test_bytes_are_those_of_the_codes(pool):
    """Four bits a value, four bytes a group, and four that tell what is not finite."""
    for seen, coded, exact, place in pool.run(2, HERE + "counted", case=ONE, name="dither"):
        (operation, _, nbytes), *more = seen
        assert (operation, more) == ("all_to_all", [])
        assert nbytes == dithered(coded[1 - place], exact[1 - place])
    for seen, coded, exact, place in pool.run(2, HERE + "counted", case=DP, name="dither", two_way=True):
        (first, _, there), (second, _, back) = seen
        assert (first, second) == ("all_to_all", "all_gather")
        assert there == dithered(coded[1 - place], exact[1 - place])
        assert back == max(dithered(*both) for both in zip(coded, exact))


# ---- checkpoints ----


def kept(rank, case, name, folder, **how):
    """Losses of two steps after a save, weights then, position, groups, and what was left out at the save."""
    role = Learner(engine(rank, case, name, **how), "model", "optimizer")
    step(role.engine, case), step(role.engine, case)
    assert [role.save(folder, True), role.saving(True)] == ["", ""]
    position, groups, left = role.position(), role.kept(), copied(role.engine.sharded.gradients.reducer.state())
    losses = [step(role.engine, case).loss for _ in range(2)]
    return losses, copied(role.sharded.assemble([*role.sharded.layouts])), position, groups, left


def resumed(rank, case, name, path, position, **how):
    """Losses of two steps after a load, weights then, and what was left out at the load; or why not."""
    role = Learner(engine(rank, case, name, **how), "model", "optimizer")
    step(role.engine, case)
    try:
        role.load(path, position)
    except CheckpointError as error:
        return error.key
    left = copied(role.engine.sharded.gradients.reducer.state())
    losses = [step(role.engine, case).loss for _ in range(2)]
    return losses, copied(role.sharded.assemble([*role.sharded.layouts])), left


def saved(pool, tmp_path, case, name, **how):
    folder = str(begin_save(tmp_path, 2))
    found = pool.run(case.ranks, HERE + "kept", case=case, name=name, folder=folder, **how)
    groups = found[0][3]
    assert groups == ["model", "optimizer", "model_reducer"]
    path = str(Commit(folder, {name: range(case.ranks) for name in groups}, {}).wait(60))
    return found, {"path": path, "position": found[0][2]}


RESUMED = [(DP, "dither", {"two_way": True}), (ONE, "randomk", {})]
MORE_RESUMED = [(TWO, "dither", {}), (Case(dp=2, pp=2, layers=4), "topk", {}), (Case(dp=2, tp=2), "dither", {})]


@pytest.mark.dist
@pytest.mark.parametrize(("case", "name", "how"), cases(RESUMED, MORE_RESUMED), ids=str)
def test_a_resumed_run_has_the_same_bits(pool, tmp_path, case, name, how):
    found, there = saved(pool, tmp_path, case, name, **how)
    again = pool.run(case.ranks, HERE + "resumed", case=case, name=name, **there, **how)
    for (losses, tensors, _, _, left), (other, end, loaded) in zip(found, again):
        assert other == losses and left.keys() == loaded.keys()
        assert all(torch.equal(left[n], t) for n, t in loaded.items())
        assert all(torch.equal(tensors[n], t) for n, t in end.items())


@pytest.mark.dist
@pytest.mark.parametrize("other", [Case(dp=4), pytest.param(Case(fsdp=4, zero=2), marks=pytest.mark.slow)], ids=str)
def test_another_number_of_ranks_gets_the_sum_in_equal_parts(pool, tmp_path, other):
    found, there = saved(pool, tmp_path, ONE, "topk")
    again = pool.run(4, HERE + "resumed", case=other, name="topk", **there)
    for n, first in found[0][4].items():
        total = first + found[1][4][n]
        parts = [own[2][n] for own in again]
        assert all(torch.equal(part, parts[0]) for part in parts)
        torch.testing.assert_close(sum(parts), total)


@pytest.mark.dist
def test_what_nothing_compresses_any_more_is_refused(pool, tmp_path):
    _, there = saved(pool, tmp_path, DP, "topk")
    assert set(pool.run(2, HERE + "resumed", case=DP, name="topk", smallest=10**6, **there)) == {"reducer"}


# ---- what is checked ----


class Flipped(CompressedReducer):
    """The last rank sums other bytes than it was sent in the second step."""

    def reduce_scatter(self, out, gradients, group, key):
        end = super().reduce_scatter(out, gradients, group, key)

        def flip():
            end()
            if self._gradients.step and group.rank():
                out.view(torch.int32)[int(out.abs().argmax())] ^= -(1 << 31)

        return flip


class Apart(CompressedReducer):
    """The last rank applies another sum than the other one."""

    def all_gather(self, out, own, group, key, pieces):
        super().all_gather(out, own, group, key, pieces)
        if self._gradients.step and group.rank():
            out.view(torch.int32)[int(out.abs().argmax())] ^= 1 << 22


def checked(rank, case, name, kind=CompressedReducer):
    """Digests of copies after two steps, what the checks of sums say of each, and what is not at rest after a flip."""
    role = Learner(engine(rank, case, name, kind), "model", "optimizer")
    plain, wrong = role.sharded.gradients.misreduced, []
    role.sharded.gradients.misreduced = lambda: wrong.append(bool(plain())) or ""
    step(role.engine, case), step(role.engine, case)
    digests = role._copies.digests(role.groups())
    left = next(iter(role.engine.sharded.gradients.reducer.state().values()))
    left.view(-1).view(torch.int32)[3] ^= 1
    with raises(ReplicaMismatch, "at_rest"):
        role.check_at_rest()
    return digests, wrong


@pytest.mark.dist
@pytest.mark.parametrize("case", [DP, ONE], ids=str)
def test_a_flipped_bit_is_found(pool, case):
    """Of a sum, of what copies apply, and of what a rank left out."""

    def found(kind):
        digests, wrong = zip(*pool.run(2, HERE + "checked", case=case, name="onebit", kind=kind))
        return compare(dict(enumerate(digests))) is None, wrong

    assert found(CompressedReducer) == (True, ([False, False], [False, False]))
    assert found(Flipped)[1] == ([False, False], [False, True])
    if case == DP:
        assert found(Apart) == (False, ([False, False], [False, False]))


def broken(rank, case, name):
    """A step whose gradient is not finite on the last rank, between two others: weights, what is left, results."""
    found = engine(rank, case, name)
    results, states = [], []
    for number in range(3):
        if number == 1 and rank == case.ranks - 1:
            name, p = next((n, p) for n, p in found.sharded.parameters.items() if n.endswith("q_proj.weight"))
            hook = p.register_hook(lambda grad: grad.fill_(float("inf")))
        results.append(step(found, case))
        if number == 1 and rank == case.ranks - 1:
            hook.remove()
        states.append((copied(found.sharded.parameters), copied(found.sharded.gradients.reducer.state())))
    return [one.not_finite for one in results], states


@pytest.mark.dist
@pytest.mark.parametrize("name", ["topk", "randomk"])
@pytest.mark.parametrize("case", [DP, ONE], ids=str)
def test_a_gradient_that_is_not_finite_leaves_the_step_out_on_all_ranks(pool, case, name):
    for wrong, states in pool.run(2, HERE + "broken", case=case, name=name):
        assert wrong == [False, True, False]
        for before, after, later in zip(*states):
            assert all(torch.equal(before[n], t) for n, t in after.items())
            assert all(t.isfinite().all() for t in later.values()) and any(
                (later[n] != t).any() for n, t in after.items()
            )


class Uneven(Compressor):
    """A code whose length depends on the values."""

    def encode(self, x, random):
        return x[x != 0]

    def decode(self, code, count, random):
        return torch.zeros(count)


def refused(rank, case):
    try:
        step(engine(rank, case, Uneven), case)
    except PluginError as error:
        return error.key


@pytest.mark.dist
def test_a_code_of_another_length_is_refused(pool):
    assert set(pool.run(2, HERE + "refused", case=ONE)) == {"compressor.Uneven.encode"}


def test_a_tensor_of_each_data_rank_has_a_dimension_more():
    mesh = Mesh.of({"dp": 2, "cp": 2, "tp": 2})
    held = Layout(mesh, tuple(Shard(0) if name == "tp" else Replicate() for name in mesh.names), (6, 5))
    found = by_rank(held)
    assert found.shape == (4, 6, 5)
    boxes = [found.boxes(rank)[0] for rank in range(8)]
    assert len(set(boxes)) == 8 and {box.size for box in boxes} == {(1, 3, 5)}
    assert [box.offset[1] for box in boxes] == [0, 3] * 4
