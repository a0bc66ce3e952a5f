"""Updates that ranks with the same parameters divide (``zero = 1``)."""

import json
import math

import pytest
import torch

from tests.checkpoint.test_processes import assert_same, begin, groups_of, resume, saved_by
from tests.errors import raises
from tests.parallel.layouts import (
    Case,
    batch,
    bytes_held,
    copied,
    engine_of,
    loss_of,
    rows_of,
    spread,
    train,
    weights,
    whole,
)  # fmt: skip
from tests.parallel.test_training import apart, check_double, slow
from tilth.checkpoint import Group, Saver, begin_save, commit_save, open_checkpoint
from tilth.core.errors import ModelError
from tilth.core.layout import Mesh
from tilth.guard.snapshots import compare, differing
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.plan.layout import layouts, update_layouts
from tilth.roles.state import Learner

pytestmark = pytest.mark.dist
HERE = "tests.parallel.test_zero:"
TRAIN = "tests.parallel.layouts:train"
MOE = {"experts": True, "num_experts": 4}

DOUBLE = [
    Case(dp=2, zero=1, double=True, dropout=0.1, tied=False, rows=(3,)),
    Case(cp=2, zero=1, double=True, value=True),
    Case(ep=2, zero=1, double=True, **MOE, rows=(1,)),
]
DOUBLE_MORE = [
    Case(dp=4, zero=1, double=True, rows=(1, 0, 6), checkpointing=True),
    Case(dp=2, tp=2, sp=True, zero=1, double=True, tied=False),
    Case(dp=2, cp=2, zero=1, double=True, dropout=0.1),
    Case(dp=2, pp=2, zero=1, double=True),
    Case(dp=2, pp=2, zero=1, double=True, layers=4, schedule="zero-bubble"),
    Case(dp=2, ep=2, zero=1, double=True, **MOE, both=True),
    Case(dp=2, zero=1, double=True, experts=True),
    Case(dp=2, zero=1, double=True, lora=True, rows=(0,)),
    Case(dp=2, tp=2, zero=1, double=True, lora=True, experts=True, tied=False),
]


@pytest.mark.parametrize("case", [*DOUBLE, *slow(DOUBLE_MORE)], ids=str)
def test_two_steps_are_those_of_one_process_in_float64(pool, case):
    check_double(pool, case)


MUON = {"name": "muon", "lr": 1e-3, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, zero=1, double=True),
        *slow(
            [
                Case(dp=2, tp=2, zero=1, double=True, experts=True),
                Case(dp=2, ep=2, zero=1, double=True, **MOE),
                Case(dp=2, pp=2, zero=1, double=True, layers=4),
            ]
        ),
    ],
    ids=str,
)
def test_an_optimizer_of_matrices_has_whole_ones_of_its_own(pool, case):
    one = train(0, case.alone, steps=3, optimizer=MUON, ema=0.5)
    for got in pool.run(case.ranks, TRAIN, case=case, steps=3, optimizer=MUON, ema=0.5):
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-9
        assert max(apart(got["ema"][n], w) for n, w in one["ema"].items()) < 1e-6
        assert got["results"][2].grad_norm == pytest.approx(one["results"][2].grad_norm, rel=1e-9)


@pytest.mark.parametrize("case", [Case(dp=4, zero=1), *slow([Case(dp=2, cp=2, zero=1, experts=True)])], ids=str)
def test_a_rank_has_its_part_of_the_optimizer_state_and_whole_parameters(pool, case):
    alone = bytes_held(0, case.alone)
    found = pool.run(case.ranks, "tests.parallel.layouts:bytes_held", case=case)
    assert sum(held["state"] for held in found) == alone["state"]
    for held in found:
        assert held["parameters"] == held["storage"] == alone["parameters"]
        assert held["state"] == pytest.approx(alone["state"] / case.ranks, rel=0.25)  # 33 and 20 rows over 4 ranks


def test_layers_and_averages_have_the_norms_of_one_process(pool):
    case, how = Case(dp=2, zero=1, double=True), {"steps": 3, "ema": 0.5, "watch": ("layer_norms", "noise_scale")}
    one, plain = train(0, case.alone, **how), pool.run(2, TRAIN, case=Case(dp=2, double=True), **how)
    for got, other in zip(pool.run(2, TRAIN, case=case, **how), plain):
        a, b, c = (found["results"][-1].metrics for found in (got, one, other))
        for name in {name for name in b if name.startswith("norm/")}:
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-6)
        assert float(a["noise/trace"]) == pytest.approx(float(c["noise/trace"]), rel=1e-9)
        assert max(apart(got["ema"][n], average) for n, average in one["ema"].items()) < 1e-6


@pytest.mark.parametrize("rows", [(0,), *slow([(9,)])])
def test_ranks_run_their_own_numbers_of_micro_batches(pool, rows):
    case = Case(dp=2, zero=1, rows=rows, micro_tokens=12)
    one, found = train(0, case.alone)["results"][0], pool.run(2, TRAIN, timeout=60.0, case=case)
    assert [got["results"][0].padded for got in found] == [0, 0]
    assert [got["results"][0].grad_norm for got in found] == pytest.approx([one.grad_norm] * 2, rel=1e-5)


# ---- what is checked ----


def steps(rank, case, lost=False, flip=0):
    """Two steps, in the second of which the last rank loses new weights, or a gradient's bit; digests after each."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    engine, (tokens, mask, starts) = engine_of(case, sharded), rows_of(case, sharded)
    role, found = Learner(engine, "model", "optimizer"), []
    plain, wrong, last = sharded.gradients.misreduced, [], rank == case.ranks - 1
    for given in sharded.gradients.given:
        given.every = 1

    def looked():
        if found and last and flip:
            names = (given.names for given in sharded.gradients.given)
            grads = [engine.optimizers.parameters[name].grad for some in names for name in some]
            grad = max((g for g in grads if g.numel()), key=lambda g: float(g.abs().max()))
            grad.view(-1).view(torch.int32)[int(grad.abs().argmax())] ^= flip
        wrong.append(plain())
        return ""

    sharded.gradients.misreduced = looked
    for number in range(2):
        if number and last and lost:
            sharded.updates.gather = lambda before=copied(sharded.parameters): _lose(sharded, before)
        engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
        found.append((role._copies.digests(role.groups()), role._copies.tensors(role.groups())))
    return found, wrong


@torch.no_grad()
def _lose(sharded, before):
    """Take part in the gather, and keep the old weights."""
    type(sharded.updates).gather(sharded.updates)
    for name, p in sharded.parameters.items():
        p.copy_(before[name])


@pytest.mark.parametrize("case", [Case(dp=2, zero=1), *slow([Case(dp=2, ep=2, zero=1, **MOE)])], ids=str)
def test_a_rank_that_lost_the_new_weights_is_found(pool, case):
    for lost in (False, True):
        found = [own for own, _ in pool.run(case.ranks, HERE + "steps", case=case, lost=lost)]
        verdicts = [compare({rank: own[step][0] for rank, own in enumerate(found)}) for step in (0, 1)]
        assert verdicts[0] is None and (verdicts[1] is not None) == lost
        names = differing([own[1][1] for own in found])
        assert bool(names) == lost and all(name.startswith("model/") for name in names)


@pytest.mark.parametrize("case", [Case(dp=2, zero=1), *slow([Case(dp=2, ep=2, zero=1, **MOE)])], ids=str)
def test_a_part_of_the_gradients_that_is_not_what_ranks_gave_is_seen_on_its_rank_alone(pool, case):
    for rank, (_, wrong) in enumerate(pool.run(case.ranks, HERE + "steps", case=case, flip=-(1 << 31))):
        assert wrong[0] == "" and bool(wrong[1]) == (rank == case.ranks - 1)
    assert all(wrong == ["", ""] for _, wrong in pool.run(case.ranks, HERE + "steps", case=case, flip=1))


# ---- checkpoints ----


SAVED = [Case(dp=4, zero=1, value=True), *slow([Case(dp=2, ep=2, zero=1, **MOE), Case(dp=2, tp=2, zero=1)])]


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_a_checkpoint_goes_to_one_rank_to_shards_and_back(pool, tmp_path, case):
    """Parts of 4 ranks have the bits of one rank, of zero = 3 on 2 ranks, and of parts on 2 that read the last."""
    first, path = saved_by(pool, case, tmp_path / "first")
    common = {"experts": case.experts, "num_experts": case.num_experts, "value": case.value}
    assert_same(resume(0, Case(**common), path, first["position"])["held"], first["held"])
    shards, halves = Case(fsdp=2, **common), Case(dp=2, zero=1, **common)
    folder = begin_save(tmp_path / "second", 2)
    parts = pool.run(2, HERE + "passed_on", case=shards, path=str(path), folder=str(folder))
    second = str(commit_save(folder, json.loads(json.dumps([part for own in parts for part in own])), {}))
    for other, there in ((shards, str(path)), (halves, second)):
        how = {"case": other, "path": there, "position": first["position"]}
        for reply in pool.run(2, "tests.checkpoint.test_processes:resume", **how):
            assert_same(reply["held"], first["held"])


def passed_on(rank, case, path, folder):
    """Read a checkpoint and write this rank's part of another one."""
    engine = begin(rank, case, {name: torch.full_like(t, 9.0) for name, t in weights(case).items()})
    for name, (tensors, held, _) in groups_of(engine).items():
        open_checkpoint(path).restore(name, tensors, held, rank)
    groups = {name: Group(*group) for name, group in groups_of(engine).items()}
    return [part.model_dump(mode="json") for part in Saver().write(folder, groups, rank, f"{rank:02d}")]


# ---- layouts ----


def test_matrices_are_dealt_evenly_and_rows_are_divided():
    shape = spread(Case(layers=6)).model
    held = layouts(shape.config, Mesh.of({"dp": 2, "cp": 2}))
    matrices = {name for name in held if "_proj" in name}
    found = update_layouts(held, shape.table, matrices)
    sizes = [sum(box.numel for name in matrices for box in found[name].boxes(rank)) for rank in range(4)]
    assert sum(sizes) == sum(math.prod(held[name].shape) for name in matrices)
    assert max(sizes) < 1.2 * min(sizes)
    assert all(len(found[name].mesh) == 1 for name in matrices)
    rows = [found["model.embed_tokens.weight"].boxes(rank)[0].size[0] for rank in range(4)]
    assert rows == [9, 8, 8, 8]
    assert not any(update_layouts(found, shape.table)[name] is not found[name] for name in found)  # once is enough


def test_shards_of_parameters_are_refused():
    grid = ParallelDims.of(Mesh.of({"fsdp": 2}), 0)
    with raises(ModelError, "zero"):
        shard(lambda: Decoder(spread(Case()).model.config), grid, zero=1)


def test_memory_that_moves_between_steps_is_followed(pool):
    assert all(pool.run(2, HERE + "moved", case=Case(dp=2, zero=1)))


def moved(rank, case):
    """True if the weights after a step are the same, wherever they lay before it."""
    ends = []
    for move in (False, True):
        sharded = spread(case, rank)
        sharded.load_(weights(case))
        engine, (tokens, mask, starts) = engine_of(case, sharded), rows_of(case, sharded)
        for p in sharded.parameters.values() if move else ():
            p.data = p.data.clone()
        engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
        ends.append(copied(sharded.parameters))
    state = whole(sharded, [*sharded.learned], {n: p.detach() for n, p in engine.optimizers.parameters.items()})
    return all(torch.equal(ends[1][n], p) and torch.equal(p, state[n]) for n, p in ends[0].items())
