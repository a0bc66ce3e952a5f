"""Real ranks with a model that is really spread: they save together, and go on in the same layout or in another."""

import json

import pytest
import torch

from tests.checkpoint.make import same
from tests.parallel.layouts import Case, batch, copied, engine_of, loss_of, rows_of, spread, weights, whole
from tilth.checkpoint import Group, Saver, begin_save, commit_save, open_checkpoint, save, state_layouts

pytestmark = pytest.mark.dist
HERE = "tests.checkpoint.test_processes:"
PAIRS = [Case(fsdp=2, value=True)]
PAIRS += [
    pytest.param(case, marks=pytest.mark.slow)
    for case in (Case(dp=2, zero=2), Case(tp=2), Case(fsdp=2, zero=2, tied=False))
]
FOURS = [Case(fsdp=4), Case(fsdp=2, tp=2, value=True), Case(dp=2, tp=2), Case(dp=2, fsdp=2)]


def groups_of(engine):
    """Tensors and layouts of each group, as a role keeps them."""
    sharded, state = engine.sharded, engine.optimizers.state_tensors()
    model = {n: p.detach() for n, p in sharded.parameters.items()}
    held, kinds = sharded.update_layouts, engine.optimizers.state_dtypes(sharded.dtypes)
    return {
        "model": (model, sharded.layouts, sharded.dtypes),
        "optimizer": (state, state_layouts(held, kinds), kinds),
        "ema": (engine.ema.tensors, held, dict.fromkeys(held, torch.float32)),
    }


def begin(rank, case, tensors):
    sharded = spread(case, rank)
    sharded.load_(tensors)
    return engine_of(case, sharded, ema=0.5)


def step(engine, case):
    tokens, mask, starts = rows_of(case, engine.sharded)
    return engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts).loss


def everything(engine):
    """Whole tensors of all groups, which every rank takes part in putting together."""
    sharded = engine.sharded
    names = list(sharded.parameters)
    found = {"model": copied(sharded.assemble(names)), "ema": copied(whole(sharded, names, engine.ema.tensors))}
    state = engine.optimizers.state_tensors()
    found["optimizer"] = {n: t.clone() for n, t in state.items() if n.startswith("step.")}
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = whole(sharded, names, {n: state[f"{kind}.{n}"] for n in names})
        found["optimizer"] |= {f"{kind}.{n}": t.clone() for n, t in moments.items()}
    return found


def train_and_save(rank, case, folder):
    """Two steps, this rank's parts, what all ranks hold, and a third step."""
    engine = begin(rank, case, weights(case))
    for _ in range(2):
        step(engine, case)
    if folder is None:
        parts = {name: tensors for name, (tensors, *_) in groups_of(engine).items()}
        parts = {name: {n: t.clone() for n, t in tensors.items()} for name, tensors in parts.items()}
    else:
        groups = {name: Group(*group) for name, group in groups_of(engine).items()}
        parts = [report.model_dump(mode="json") for report in Saver().write(folder, groups, rank, f"{rank:02d}")]
    found = {"parts": parts, "held": everything(engine), "position": engine.position()}
    return found | {"loss": step(engine, case), "next": everything(engine)}


def resume(rank, case, path, position):
    """A process that knows nothing but the checkpoint makes the third step."""
    engine = begin(rank, case, {name: torch.full_like(t, 9.0) for name, t in weights(case).items()})
    checkpoint = open_checkpoint(path)
    for name, (tensors, layouts, _) in groups_of(engine).items():
        checkpoint.restore(name, tensors, layouts, rank)
    engine.sharded.reshard()
    engine.restore(position)
    held = everything(engine)
    return {"held": held, "loss": step(engine, case), "next": everything(engine)}


def saved_by(pool, case, root):
    """What the ranks reported, and the checkpoint that the controller made of it."""
    folder = begin_save(root, 2)
    found = pool.run(case.ranks, HERE + "train_and_save", case=case, folder=str(folder))
    parts = json.loads(json.dumps([part for reply in found for part in reply["parts"]]))
    return found[0], commit_save(folder, parts, {})


def assert_same(a, b):
    for group, tensors in a.items():
        assert tensors.keys() == b[group].keys()
        assert [n for n, t in tensors.items() if not same(t, b[group][n])] == []


def assert_near(a, b, case):
    for group, tensors in a.items():
        for name, value in tensors.items():
            torch.testing.assert_close(value, b[group][name], rtol=2e-4, atol=2e-5, msg=f"{case}: {group}/{name}")


def check(pool, tmp_path, case, others):
    first, path = saved_by(pool, case, tmp_path)
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    read = {g: {n: checkpoint.read(g, n) for n in checkpoint.names(g)} for g in checkpoint.groups}
    assert_same(first["held"], read)
    assert {float(t) for n, t in read["optimizer"].items() if n.startswith("step.")} == {2.0}
    for other in [case, *others]:
        if other.ranks == 1:
            found = resume(0, other, path, first["position"])
        else:
            replies = pool.run(other.ranks, HERE + "resume", case=other, path=str(path), position=first["position"])
            for reply in replies:
                assert_same(reply["held"], first["held"])
            found = replies[0]
        assert_same(found["held"], first["held"])
        if other == case:
            assert found["loss"] == first["loss"]
            assert_same(found["next"], first["next"])
        else:
            assert found["loss"] == pytest.approx(first["loss"], rel=1e-5)
            assert_near(found["next"], first["next"], other)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_two_ranks_go_on_where_they_were_and_so_does_one(pool, tmp_path, case):
    check(pool, tmp_path, case, [case.alone])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOURS, ids=str)
def test_four_ranks_go_on_in_every_layout(pool, tmp_path, case):
    others = [Case(fsdp=2), Case(dp=2, fsdp=2), Case(fsdp=2, tp=2), Case(fsdp=4), Case(tp=2)]
    alike = [Case(**{**other.__dict__, "tied": case.tied, "value": case.value}) for other in others if other != case]
    check(pool, tmp_path, case, [case.alone, *alike])


def test_what_one_process_saved_goes_on_in_two(pool, tmp_path):
    case = Case(fsdp=2)
    alone = train_and_save(0, case.alone, None)
    path = save(tmp_path, 2, alone["parts"], {})
    for reply in pool.run(2, HERE + "resume", case=case, path=str(path), position=alone["position"]):
        assert_same(reply["held"], alone["held"])
        assert reply["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert_near(reply["next"], alone["next"], case)
