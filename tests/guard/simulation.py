"""Control plane in one process: real decisions, a virtual clock, and workers, links, memory and disk that are models.

Real: ``Cluster``, ``Dispatch``, ``WorkerGroup``, the worker's ``Executor``, ``Recovery``, ``Survival``, ``Snapshots``,
loop and restores of ``launch.life``. A message takes a random time, so those of different workers overtake others; an
answer may come twice or never. A schedule is a seed: faults strike when the n-th message is delivered, wherever the
controller then is. ``Violation`` is a broken invariant.
"""

import heapq
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tilth.checkpoint.saver import SLOTS
from tilth.cluster.backends.base import Call, Probe, Reply
from tilth.cluster.controller import dispatch as dispatching
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.protocol import transfer
from tilth.cluster.worker.executor import Executor
from tilth.core.errors import (
    CheckpointError,
    NonFiniteError,
    StorageError,
    TilthError,
    WorkerError,
    WorkerLost,
)
from tilth.core.layout import Mesh
from tilth.guard import snapshots as keeping
from tilth.launch import life as launch
from tilth.launch import survive

WORKERS, LEARNERS = 3, 2
SAVE_EVERY = 4
MOST = 6000
"""Messages after which a run that has not ended makes no progress."""
KINDS = ("die", "stop", "lose", "raise", "nan", "full", "flip", "flip one", "controller", "spawn", "disk", "no room")
AT_WORKERS = ("die", "stop", "lose")


class Violation(AssertionError):
    """A broken invariant."""


class Killed(BaseException):
    """End of the controller's process."""


def weights(step: int) -> int:
    """Weights that an undisturbed run has after a step."""
    value = 1
    for i in range(1, step + 1):
        value = (value * 31 + i) % 1_000_003
    return value


class World:
    """Virtual time, messages under way, and all that outlives a process: the disk, and shared memory of the machine."""

    def __init__(self, seed: int, steps: int = 8, faults: int | None = None) -> None:
        self.rng, self.steps, self.now, self.delivered = random.Random(seed), steps, 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sent = 0
        count = self.rng.randint(1, 5) if faults is None else faults
        self.faults = sorted((self.rng.randint(1, 160), self.rng.choice(KINDS)) for _ in range(count))
        if self.rng.random() < 0.5 and len(self.faults) > 1:  # a second one right after the first
            self.faults[1] = (self.faults[0][0] + self.rng.randint(0, 30), self.faults[1][1])
            self.faults.sort()
        self.armed: list[str] = []
        """Faults that strike the next operation of their kind."""
        self.struck: list[str] = []
        self.done: list[str] = []
        """Constructions and loads of the policy, on any worker."""
        self.memory: dict[tuple[Path, str], Any] = {}
        self.disk: dict[int, dict[str, Any]] = {}
        self.log: list[int] = []
        """Committed steps of the run's folder."""
        self.lock: object | None = None
        self.backend: Machines | None = None
        self.full = 0.0
        """Time until which payload finds no room."""

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self._sent += 1
        heapq.heappush(self._events, (self.now + seconds, self._sent, do))

    def message(self, do: Callable[[], None]) -> None:
        """Deliver something after a random time."""

        def deliver() -> None:
            self.delivered += 1
            if self.delivered > MOST:
                raise Violation("no progress")
            while self.faults and self.faults[0][0] <= self.delivered:
                self.strike(self.faults.pop(0)[1])
            do()

        self.later(self.rng.choice((0.001, 0.01, 0.3)) * self.rng.random(), deliver)

    def advance(self, until: float) -> None:
        """Let the next thing happen, or the clock reach ``until``."""
        if self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
        elif until == float("inf"):
            raise Violation("the controller waits for ever")
        else:
            self.now = until

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.advance(until)

    def strike(self, kind: str) -> None:
        self.struck.append(kind)
        if kind == "controller":
            raise Killed
        if kind in AT_WORKERS and self.backend is not None:
            self.backend.hurt(self.rng.randrange(WORKERS), kind)
        elif kind == "flip":
            self.memory |= {name: "flipped" for name in self.memory if name[1] != "objects"}
        elif kind == "flip one":
            states = {name: value for name, value in self.memory.items() if isinstance(value, tuple)}
            newest = max((value[1] for value in states.values()), default=0)
            self.memory |= {name: "flipped" for name, value in states.items() if value[1] == newest}
        elif kind == "no room":
            self.full = self.now + self.rng.choice((0.1, 3.0, 40.0))
        else:
            self.armed.append(kind)

    def took(self, kind: str) -> bool:
        """Return True if a fault of this kind strikes now."""
        if kind in self.armed:
            self.armed.remove(kind)
            return True
        return False


class Waiting:
    """Condition of the controller: waiting lets the world go on."""

    def __init__(self, world: World) -> None:
        self.world, self.notified = world, False

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify_all(self) -> None:
        self.notified = True

    def wait(self, seconds: float | None = None) -> bool:
        until, self.notified = self.world.now + (float("inf") if seconds is None else seconds), False
        while not self.notified and self.world.now < until:
            self.world.advance(until)
        return self.notified

    def wait_for(self, true: Callable[[], Any], seconds: float | None = None) -> bool:
        until = self.world.now + (float("inf") if seconds is None else seconds)
        while not true() and self.world.now < until:
            self.world.advance(until)
        return bool(true())


class Policy:
    """Role with a state, on the workers that learn."""

    def __init__(self, context: Any, world: World) -> None:
        self.rank, self.generation, self.world = context.rank, context.generation, world
        self.value, self.at = weights(0), 0
        world.done.append("make")

    @transfer("all", "all")
    def update(self, step: int) -> tuple[int, int]:
        if self.world.took("raise"):
            raise WorkerError("user code raised", key="policy.update")
        if self.world.took("nan"):
            raise NonFiniteError("loss is nan", key="loss")
        self.value, self.at = (self.value * 31 + step) % 1_000_003, step
        return self.generation, self.value

    @transfer("all", "all", patient=True)
    def load(self, path: str, position: Any) -> None:
        parts = launch_path(self.world, path)
        if "flipped" in parts.values():
            raise CheckpointError("a checksum differs", key="policy")
        self.value, self.at = parts[str(self.rank)]
        self.world.done.append("load")

    @transfer("all", "all", patient=True, reads=True)
    def snapshot(self, folder: str, slot: int) -> SimpleNamespace:
        if self.world.took("full"):
            raise StorageError("no room for a snapshot", key="snapshot")
        self.world.memory[Path(folder) / f"slot-{slot}", str(self.rank)] = (self.value, self.at)
        report = Told()
        return SimpleNamespace(reports=[report], position={}, copies={}, problem="")

    @transfer("all", "all", patient=True, reads=True)
    def save(self) -> tuple[int, int]:
        return self.value, self.at

    @transfer("all", "all", patient=True, reads=True)
    def saving(self, wait: bool) -> str:
        return ""

    @transfer("all", "all", reads=True)
    def logprobs(self) -> int:
        return self.value


class Engine:
    """Role with the policy's weights and without a state, on a worker of its own."""

    def __init__(self, context: Any, world: World) -> None:
        self.value, self.world = -1, world

    @transfer("all", "all")
    def receive(self, value: int) -> None:
        self.value = value

    @transfer("all", "all")
    def generate(self) -> int:
        if self.world.now < self.world.full:
            raise StorageError("no room for tokens", key="tokens")
        return self.value


class Reward:
    """Role without a state, on one worker."""

    def __init__(self, context: Any, world: World) -> None:
        self.generation = context.generation

    @transfer("all", "all", patient=True)
    def ready(self) -> None: ...

    @transfer("all", "all")
    def score(self) -> int:
        return self.generation


def launch_path(world: World, path: str) -> dict[str, Any]:
    """Return rank -> state of a checkpoint in memory or on disk."""
    place, _, step = path.rpartition("/")
    if place == "disk":
        return world.disk[int(step)]
    return {name: value for (folder, name), value in world.memory.items() if folder == Path(path)}


class Process:
    """One worker's process: executes what arrives, in order, unless it is dead or stopped."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.alive, self.stopped = world, rank, True, False
        self.mute = False
        self.executor = Executor(rank, WORKERS, SimpleNamespace(lease=""), alone=True)
        self.calls: dict[int, tuple[Call, Future[Reply]]] = {}
        self.busy_until, self.work = 0.0, 0

    def receive(self, number: int) -> None:
        if not self.alive or self.stopped or number not in self.calls:
            return
        call, future = self.calls[number]
        try:
            if call.method == "trace":
                reply = Reply(None, {})
            else:
                reply = self.executor.handle(call)
            result: Any = reply
        except TilthError as error:
            result = error
            error.ranks = (self.rank,)
        except Exception as error:  # noqa: BLE001 - as the connection does it
            result = WorkerError(repr(error), key=call.operation)
        self.work += 1
        if self.mute:
            self.mute = False  # its answer is lost, and it never gets on
            self.stopped = True
            return
        for _ in range(1 + (self.world.rng.random() < 0.1)):  # sometimes twice
            self.world.message(lambda: self.answered(number, future, result))

    def answered(self, number: int, future: Future[Reply], result: Any) -> None:
        self.calls.pop(number, None)
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self.world.message(self.buried)

    def buried(self) -> None:
        for number, (call, future) in list(self.calls.items()):
            error = WorkerLost(f"rank {self.rank} was killed", key=call.operation)
            error.ranks = (self.rank,)
            self.answered(number, future, error)


class Machines:
    """Backend whose workers are models."""

    def __init__(self, world: World, scratch: Path) -> None:
        self.world, self.workers, self.scratch = world, WORKERS, str(scratch)
        self.store = SimpleNamespace(lease="", release=lambda *keys: None, held=dict)
        self.processes = [Process(world, rank) for rank in range(WORKERS)]
        self._calls = 0

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        process, future = self.processes[rank], Future[Reply]()
        self._calls += 1
        number = self._calls
        process.calls[number] = call, future
        if process.alive:
            arrives = max(process.busy_until, self.world.now + 0.01 * self.world.rng.random())
            process.busy_until = arrives + 1e-6  # a pipe keeps its order
            self.world.later(arrives - self.world.now, lambda: self.world.message(lambda: process.receive(number)))
        else:
            self.world.message(process.buried)
        return future

    def hurt(self, rank: int, kind: str) -> None:
        process = self.processes[rank]
        if kind == "die":
            process.die()
        elif kind == "stop":
            process.stopped = True
        else:
            process.mute = True

    def life(self, rank: int) -> tuple[int, int]:
        process = self.processes[rank]
        return process.work, 0 if process.stopped or not process.alive else int(self.world.now * 10)

    def probe(self, rank: int) -> Probe:
        process = self.processes[rank]
        state = "gone" if not process.alive else "stopped" if process.stopped else "sleeping"
        return Probe(rank, 1000 + rank, state, "", "")

    def kill(self, ranks: Any) -> None:
        for rank in ranks:
            self.processes[rank].die()

    files = None

    def nodes(self) -> Any:
        return {}, ()

    def replace(self, ranks: Any, evicted: Any = ()) -> None:
        for rank in ranks:
            self.processes[rank].die()
            self.processes[rank].buried()
            if self.world.took("spawn"):
                raise WorkerLost(f"rank {rank} has not started", key="cluster.start")
            self.processes[rank] = Process(self.world, rank)

    def control(self, *given: Any) -> Any:
        return {"dump": "", "left": False}

    def close(self, kill: bool) -> None:
        for process in self.processes:
            process.alive = False


# ---- the controller ----


class Folder:
    """Run's folder on disk: what was committed. One process at a time may write it."""

    def __init__(self, world: World, owner: object) -> None:
        self.world, self.owner, self.resumed = world, owner, True
        self.path = self.events = Path("folder")
        self.attempt, self.trajectories, self.progress = 0, None, SimpleNamespace(watched=nullcontext)

    @property
    def saved(self) -> int:
        return max(self.world.disk, default=0)

    def log(self, text: str) -> None: ...

    def accept(self) -> None: ...

    def commit(self, step: int) -> None:
        self._check_owner()
        if step != (self.world.log[-1] if self.world.log else 0) + 1:
            raise Violation(f"step {step} committed after {self.world.log[-1:]}")
        self.world.log.append(step)

    def rewind(self, step: int) -> None:
        self._check_owner()
        if self.world.log and step > self.world.log[-1]:
            raise Violation(f"the run goes on from step {step}, which was never committed")
        self.world.log = self.world.log[:step]

    def recover(self, record: dict[str, Any]) -> None:
        self._check_owner()
        self.attempt += 1

    def break_off(self, record: dict[str, Any]) -> None:
        self._check_owner()

    def settle(self) -> None: ...

    def _check_owner(self) -> None:
        if self.world.lock is not self.owner:
            raise Violation("two controllers write one run")


class Job:
    """Run of one attempt of the controller (``flows.run.Run``)."""

    def __init__(self, life: "Controller", snapshots: Any) -> None:
        self.life, self.snapshots, self.directory = life, snapshots, life.folder
        self.roles, self.callbacks, self.source = life.roles, (), "memory"
        self.state = SimpleNamespace(step=0, drawn={})
        self.saving = SimpleNamespace(give_up=lambda *seconds: None)
        nothing = {"halt": lambda: None, "leave_out": lambda reason: None}
        self.sampler = SimpleNamespace(position=lambda: {"train": self.state.step}, **nothing)

    def say(self, text: str) -> None: ...

    def restore(self, objects: dict[str, Any]) -> None:
        """Check a restored state: whole, of one step, and no older than its tier promises."""
        step = objects["progress"]["step"]
        for process in self.life.backend.processes[:LEARNERS]:
            role = process.executor.roles.get("policy")
            if role is None or (role.value, role.at) != (weights(step), step):
                raise Violation(f"rank {process.rank} is not at step {step}: a torn snapshot")
        self.life.check_source(self.source, step)
        self.state.step = step

    def go(self) -> None:
        """Train to the end."""
        world, policy, reward, engine = self.life.world, self.life.policy, self.life.reward, self.life.engine
        engine.receive(weights(self.state.step))
        while self.state.step < world.steps:
            step = self.state.step + 1
            if engine.generate() != [weights(step - 1)] or set(policy.logprobs()) != {weights(step - 1)}:
                raise Violation(f"weights before step {step} differ from an undisturbed run's")
            for generation, value in policy.update(step):
                if generation != policy.generation:
                    raise Violation("an answer of an earlier generation was accepted")
                if value != weights(step):
                    raise Violation(f"weights of step {step} differ from an undisturbed run's")
            if reward.score() != [reward.generation]:
                raise Violation("an answer of an earlier generation was accepted")
            engine.receive(weights(step))
            self.state.step = step
            self.directory.commit(step)
            if step % SAVE_EVERY == 0:
                states = policy.save()
                if not world.took("disk"):
                    world.disk[step] = {str(rank): state for rank, state in enumerate(states)}
            self.life.take(self, step)


class Controller:
    """One process that controls the run."""

    def __init__(self, world: World, scratch: Path, cluster_class: type[Cluster] = Cluster) -> None:
        if world.lock is not None:
            raise Violation("two controllers")
        world.lock = self
        self.world, self.decided, self.held, self.restored = world, list[str](), list[int](), 0
        self.backend = world.backend = Machines(world, scratch)
        self.cluster = cluster_class(self.backend, 600.0)
        self.cluster.watch(20.0, keep=True)
        self.cluster.trace = lambda *given: None  # type: ignore[method-assign]
        self.folder = Folder(world, self)

    def start(self) -> None:
        kwargs, mesh = {"world": self.world}, Mesh.of({"dp": LEARNERS})
        self.policy = self.cluster.group("policy", "tests.guard.simulation:Policy", kwargs, mesh)
        self.engine = self.cluster.group("rollout", "tests.guard.simulation:Engine", kwargs, Mesh.of({}, (LEARNERS,)))
        self.reward = self.cluster.group("reward", "tests.guard.simulation:Reward", kwargs, Mesh.of({}, (1,)))
        self.reward.__dict__["print_to"] = lambda path: None
        stateful = {"policy": self.policy}
        self.roles = SimpleNamespace(
            policy=self.policy, reward=self.reward, rollout=None, writer=None, stateful_roles=lambda: stateful
        )

    def run(self) -> None:
        guard = SimpleNamespace(restarts=8, on_nan="skip", hang_after=20.0)
        data = SimpleNamespace(loaders=0)
        recipe = SimpleNamespace(guard=guard, data=data, run=SimpleNamespace(grace=1.0, collect_every=0))
        recipe.train = SimpleNamespace(compile=False)
        parts: Any = SimpleNamespace(recipe=recipe, config=None, roles=self.roles)
        launch._train(parts, self.cluster, self.folder, (), fallback=False)  # type: ignore[arg-type]

    def take(self, job: "Job", step: int) -> None:
        """Take a snapshot; ``held`` are the two that are whole then, before it one."""
        self.held = [one for one in self.held[-1:] if one != step]
        job.snapshots.take({"policy": self.policy}, step, {"progress": {"step": step}}, self.policy.mesh)
        self.held, self.restored = [*self.held, step], 0

    def check_source(self, source: str, step: int) -> None:
        """Raise Violation if this state is older than one that is still whole, or from memory after a rollback."""
        committed = self.world.log[-1] if self.world.log else 0
        back = "rollback" in self.decided
        if source == "memory" and back:
            raise Violation("a run that goes back to a checkpoint took a snapshot")
        if back:
            self.held, self.restored = [], 0
        if step < (least := max(self._newest_whole(), max(self.world.disk, default=0))):
            raise Violation(f"back at step {step} from {source}, though {least} of {committed} was there")
        self.restored = step if source == "memory" else 0
        self.decided.clear()

    def _newest_whole(self) -> int:
        """Return the newest step that shared memory still has: in a slot, or where it was restored from."""
        root, memory = Path(self.backend.scratch), self.world.memory
        places = [(step, root / f"slot-{slot}") for step in self.held for slot in range(SLOTS)]
        places.append((self.restored, root / "restored" / f"step-{self.restored}"))
        return max(
            (
                step
                for step, place in places
                if all(memory.get((place, str(rank))) == (weights(step), step) for rank in range(LEARNERS))
            ),
            default=0,
        )

    def end(self) -> None:
        self.world.lock = None
        self.backend.close(kill=True)


class Told:
    """Stand-in of a report, which the index of the snapshots has as JSON."""

    def model_dump(self, mode: str) -> dict[str, Any]:
        return {}

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> "Told":
        return cls()


def published(world: World) -> Callable[..., Path]:
    """Return a stand-in of ``publish``, which makes a checkpoint of the files of a slot."""

    def publish(root: Path, step: int, slots: Any, reports: Any, objects: Any, mesh: Any) -> Path:
        files = {name: value for (folder, name), value in world.memory.items() if folder in slots}
        if len(reports) != LEARNERS or len(files) != LEARNERS:
            raise CheckpointError("files are missing", key="parts")
        place = root / f"step-{step}"
        world.memory |= {(place, name): value for name, value in files.items()}
        world.memory[place, "objects"] = objects
        return place

    return publish


def opened(world: World) -> Callable[[Path], Any]:
    def open_checkpoint(path: Path) -> Any:
        def verify() -> None:
            raise CheckpointError("damaged", key="policy")

        objects = world.memory[path, "objects"]
        return SimpleNamespace(path=path, step=objects["progress"]["step"], objects=objects, verify=verify)

    return open_checkpoint


def restore_from_disk(job: Job, *, fallback: bool) -> None:
    world, job.source = job.life.world, "disk"
    step = max(world.disk, default=0)
    if step:
        job.life.policy.load(f"disk/{step}", {})
    job.restore({"progress": {"step": step}})
    job.directory.rewind(step)


def simulate(seed: int, scratch: Path, world: World | None = None) -> World:
    """Run one schedule to its end; Violation if an invariant breaks. A person begins anew a run that has ended."""
    world = world or World(seed)
    current: list[Controller] = []

    class Recorded(survive.Recovery):
        def decide(self, *given: Any) -> Any:
            action = super().decide(*given)
            current[-1].decided.append(action.step)
            return action

    clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)
    locks = {"RLock": nullcontext, "Lock": nullcontext, "Condition": lambda lock: Waiting(world)}
    condition = SimpleNamespace(**locks, local=threading.local)
    nothing = SimpleNamespace(conclude=lambda: None, start=lambda *given: None)
    stop = mock.MagicMock()
    patches = [
        mock.patch.object(dispatching, "time", clock),
        mock.patch.object(dispatching, "threading", condition),
        mock.patch.object(survive, "time", clock),
        mock.patch.object(survive, "recorder", nothing),
        mock.patch.object(survive, "Recovery", Recorded),
        mock.patch.object(keeping, "Report", Told),
        mock.patch.object(keeping, "publish", published(world)),
        mock.patch.object(keeping, "open_checkpoint", opened(world)),
        mock.patch.multiple(
            launch,
            StopRequest=stop,
            Profiling=mock.MagicMock(),
            notify=lambda *given: None,
            TrajectoryFiles=lambda path: None,
            _add_hints=mock.MagicMock(return_value=mock.MagicMock(__exit__=lambda *error: False)),
            _announce=lambda *given: None,
            _run=lambda parts, cluster, directory, callbacks, stop, say, survival, _: Job(
                current[-1], survival.snapshots
            ),
            _restore_from_disk=restore_from_disk,
            _check_own=lambda *given: None,
            _complete=lambda job, profiling: job.go(),
            _with_alternative=lambda error, path, directory: error,
        ),
    ]
    stop.return_value.__exit__ = lambda *error: False
    for patch in patches:
        patch.start()
    try:
        for _ in range(12):
            current.append(Controller(world, scratch))
            try:
                current[-1].start()
                current[-1].run()
                if world.log != list(range(1, world.steps + 1)):
                    raise Violation(f"a run that ended has committed {world.log}")
                return world
            except (TilthError, Killed):
                pass
            finally:
                current[-1].end()
                world.memory.clear()
        raise Violation("no progress: the run ended twelve times")
    finally:
        for patch in patches:
            patch.stop()
