"""Schedules of failures for the control plane, and mutations of its code that the invariants must see."""

import pytest

from tests.guard.simulation import KINDS, Violation, World, simulate
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.dispatch import Dispatch
from tilth.guard.recovery import Recovery
from tilth.guard.snapshots import Snapshots
from tilth.launch import life as launch
from tilth.launch import survive

QUICK = 30
MUTANTS = 500
"""Schedules within which a mutation must be seen."""


def test_schedules(tmp_path):
    struck = {kind for seed in range(QUICK) for kind in simulate(seed, tmp_path).struck}
    assert struck == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_schedules(part, tmp_path):
    for seed in range(1000 * part, 1000 * (part + 1)):
        simulate(10_000 + seed, tmp_path)


def test_a_schedule_happens_again_by_its_seed(tmp_path):
    worlds = [simulate(7, tmp_path) for _ in range(2)]
    assert [(w.now, w.delivered, w.struck) for w in worlds] == [
        (worlds[0].now, worlds[0].delivered, worlds[0].struck)
    ] * 2


def test_an_undisturbed_run_ends_without_a_recovery(tmp_path):
    world = simulate(0, tmp_path, World(0, faults=0))
    assert (world.log, world.struck) == (list(range(1, 9)), [])


class Strikes(World):
    """One fault, at the worker of the engine, once a policy has its state."""

    def strike(self, kind):
        self.struck.append(kind)
        self.backend.hurt(2, kind)


@pytest.mark.parametrize("kind", ["die", "stop", "lose"])
@pytest.mark.parametrize("at", range(60, 100, 8))
def test_a_lost_engine_leaves_the_policy_as_it_is(tmp_path, kind, at):
    world = Strikes(at, faults=0)
    world.faults = [(at, kind)]
    simulate(at, tmp_path, world)
    assert world.struck == [kind] and world.done.count("make") == 2 and world.done.count("load") in (0, 2)


# ---- mutations ----


def keeps_a_torn_slot(monkeypatch):
    """A slot counts as a snapshot while it is written anew."""
    take = Snapshots.take

    def torn(self, roles, step, objects, mesh):
        kept = list(self._taken)
        try:
            take(self, roles, step, objects, mesh)
        except BaseException:
            self._taken = kept[::-1]
            raise

    monkeypatch.setattr(Snapshots, "take", torn)


def forgets_the_older_snapshot(monkeypatch):
    """A damaged snapshot takes the one before it along."""
    discard = Snapshots.discard

    def both(self):
        discard(self)
        self._taken = []

    monkeypatch.setattr(Snapshots, "discard", both)


def forgets_a_rollback(monkeypatch):
    """A second failure makes the controller forget that it wanted to go back to a checkpoint."""
    monkeypatch.setattr(survive, "replace", lambda action, **changed: action)


def keeps_what_was_loaded_in_part(monkeypatch):
    """Roles that have loaded a part of a damaged snapshot stay."""
    monkeypatch.setattr(survive.Survival, "remake", lambda self: None)


def keeps_generations(monkeypatch):
    """A role that is made again has the generation of the one before it."""
    make = Cluster.make

    def same(self, group):
        make(self, group)
        group.generation += 1

    monkeypatch.setattr(Cluster, "make", same)


def replaces_nobody(monkeypatch):
    """A recovery is always tried again, with the same workers, also with dead ones."""
    monkeypatch.setattr(Dispatch, "silent", lambda self, ranks, seconds: set())
    decide = Recovery.decide

    def again(self, *given):
        return survive.Action("retry") if decide(self, *given).step != "rollback" else survive.Action("rollback")

    monkeypatch.setattr(Recovery, "decide", again)


def begins_anew(monkeypatch):
    """Every failure goes back to the disk."""
    monkeypatch.setattr(Snapshots, "newest", lambda self: None)


def prefers_an_old_snapshot(monkeypatch):
    """A snapshot that is older than the checkpoint on disk is used."""

    def restore(run, remake, *, fallback=False, again=False):
        kept = run.snapshots.newest()
        if kept is None:
            launch._restore_from_disk(run, fallback=False)
            return
        launch._load(kept, run.roles, run.directory)
        run.restore(kept.objects)
        run.directory.rewind(run.state.step)

    monkeypatch.setattr(launch, "_restore", restore)


def keeps_a_changed_state(monkeypatch):
    """A role that is kept counts as unchanged after an update."""
    monkeypatch.setattr(
        launch, "unchanged", lambda group, step: group.marked == step and group.changed_by <= {"update"}
    )


def keeps_a_state_without_a_snapshot(monkeypatch):
    """A role that is kept before the first commit counts as new."""
    monkeypatch.setattr(launch, "is_new", lambda group: True)


def leaves_the_lock(monkeypatch):
    """A new controller does not look for another one."""
    monkeypatch.setattr("tests.guard.simulation.Controller.end", lambda self: None)


@pytest.mark.parametrize(
    "mutate",
    [
        keeps_a_torn_slot,
        forgets_the_older_snapshot,
        pytest.param(forgets_a_rollback, marks=pytest.mark.slow),
        pytest.param(keeps_what_was_loaded_in_part, marks=pytest.mark.slow),
        keeps_generations,
        pytest.param(replaces_nobody, marks=pytest.mark.slow),
        begins_anew,
        prefers_an_old_snapshot,
        keeps_a_changed_state,
        keeps_a_state_without_a_snapshot,
        leaves_the_lock,
    ],
)
def test_a_broken_control_plane_is_seen(mutate, monkeypatch, tmp_path):
    mutate(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(MUTANTS):
            simulate(seed, tmp_path)
