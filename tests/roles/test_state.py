"""What a role keeps: written by one layout and read by another, from disks and stores; replicas share the reading."""

import shutil

import pytest
import torch

from tests.checkpoint.make import same
from tests.checkpoint.test_processes import everything, step
from tests.parallel.layouts import Case, engine_of, spread, weights
from tilth.checkpoint import Commit, begin_save
from tilth.core.errors import CheckpointError
from tilth.parallel.dims import ParallelDims
from tilth.roles import state
from tilth.roles.state import Learner, replicas

HERE = "tests.roles.test_state:"
ALONE = Case(tp=1)


def learner(rank, case, tensors):
    sharded = spread(case, rank)
    sharded.load_(tensors)
    return Learner(engine_of(case, sharded, ema=0.5), "model", "optimizer")


def keep(rank, case, folder):
    """Two steps; a copy that a third one must not reach; what went wrong."""
    role = learner(rank, case, weights(case))
    for _ in range(2):
        step(role.engine, case)
    held = everything(role.engine), role.position()
    told = role.save(folder, True)
    step(role.engine, case)
    return *held, [told, role.saving(True)], role.kept()


def take(rank, case, path, position, one_machine=True):
    """What a process comes to that knows nothing but the checkpoint, and the bytes that it asked for."""
    opened, plain = [], state.open_checkpoint

    def remembered(*given):
        opened.append(plain(*given))
        return opened[-1]

    state.open_checkpoint, known = remembered, state._one_machine
    state._one_machine = known if one_machine else (lambda grid: False)
    try:
        role = learner(rank, case, {name: torch.full_like(t, 9.0) for name, t in weights(case).items()})
        role.load(path, position)
    finally:
        state.open_checkpoint, state._one_machine = plain, known
    return everything(role.engine), role.position(), opened[0].bytes_read


def kept(pool, case, root, n):
    """(checkpoint, what was held, position) of ``case`` on n ranks."""
    folder = str(begin_save(root, 2))
    found = pool.run(n, HERE + "keep", case=case, folder=folder)
    assert all(problems == ["", ""] for _, _, problems, _ in found)
    groups = {name: range(n) for name in found[0][3]}
    return str(Commit(folder, groups, {}).wait(60)), found[0][0], found[0][1]


def equal(held, found):
    return held.keys() == found.keys() and all(
        same(t, found[group][name]) for group in held for name, t in held[group].items()
    )


def test_a_copy_is_of_the_moment_and_one_process_reads_what_it_wrote(tmp_path):
    folder = str(begin_save(tmp_path, 2))
    held, position, problems, groups = keep(0, ALONE, folder)
    assert problems == ["", ""] and groups == ["model", "optimizer", "ema"]
    path = Commit(folder, {name: [0] for name in groups}, {}).wait(60)
    found, at, _ = take(0, ALONE, str(path), position)
    assert equal(held, found) and at == position


def test_what_goes_wrong_is_told_and_not_raised(tmp_path):
    folder = begin_save(tmp_path, 2)
    shutil.rmtree(folder)
    role = learner(0, ALONE, weights(ALONE))
    assert role.save(str(folder), True) == ""
    assert "step 2" in role.saving(True) and role.saving(True) == ""
    assert "step 2" in role.save(str(folder), False)


def test_an_optimizer_is_adopted_and_nothing_else(tmp_path):
    folder = str(begin_save(tmp_path, 2))
    held, _, _, groups = keep(0, ALONE, folder)
    path = Commit(folder, {name: [0] for name in groups}, {}).wait(60)
    role = learner(0, ALONE, {name: torch.full_like(t, 9.0) for name, t in weights(ALONE).items()})
    role.adopt(str(path))
    found = everything(role.engine)
    assert equal({"optimizer": held["optimizer"]}, {"optimizer": found["optimizer"]})
    assert all((t == 9.0).all() for t in found["model"].values())


@pytest.mark.dist
@pytest.mark.parametrize(("one_machine", "times"), [(True, 2), (False, 1)])
def test_replicas_on_several_machines_read_a_disk_that_they_share_once(pool, tmp_path, one_machine, times):
    path, held, position = kept(pool, Case(fsdp=2), str(tmp_path), 2)
    found = pool.run(2, HERE + "take", case=Case(dp=2), path=path, position=position, one_machine=one_machine)
    assert all(equal(held, tensors) and at == position for tensors, at, _ in found)
    size = sum(t.nbytes for tensors in held.values() for t in tensors.values())
    assert sum(nbytes for *_, nbytes in found) == times * size


@pytest.mark.dist
def test_replicas_share_what_they_read_of_a_store(pool, tmp_path):
    path, held, position = kept(pool, Case(dp=2), f"file://{tmp_path}", 2)
    found = pool.run(2, HERE + "take", case=Case(dp=2), path=path, position=position)
    assert all(equal(held, tensors) and at == position for tensors, at, _ in found)


@pytest.mark.dist
@pytest.mark.parametrize("saved", [Case(fsdp=2), Case(dp=2, zero=1)], ids=str)
def test_replicas_that_divide_updates_share_the_weights_and_read_their_own_state(pool, tmp_path, saved):
    path, held, position = kept(pool, saved, str(tmp_path), 2)
    found = pool.run(2, HERE + "take", case=Case(dp=2, zero=1), path=path, position=position, one_machine=False)
    assert all(equal(held, tensors) and at == position for tensors, at, _ in found)
    size = sum(t.nbytes for tensors in held.values() for t in tensors.values())
    both = sum(t.nbytes for name, t in held["optimizer"].items() if name.startswith("step."))
    assert sum(nbytes for *_, nbytes in found) == size + both


def test_without_replicas_there_is_nobody_to_share_with():
    assert replicas(ParallelDims.alone()) is None and state._one_machine(ParallelDims.alone())


MOE = {"experts": True, "num_experts": 4}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (Case(ep=2, **MOE), [Case(fsdp=2, **MOE), Case(**MOE)]),
        (Case(fsdp=2, **MOE), [Case(ep=2, **MOE)]),
        *(
            pytest.param(source, targets, marks=pytest.mark.slow)
            for source, targets in (
                (Case(ep=2, fsdp=2, **MOE), [Case(ep=4, **MOE), Case(tp=2, **MOE), Case(dp=2, ep=2, **MOE)]),
                (Case(ep=4, **MOE), [Case(ep=2, tp=2, **MOE), Case(**MOE)]),
            )
        ),
    ],
    ids=str,
)
def test_divided_experts_are_read_by_any_other_layout(pool, tmp_path, source, targets):
    path, held, position = kept(pool, source, str(tmp_path), source.ranks)
    assert held["optimizer"] and any(".experts." in name for name in held["model"])
    for case in targets:
        for tensors, at, _ in pool.run(case.ranks, HERE + "take", case=case, path=path, position=position):
            assert equal(held, tensors) and at == position


def test_a_checkpoint_with_another_number_of_experts_names_the_tensor(tmp_path):
    case = Case(**MOE)
    folder = str(begin_save(tmp_path, 2))
    _, position, _, groups = keep(0, case, folder)
    path = Commit(folder, {name: [0] for name in groups}, {}).wait(60)
    with pytest.raises(CheckpointError) as caught:
        take(0, Case(**{**MOE, "num_experts": 5}), str(path), position)
    assert "mlp.gate.weight" in str(caught.value) or ".experts." in str(caught.value)
