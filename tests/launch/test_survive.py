"""A run that loses workers goes on by itself, and ends with the bits of an undisturbed one."""

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tilth_studies.drill import inject

from tests.errors import raises
from tests.flows import tiny
from tilth.cluster.backends.local import LocalBackend
from tilth.cluster.backends.ray import RayBackend
from tilth.cluster.controller.cluster import Cluster
from tilth.core.errors import StorageError, WorkerLost
from tilth.core.layout import Mesh
from tilth.engines.protocol import EngineError
from tilth.flows.callbacks import Callback
from tilth.guard.recovery import EVICTS
from tilth.launch.life import LifeOfRun
from tilth.launch.survive import Survival, _named
from tilth.runs.directory import RECOVERIES
from tilth.runs.readers import read_metrics, read_state, read_trajectories, summarise
from tilth.runs.signals import HandOver, Interrupted

pytestmark = pytest.mark.dist
LOCAL = {"backend": "local", "workers": 2}
FSDP = {
    "cluster": LOCAL,
    "policy": {"layout": {"fsdp": 2}},
    "algorithm": {"kl_coef": 0.05, "minibatches": 2, "steps": 4},
}
LAYOUTS = {
    "dp": {"cluster": LOCAL},
    "dp, updates divided": {"cluster": LOCAL, "policy": {"layout": {"zero": 1}}, "train": {"ema": 0.9}},
    "tp, engine over tp": {
        "cluster": LOCAL,
        "policy": {"layout": {"tp": 2}},
        "rollout": {"layout": {"tp": 2}},
    },
    "pp": {"cluster": LOCAL, "policy": {"layout": {"pp": 2}}, "model": {"layers": 2}},
    "split": {
        "cluster": {"backend": "local", "pools": {"learn": 1, "speak": 1}},
        "rollout": {"pool": "speak"},
        "reward": {"pool": "speak"},
    },
}


class Harm(Callback):
    """Send a signal to a worker some time after a step. at: step -> (rank, signal, seconds)."""

    def __init__(self, at):
        self.at, self.done = at, []

    def on_step_end(self, run, step, metrics):
        if step in self.at and step not in self.done:
            self.done.append(step)
            rank, number, seconds = self.at[step]
            pid = run.policy._dispatch.backend.probe(rank).pid
            threading.Timer(seconds, os.kill, (pid, number)).start()


class LastBlow(Callback):
    """Kill a worker when all that is its is saved."""

    def on_save(self, run, step, path):
        if run.at_end:
            os.kill(run.policy._dispatch.backend.probe(1).pid, signal.SIGKILL)


def recoveries(directory):
    path = directory / RECOVERIES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_run(ours, plain):
    assert tiny.same(tiny.numbers(ours.directory), tiny.numbers(plain.directory))
    assert tiny.weights(ours.directory) == tiny.weights(plain.directory)
    a, b = (read_trajectories(run.directory).sort_by("id") for run in (ours, plain))
    assert a.num_rows and [name for name in a.column_names if not a[name].equals(b[name])] == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Undisturbed runs by the sections of their recipe."""
    made = {}

    def run(sections):
        key = json.dumps(sections)
        if key not in made:
            made[key] = tiny.run(tiny.recipe(tmp_path_factory.mktemp("plain"), **sections))
            assert not recoveries(made[key].directory)
        return made[key]

    return run


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def backend(request):
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    return {"local": {}, "ray": {"cluster": {"backend": "ray", "workers": 2}}}[request.param]


def test_workers_that_are_killed_or_stopped_are_replaced_and_change_no_bit(tmp_path, plain, backend):
    harm = Harm({2: (1, signal.SIGKILL, 0.0), 4: (1, signal.SIGSTOP, 0.0), 8: (0, signal.SIGKILL, 0.05)})
    seen = tiny.Recorder()
    sections = {**FSDP, "guard": {"hang_after": 4.0, "spares": int(bool(backend))}, **backend}
    ours = tiny.run(tiny.recipe(tmp_path, **sections), callbacks=[harm, LastBlow(), seen], report=True)

    assert_same_run(ours, plain(FSDP))
    *found, last = recoveries(ours.directory)
    assert (last["kind"], last["ranks"], last["action"], last["lost"]) == ("crash", [1], "none", 0.0)
    ended = "has died" if backend else "SIGKILL"  # on Ray only the raylet, its parent, learns the signal
    assert ended in last["evidence"] and any("had come to its end" in text for text in seen.messages)
    assert [(one["kind"], one["ranks"], one["replaced"]) for one in found] == [
        ("crash", [1], [1]),
        ("hang", [1], [1]),
        ("crash", [0], [0]),
    ]
    assert [one["step"] in (step, step + 1) for one, step in zip(found, (2, 4, 8))] == [True] * 3
    assert [row["attempt"] for row in read_metrics(ours.directory)][-1] == 4
    attempts = read_state(ours.directory)["attempts"]
    assert [one["state"] for one in attempts] == ["recovered"] * 3 + ["finished"]
    assert any("worker 1 is new" in text for text in seen.messages)
    summary = summarise(ours.directory)
    assert [one["kind"] for one in summary["recoveries"]] == ["crash", "hang", "crash", "crash"]
    assert summary["recoveries"][1]["lost"] > 4.0  # seconds without a sign of life
    assert 0 < summary["ettr"] < 1
    assert f"after step {found[0]['step']}" in (ours.directory / "report.html").read_text()


class Massacre(Callback):
    """Kill all workers at the same time."""

    def on_step_end(self, run, step, metrics):
        if step == 4 and not hasattr(self, "done"):
            self.done = [os.kill(link.pid, signal.SIGKILL) for link in run.policy._dispatch.backend.links]


def test_all_workers_that_are_killed_at_once_are_one_failure(tmp_path, plain):
    ours = tiny.run(tiny.recipe(tmp_path, **FSDP), callbacks=[Massacre()])
    assert_same_run(ours, plain(FSDP))
    (found,) = recoveries(ours.directory)
    assert (found["kind"], found["step"], found["replaced"]) == ("crash", 4, [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(2))
def test_a_worker_may_die_at_any_moment_in_any_layout(tmp_path, plain, layout, seed):
    harm = Harm({3 + seed: (seed, signal.SIGKILL, 0.07 * seed), 9: (1 - seed, signal.SIGKILL, 0.11 * seed)})
    ours = tiny.run(tiny.recipe(tmp_path, **LAYOUTS[layout]), callbacks=[harm])
    assert_same_run(ours, plain(LAYOUTS[layout]))
    assert len(recoveries(ours.directory)) == 2


class Watch(Callback):
    """Note after which steps the policy was copied from another object than before, by its generation."""

    def __init__(self):
        self.generations = []

    def on_step_end(self, run, step, metrics):
        self.generations.append((run.policy.generation, run.rollout.generation))


@pytest.mark.slow  # quickly in tests/guard/test_simulation.py
@pytest.mark.parametrize("steps", [(8,), pytest.param((3, 8), marks=pytest.mark.slow)])
def test_a_trainer_stays_as_it_is_when_the_engine_beside_it_is_lost(tmp_path, plain, steps):
    harm = Harm({step: (1, signal.SIGKILL, 0.01 * (step - 3)) for step in steps})
    watch, sections = Watch(), LAYOUTS["split"]
    ours = tiny.run(tiny.recipe(tmp_path, **sections), callbacks=[harm, watch])
    assert_same_run(ours, plain(sections))
    found = recoveries(ours.directory)
    assert [one["replaced"] for one in found] == [[1]] * len(steps)
    assert all(
        {"rollout", "loader", "weight_sync"} <= set(one["made"]) and "policy" not in one["made"] for one in found
    )
    assert {policy for policy, _ in watch.generations} == {0} and watch.generations[-1][1] == len(steps)


BESIDE = {
    **FSDP,
    "cluster": {"backend": "local", "pools": {"learn": 2, "speak": 1}},
    "rollout": {"pool": "speak"},
    "reward": {"pool": "speak"},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_engine_may_be_lost_at_any_moment_beside_a_divided_trainer(tmp_path, plain, seed):
    """While it generates, and while the trainer has learned a part of a step or sends its weights."""
    harm = Harm({step: (2, signal.SIGKILL, (0.04 * step + 0.05 * seed) % 0.3) for step in (2, 4, 7, 8, 9)})
    ours = tiny.run(tiny.recipe(tmp_path, **BESIDE), callbacks=[harm])
    assert_same_run(ours, plain(BESIDE))
    found = recoveries(ours.directory)
    assert 3 <= len(found) <= 5  # a blow may meet a worker that the one before it has killed
    for one in found:  # a weight sync has all ranks as its members
        within = "weight_sync" in one["evidence"].partition("\n")[0] or one["replaced"] != [2]
        assert within or "policy" not in one["made"]


class Arms(Callback):
    """Let a role raise in its next call after a step."""

    def __init__(self, step, rank, at):
        self.step, self.rank, self.at = step, rank, at

    def on_step_end(self, run, step, metrics):
        if step == self.step:
            self.step = None
            inject(run.policy._dispatch.backend.folder, "exception", self.rank, at=self.at)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "at", "made"), [(1, "rollout.advance", "rollout"), (0, "policy.update", "policy")])
def test_a_step_that_fails_runs_again_with_the_roles_that_did_not(tmp_path, plain, rank, at, made):
    ours = tiny.run(tiny.recipe(tmp_path, **LAYOUTS["split"]), callbacks=[Arms(8, rank, at)])
    assert_same_run(ours, plain(LAYOUTS["split"]))
    (found,) = recoveries(ours.directory)
    assert (found["action"], found["replaced"], set(found["made"])) == ("retry", [], {made, "weight_sync"})


class Doomed(Callback):
    """Kill a worker after a step, again and again."""

    def on_step_end(self, run, step, metrics):
        if step == 3:
            os.kill(run.policy._dispatch.backend.links[1].pid, signal.SIGKILL)


def test_a_worker_that_dies_at_one_step_again_and_again_ends_the_run(tmp_path, monkeypatch):
    with pytest.raises(WorkerLost) as caught:
        tiny.run(tiny.recipe(tmp_path, cluster=LOCAL), callbacks=[Doomed()])
    (directory,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    first, second = recoveries(directory)
    assert "node" not in first["details"] and second["details"]["node"]["sound"]  # tested before the second new worker
    assert any("3 times" in note for note in caught.value.__cause__.__notes__)
    assert read_state(directory)["state"] == "failed"


def test_a_run_that_may_not_recover_ends_at_the_first_failure(tmp_path):
    harm = Harm({2: (1, signal.SIGKILL, 0.0)})
    with pytest.raises(WorkerLost):
        tiny.run(tiny.recipe(tmp_path, cluster=LOCAL, guard={"restarts": 0}), callbacks=[harm])
    (directory,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert not recoveries(directory)


@pytest.mark.slow
def test_a_snapshot_that_is_damaged_is_reported_and_the_disk_is_used(tmp_path, plain, monkeypatch):
    repair, damaged = Cluster.repair, []

    def damage(self, lost, quiet, evicted, failed):
        gone = repair(self, lost, quiet, evicted, failed)
        for path in Path(self.repairable.scratch).rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            with open(path, "r+b") as file:  # the same file: it is linked
                file.write(data)
            damaged.append(path)
        return gone

    monkeypatch.setattr(Cluster, "repair", damage)
    seen = tiny.Recorder()
    ours = tiny.run(tiny.recipe(tmp_path, **FSDP), callbacks=[Harm({6: (1, signal.SIGKILL, 0.0)}), seen])
    assert damaged and any("in memory cannot be used" in text for text in seen.messages)
    assert_same_run(ours, plain(FSDP))


class Arm(Callback):
    """After some steps let a worker die, and another one while it loads its state."""

    def __init__(self, steps):
        self.steps = list(steps)

    def on_step_end(self, run, step, metrics):
        if step in self.steps:
            self.steps.remove(step)
            session = run.policy._dispatch.backend.folder
            inject(session, "kill", 0, at="policy.load")
            inject(session, "kill", 1)


@pytest.mark.slow
def test_failures_while_the_state_is_restored_count_for_their_own_step(tmp_path, plain):
    ours = tiny.run(tiny.recipe(tmp_path, **FSDP), callbacks=[Arm([2, 4, 6])])
    assert [one["step"] for one in recoveries(ours.directory)] == [2, 2, 4, 4, 6, 6]
    assert_same_run(ours, plain(FSDP))


def test_a_second_failure_before_all_roles_are_made_leaves_no_role_out(monkeypatch):
    """Worker 0 is new, and worker 1 dies before the roles of worker 0 are made."""
    broken, said = [], []
    groups = [SimpleNamespace(role=role, mesh=Mesh.of({}, [rank])) for role, rank in (("policy", 1), ("loader", 0))]
    failures, made = [WorkerLost("rank 1", key="policy.create")], []

    def make(group):
        if failures:
            failures[0].ranks = (1,)
            raise failures.pop()
        made.append(group.role)

    cluster = SimpleNamespace(
        groups=groups,
        make=make,
        repair=lambda lost, seconds, evicted, failed: list(lost),
        dispatch=SimpleNamespace(failed=None),
        repairable=SimpleNamespace(scratch="", nodes=lambda: ({}, ())),
    )
    monkeypatch.setattr(Survival, "_begin_attempt", lambda *_: None)
    monkeypatch.setattr(Survival, "prepare", lambda _: None)
    parts = SimpleNamespace(recipe=SimpleNamespace(guard=SimpleNamespace(restarts=8, on_nan="skip")))
    first = WorkerLost("rank 0", key="policy.update")
    first.ranks = (0,)
    directory = SimpleNamespace(break_off=broken.append)
    Survival(parts, cluster, directory, said.append).recover(first, 3)
    assert made == ["policy", "loader"]
    assert [(one["ranks"], one["replaced"]) for one in broken] == [((0,), [0])]
    assert "workers 0, 1 are new," in said[-1]


def lost(*ranks):
    error = WorkerLost(f"ranks {ranks}", key="rollout.advance")
    error.ranks = ranks
    return error


class Beside:
    """A cluster whose worker 1 is replaced beside the others. left: what its new workers raise, the last one first."""

    def __init__(self, *left):
        self.left, self.renewed, self.repaired, self.killed, self.groups = [*left], [], [], [], []
        self.repairable = SimpleNamespace(scratch="", nodes=lambda: ({}, ()), kill=self.killed.extend)
        self.dispatch = SimpleNamespace(failed=None, apart={1, 2}, idle=lambda: True)

    def renew(self, rank):
        self.renewed.append(rank)
        if self.left:
            raise self.left.pop()

    def repair(self, lost, *_):
        self.repaired.append(sorted(lost))
        return sorted(lost)

    def survival(self, monkeypatch, say=print, note=lambda record: None):
        monkeypatch.setattr(Survival, "_begin_attempt", lambda *_: None)
        monkeypatch.setattr(Survival, "prepare", lambda _: None)
        parts = SimpleNamespace(recipe=SimpleNamespace(guard=SimpleNamespace(restarts=8, on_nan="skip")))
        return Survival(parts, self, SimpleNamespace(note_replaced=note), say)


@pytest.mark.parametrize("why", [lost(2), StorageError("no room", key="payload"), WorkerLost("no start", key="start")])
def test_a_new_worker_that_is_half_made_is_replaced_by_the_recovery(monkeypatch, why):
    """The trouble is of another worker, or of no worker."""
    cluster = Beside(why)
    survival = cluster.survival(monkeypatch)
    with raises(type(why), why.key):
        survival.replace(lost(1), 4)
    assert survival.lost == {1}
    survival.recover(why, 4)
    assert cluster.renewed == [1] and cluster.repaired == [sorted({1, *why.ranks})] and not survival.lost


@pytest.mark.parametrize("able", [True, False, None])
def test_only_a_backend_that_says_so_replaces_workers_beside_others(monkeypatch, able):
    """Others, as those of plugins, may not expect calls of several threads."""
    assert LocalBackend.beside and RayBackend.beside
    cluster = Beside()
    cluster.dispatch.apart = ()
    if able is not None:
        cluster.repairable.beside = able
    survival = cluster.survival(monkeypatch)
    assert survival.watch([1]) is bool(able) and (cluster.dispatch.apart == {1}) is bool(able)


def test_nobody_is_replaced_beside_others_once_that_is_given_up(monkeypatch):
    cluster = Beside()
    survival = cluster.survival(monkeypatch)
    survival.give_up([1])
    with raises(WorkerLost, "rollout.advance"):
        survival.replace(lost(2), 4)
    assert cluster.killed == [1] and survival.lost == {1} and not cluster.renewed


def test_a_node_is_given_up_by_a_recovery_of_the_run(monkeypatch):
    cluster = Beside()
    cluster.repairable.nodes = lambda: ({0: "a", 1: "b"}, ("b",))
    survival = cluster.survival(monkeypatch)
    for step in range(1, EVICTS):
        survival.replace(lost(1), step)
    with raises(WorkerLost, "rollout.advance"):
        survival.replace(last := lost(1), EVICTS)
    assert cluster.renewed == [1] * (EVICTS - 1) and survival._decide(last, None, 0, 0.0).evict == "b"


def test_who_was_replaced_after_the_last_step_is_told_at_the_end(monkeypatch):
    said = []
    survival = Beside().survival(monkeypatch, said.append)
    halts = SimpleNamespace(halt=lambda: survival.replace(lost(1), 4))  # waits for it
    run = SimpleNamespace(sampler=halts, saving=SimpleNamespace(give_up=lambda: None))
    monkeypatch.setattr(LifeOfRun, "begin", lambda *_: None)
    monkeypatch.setattr(LifeOfRun, "finish", lambda _: run)
    assert LifeOfRun(lambda: run, survival, None, None, None).live(fallback=False) is run
    assert "worker 1 is new" in said[-1]


@pytest.mark.parametrize("end", [None, HandOver("to"), Interrupted("asked"), lost(0)])
def test_an_attempt_has_its_outcome_though_a_worker_is_still_replaced_at_its_end(monkeypatch, end):
    """It is logged; a recovery would wait for it, and the run ends."""
    said, done = [], []

    def halt():
        raise EngineError("late", key="replicas.mend")

    def finish(life):
        if end is not None:
            raise end
        return run

    survival = Beside().survival(monkeypatch, said.append)
    survival.tell = lambda: done.append("told")
    directory = SimpleNamespace(end=lambda *_, **__: None)
    saving = SimpleNamespace(give_up=lambda *_: done.append("given up"))
    run = SimpleNamespace(sampler=SimpleNamespace(halt=halt), saving=saving, directory=directory)
    monkeypatch.setattr(LifeOfRun, "begin", lambda *_: None)
    monkeypatch.setattr(LifeOfRun, "finish", finish)
    life = LifeOfRun(lambda: run, survival, None, None, None)
    if end is None:
        assert life.live(fallback=False) is run
    else:
        kind = EngineError if isinstance(end, WorkerLost) else type(end)
        with pytest.raises(kind):
            life.live(fallback=False)
    assert said == ["late"] and done[-2:] == ["told", "given up"]


def test_a_worker_that_is_replaced_beside_others_may_be_lost_again_as_often_as_any_other(monkeypatch):
    """What the run has to recover from is decided once, also where the worker alone was lost."""
    noted, said, cluster = [], [], Beside(lost(1))
    survival, renewed = cluster.survival(monkeypatch, said.append, noted.append), cluster.renewed
    survival.replace(lost(1), 4)
    assert renewed == [1, 1] and [(one["ranks"], one["replaced"], one["step"]) for one in noted] == [((1,), [1], 4)] * 2
    survival.on_step_end(None, 5, {})
    assert sum("crash" in line for line in said) == 2 and "worker 1 is new" in said[-1]
    for again in (lost(1), lost(1, 2)):  # the third time at this step, or with another one
        with raises(WorkerLost, "rollout.advance"):
            survival.replace(again, 4 if again.ranks == (1,) else 5)
        action = survival._decide(again, None, 0, 0.0)
        assert (action.step, action.ranks) == (("stop", ()) if again.ranks == (1,) else ("replace", (1, 2)))
    assert renewed == [1, 1]


@pytest.mark.parametrize("how", ["replace", "recover"])
def test_what_kills_one_replica_after_the_other_at_one_step_ends_the_run(monkeypatch, how):
    cluster = Beside()
    cluster.dispatch.apart = {1, 2, 3}
    survival = cluster.survival(monkeypatch)
    for rank in (1, 2):
        getattr(survival, how)(lost(rank), 4)
    with raises(WorkerLost, "rollout.advance"):
        getattr(survival, how)(lost(3), 4)
    assert cluster.renewed + [rank for ranks in cluster.repaired for rank in ranks] == [1, 2]


class Queue:
    """A lock that counts who waits for it, or has it."""

    def __init__(self):
        self.lock, self.came = threading.Lock(), threading.Semaphore(0)

    def __enter__(self):
        self.came.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_replicas_that_die_while_the_first_one_is_replaced_are_replaced_too(monkeypatch):
    cluster, others = Beside(), []
    cluster.dispatch.apart = {1, 2, 3}
    survival = cluster.survival(monkeypatch)
    survival._one = Queue()

    def renew(rank):
        cluster.renewed.append(rank)
        for other in (2, 3) if rank == 1 else ():
            others.append(threading.Thread(target=survival.replace, args=(lost(other), 4)))
            survival._one.came.acquire()
            others[-1].start()
        if rank == 1:
            survival._one.came.acquire()

    cluster.renew = renew
    survival.replace(lost(1), 4)
    for other in others:
        other.join()
    assert sorted(cluster.renewed) == [1, 2, 3]


@pytest.mark.parametrize(
    "new, culprits, expected",
    [
        ([], (1,), "with the same workers"),
        ([1], (1,), "worker 1 is new"),
        ([0, 1], (1,), "workers 0, 1 are new"),
        ([0, 2], (1,), "workers 0, 2 are new (held up in a call with 1)"),
        ([2], (), "worker 2 is new"),
    ],
)
def test_workers_that_are_new_without_a_fault_of_theirs_were_held_up(new, culprits, expected):
    assert _named(new, culprits) == expected
