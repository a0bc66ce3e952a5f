"""Replicas in processes of their own, beside a trainer: overlap, and what is left of a run when one of them dies."""

import random
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.config.test_plugins import forget
from tests.flows import tiny
from tests.flows.killed import BESIDE
from tests.flows.test_async_sampler import check_once, recipe, state
from tests.flows.test_replay import check_same
from tests.flows.test_replay import recipe as exact
from tests.flows.test_resume import child, finish
from tests.launch.test_survive import recoveries
from tilth.cluster.controller.cluster import Cluster
from tilth.core.random import stream_id
from tilth.flows import replicas as flows_replicas
from tilth.roles import rollout as roles_rollout
from tilth.roles.policy import PolicyWorker
from tilth.runs.events import EVENTS, read_events
from tilth.runs.readers import read_metrics, read_state

pytestmark = pytest.mark.dist
POOLS = {"backend": "local", "pools": {"train": 1, "rollout": 2}}
PLACED = {"pool": "rollout", "layout": {"dp": 2}, "group": 4}


STEPS = 24
RANKS = {"trainer": (0,), "replica": (1, 2), "reward": (3,)}


class Kills(tiny.Recorder):
    """Kills a worker of these ranks some time after each of these steps, once; ``inside``: a process below it whose
    command has this word."""

    def __init__(self, ranks, steps, seed, *, inside=None):
        super().__init__()
        self.ranks, self.left, self.inside, self.chance = ranks, set(steps), inside, random.Random(seed)
        self.timers, self.killed = [], []

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if step not in self.left:
            return
        self.left.remove(step)
        self.timers.append(threading.Timer(0.6 * self.chance.random(), self.kill, (run.policy._dispatch.backend,)))
        self.timers[-1].start()

    def kill(self, backend):
        until = time.monotonic() + 5
        while time.monotonic() < until:  # a recovery may have ended it, or the run
            with suppress(IndexError, psutil.Error, FileNotFoundError):
                self.killed.append(self.end(backend))
                return
            time.sleep(0.05)

    def end(self, backend):
        """Kill one, and return its process id."""
        found = psutil.Process(backend.probe(self.chance.choice(self.ranks)).pid)
        if self.inside is not None:
            below = found.children(recursive=True)
            found = self.chance.choice([one for one in below if self.inside in " ".join(one.cmdline())])
        if found.status() == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(found.pid)
        found.kill()
        return found.pid

    def join(self):
        for timer in self.timers:
            timer.join()


@pytest.mark.slow
def test_two_replicas_generate_while_the_policy_learns(tmp_path):
    result = tiny.run(recipe(tmp_path, 2, rollout=PLACED, cluster=POOLS))
    check_once(result, 6, group=4)
    records = read_metrics(result.directory)
    assert all(record["staleness/max"] <= 2 for record in records) and records[-1]["staleness/mean"] > 0
    waited = [record["fully_async/trainer/idle_seconds"] for record in records]
    assert sum(waited[1:]) / 5 < waited[0]


class KillsRelay(Kills):
    """Removes the relay of the node, and leaves all processes."""

    def end(self, backend):
        file = Path(backend.folder.path) / "relay"
        number = file.stat().st_ino
        file.unlink()
        return number


def survived(made, kills):
    """A run in which every sample is consumed once by a whole group, and none is further behind than the bound."""
    result = tiny.run(made, name="run", callbacks=[kills])
    kills.join()
    check_once(result, made.algorithm.steps, group=4)
    check_log(result, bound=2)
    assert not state(result).dropped
    assert all(record["staleness/max"] <= 2 for record in read_metrics(result.directory))
    return result


def check_log(run, bound):
    """By the log alone a step learns from whole groups, each sample once, as it has ended, and within the bound."""
    published, groups, ends, steps = set(), defaultdict(set), {}, defaultdict(set)
    for event in read_events(run.directory / EVENTS):
        one = event.fields
        if event.kind == "publish":
            published.add(one["version"])
        elif event.kind == "admit":
            groups[one["group"]].add(one["id"])
        elif event.kind == "finish":
            ends[one["id"]] = one
        elif event.kind == "consume":
            end = ends.pop(one["id"])  # again only after it has ended again
            assert end["checksum"] == one["checksum"], one
            assert sum(version > end["versions"][0][1] for version in published) <= bound, (one, end)
            steps[one["batch"]].add(one["id"])
    for step, ids in steps.items():
        assert ids == set().union(*(one for one in groups.values() if one & ids)), step
    assert sum(map(len, steps.values())) == len(set().union(*steps.values())) > 0


KILLED = 3
"""Update in which the trainer is when a replica dies."""
WAITING = """
import functools, time
from pathlib import Path
from tilth.engines.rounds import RoundLimits
from tilth.roles import policy, rollout

folder, plain, advance = Path({folder!r}), policy.PolicyWorker.update, rollout.RolloutWorker.advance
rollout.LIMITS = RoundLimits(4, 4)

@functools.wraps(plain)
def update(self, *given, **how):
    self.times = getattr(self, "times", 0) + 1
    if self.times == {killed}:
        (folder / "updating").touch()
        while not (folder / "killed").exists():
            time.sleep(0.05)
    return plain(self, *given, **how)

@functools.wraps(advance)
def slowly(self, *given, **how):
    time.sleep(0.05)
    return advance(self, *given, **how)

policy.PolicyWorker.update, rollout.RolloutWorker.advance = update, slowly
"""


class KillsInUpdate(Kills):
    """Kills a replica while the trainer is in an update, and lets it be replaced two steps later."""

    def __init__(self, folder):
        super().__init__(RANKS["replica"], [], stream_id("update", 1))
        self.folder, self.later = folder, threading.Event()

    def on_rollout(self, run, step, batch):
        if step == KILLED:
            self.timers.append(threading.Thread(target=self.strike, args=(run.policy._dispatch.backend,)))
            self.timers[-1].start()

    def strike(self, backend):
        until = time.monotonic() + 60
        while not (self.folder / "updating").exists() and time.monotonic() < until:
            time.sleep(0.05)
        self.killed.append(self.end(backend))
        (self.folder / "killed").touch()

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if step == KILLED + 2:
            self.later.set()


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_a_replica_that_dies_beside_an_update_is_replaced_beside_the_steps(tmp_path, monkeypatch, request, backend):
    """Its samples go on elsewhere with their tokens, and no step begins again. A replay without deaths has the same
    trajectories and weights bit for bit."""
    if backend == "ray":
        request.getfixturevalue("ray_here")
    for kind, name in ((PolicyWorker, "update"), (roles_rollout.RolloutWorker, "advance"), (roles_rollout, "LIMITS")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # the plugin is imported here too
    (tmp_path / "waits.py").write_text(WAITING.format(folder=str(tmp_path), killed=KILLED))
    kills, renew, waited = KillsInUpdate(tmp_path), Cluster.renew, []

    def late(cluster, rank):
        waited.append(kills.later.wait(120))
        renew(cluster, rank)

    monkeypatch.setattr(Cluster, "renew", late)

    def made(replicas):
        cluster = {"backend": backend, "pools": {"train": 1, "rollout": replicas}}
        placed = {**PLACED, "layout": {"dp": replicas}}
        plugins = [str(tmp_path / "waits.py")]
        how = {"algorithm": {"steps": 8}, "run": {"eval_every": 8}, "plugins": plugins}  # evaluations wait for it
        return exact(tmp_path, 2, rollout=placed, cluster=cluster, **how)

    run = survived(made(2), kills)
    assert waited == [True] and len(kills.killed) == 1
    (one,) = recoveries(run.directory)
    assert (one["kind"], one["replaced"], one["lost"], one["seconds"]) == ("crash", one["ranks"], 0, 0), one
    assert one["beside"] > 0 and any("the others went on" in line for line in kills.messages), kills.messages
    assert len(read_state(run.directory)["attempts"]) == 1
    events = [*read_events(run.directory / EVENTS)]
    resumed = {e.fields["id"]: e.fields for e in events if e.kind == "resume"}
    assert len(resumed) == sum(record["samples/resumed"] for record in read_metrics(run.directory)) > 0
    assert min(one["tokens"] for one in resumed.values()) > 0
    assert min(one["version"] for one in resumed.values()) >= KILLED - 1  # which the living replica has by then
    ends = {e.fields["id"]: e.fields["versions"] for e in events if e.kind == "finish"}
    for i, one in resumed.items():
        begun, now = ends[i][0][0] + one["tokens"], one["version"]
        assert all(version <= now if at < begun else version >= now for at, version in ends[i]), (one, ends[i])
    check_same(run, tiny.run(made(1), name="again", replay=run.directory))
    forget()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "more"),
    [
        ("replica", {}),
        ("replica", {"inflight": "finish", "repack": True}),
        ("trainer", {}),
        ("reward", {}),
        ("process of the reward", {}),
        ("relay", {}),
        ("relay", {"inflight": "finish"}),
    ],
)
def test_twenty_kills_of_a_role_cost_no_sample(tmp_path, short_rounds, monkeypatch, role, more):
    """A replay on one replica, without deaths, has the same trajectories and weights bit for bit."""
    monkeypatch.setattr(flows_replicas, "PERIOD", 0.5)
    monkeypatch.setattr(flows_replicas, "STAY", 1)
    sections = {"reward": {"pool": "score"}, "algorithm": {"steps": STEPS}, "plugins": short_rounds}

    def made(replicas, **rollout):
        placed = {**PLACED, "layout": {"dp": replicas}, **rollout}
        pools = {"train": 1, "rollout": replicas, "score": 1}
        cluster = {**POOLS, "pools": pools}
        return exact(tmp_path, 2, rollout=placed, cluster=cluster, guard={"restarts": 64}, **sections)

    kind, inside = KillsRelay if role == "relay" else Kills, "" if role == "process of the reward" else None
    kills = kind(RANKS.get(role, (3,)), range(1, STEPS), stream_id(role, 1), inside=inside)
    run = survived(made(2, **more), kills)
    assert len(kills.killed) >= 20
    # several may die in one recovery
    assert sum("is new" in line for line in kills.messages) >= (5 if role in RANKS else 0), kills.messages
    found = recoveries(run.directory) if role == "relay" else []
    assert len(found) >= (5 if role == "relay" else 0), kills.messages
    assert all(one["kind"] == "storage" and not one["replaced"] for one in found), found
    assert role != "replica" or sum(record["samples/resumed"] for record in read_metrics(run.directory)) > 20
    check_same(run, tiny.run(made(1, **more | {"repack": False}), name="again", replay=run.directory))


@pytest.mark.slow
def test_twenty_kills_of_the_controller_cost_no_sample(tmp_path):
    """Each attempt dies some time after it has committed a step, and its workers end with it. A replay on one replica
    has the same trajectories and weights bit for bit."""
    dice, run = random.Random(stream_id("controller", 1)), SimpleNamespace(directory=tmp_path / "tiny-001")
    for _ in range(20):
        process, before = child(tmp_path, flow="behind beside"), committed(run)
        while process.poll() is None and committed(run) <= before:
            time.sleep(0.05)
        time.sleep(0.6 * dice.random())
        assert process.poll() is None, process.communicate()[1]
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        psutil.wait_procs(workers, 30)
    code, said = finish(child(tmp_path, flow="behind beside"))
    assert code == 0, said
    check_once(run, STEPS)
    check_log(run, bound=2)
    assert not state(run).dropped
    records = read_metrics(run.directory)
    assert all(record["staleness/max"] <= 2 for record in records) and records[-1]["attempt"] == 21
    assert sum(record["samples/resumed"] for record in records) > 20
    where = {"backend": "local", "pools": {"train": 1, "rollout": 1}}
    alone = BESIDE | {"cluster": where, "rollout": BESIDE["rollout"] | {"layout": {"dp": 1}}}
    check_same(run, tiny.run(tiny.recipe(tmp_path, **alone), name="again", replay=run.directory))


def committed(run):
    """Steps that the run has committed."""
    return len(read_metrics(run.directory)) if (run.directory / "metrics.jsonl").exists() else 0


@pytest.fixture
def short_rounds(tmp_path, monkeypatch):
    """Plugin by which replicas end a round after four steps, on any machine."""
    monkeypatch.setattr(roles_rollout, "LIMITS", roles_rollout.LIMITS)  # the plugin is imported here too
    text = "from tilth.engines.rounds import RoundLimits\nfrom tilth.roles import rollout\n"
    (tmp_path / "rounds.py").write_text(f"{text}rollout.LIMITS = RoundLimits(4, 4)\n")
    yield [str(tmp_path / "rounds.py")]
    forget()


@pytest.mark.slow
def test_the_last_samples_of_replicas_move(tmp_path, short_rounds, monkeypatch):
    """A replay on one replica has the same trajectories."""
    monkeypatch.setattr(flows_replicas, "PERIOD", 0.0)
    monkeypatch.setattr(flows_replicas, "STAY", 1)
    long = {"model": {"context": 112}, "plugins": short_rounds, "algorithm": {"steps": 4}}
    placed = {**PLACED, "max_tokens": 100, "repack": True}
    run = tiny.run(exact(tmp_path, 1, rollout=placed, cluster=POOLS, **long), name="run")
    check_once(run, 4, group=4)
    moves = [event.fields for event in read_events(run.directory / EVENTS) if event.kind == "move"]
    assert sum(record["samples/moved"] for record in read_metrics(run.directory)) == len(moves) > 0
    assert all({move["from"], move["to"]} == {0, 1} and 0 < move["tokens"] < 100 for move in moves)
    alone = {"rollout": {**placed, "repack": False, "pool": "", "layout": {"dp": 1}}}
    inline = {"backend": "inline", "pools": {}}
    check_same(run, tiny.run(exact(tmp_path, 1, cluster=inline, **alone, **long), name="again", replay=run.directory))
