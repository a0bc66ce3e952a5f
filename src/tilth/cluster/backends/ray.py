"""The ``ray`` backend: one actor per worker, on any number of machines.

Ray starts processes and carries bytes; the controller does the rest, as for every backend. Ray is imported only when a
``RayBackend`` is constructed (extra ``tilth-train[ray]``).
"""

import pickle
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tilth.cluster.backends.base import Call, Probe, Reply, lost, place_of, settle
from tilth.cluster.backends.capacity import patience
from tilth.cluster.backends.ray_actors import NodeAgent, RayStore, RayWorker, agent_name
from tilth.cluster.backends.ray_connect import Node, connect, first_line, import_ray, nodes_of, place_spares, spread
from tilth.cluster.backends.ray_files import RayFiles
from tilth.cluster.backends.ray_watch import Machine, NodeWatch, Process, unreachable
from tilth.core.errors import CallTimeout, RecipeError, TilthError, WorkerError, WorkerLost

SESSION = "session"
"""File of the folder that outlives controllers with the name of the session of the last one."""
START = 120.0
"""Seconds in which all workers must run, on an idle machine (``patience``)."""
LOOK = 5.0
"""Seconds for a node to answer a question about a worker."""
INLINE = 64 * 1024
"""Bytes of a call above which it is put into the object store once, instead of sent with each message."""
THREADS = 16
"""Concurrent requests that a NodeAgent answers."""


class RayBackend:
    """Workers as actors. address: of a Ray cluster; "": the one that this process is connected to, else a new one on
    this machine, which listens on the loopback interface only, with a token, and ends with this backend.

    spares: actors that have imported what roles need and wait for a rank (``guard.spares``). Each takes the room of a
    worker. lasting: folder of this machine that outlives controllers: the scratch folder if there is one node, else it
    names the session whose scratch folders the next controller's agents take over.
    """

    beside = True

    def __init__(
        self,
        workers: int,
        *,
        timeout: float = 600.0,
        address: str = "",
        gpus: bool = False,
        spares: int = 0,
        lasting: str = "",
    ) -> None:
        if workers < 1:
            raise RecipeError(f"cluster.workers = {workers}: at least 1 is needed", key="cluster.workers")
        self.workers, self.timeout, self.gpus, self.spares = workers, timeout, gpus, spares
        self._ray = import_ray(address)
        self._name = secrets.token_hex(4)
        self._machines: list[Machine] = []
        self._processes: list[Process] = []
        """By rank."""
        self._spares: list[Process] = []
        self._starting: dict[int, Process] = {}
        """Rank -> process that is to take the place of its own."""
        self._homes = 0
        self._dead = set[str]()
        """Nodes that are gone, which Ray may not know yet."""
        self._lock = threading.RLock()
        self._encoded: tuple[Call | None, int, Any] = None, 0, b""
        self._meeting: Any = None
        self._several, self._node, self._lasting = False, "", lasting
        known = Path(lasting) / SESSION
        self._former = known.read_text() if lasting and known.exists() else ""
        self._watch: NodeWatch | None = None
        self._closed = False
        self._started = connect(self._ray, workers, address, spares)
        try:
            self._open()
        except BaseException:  # an interrupt too: no process may be left
            self.close(kill=True)
            raise

    def _open(self) -> None:
        """Start agents, workers and spares."""
        what = "GPUs" if self.gpus else "CPUs"
        here = self._node = str(self._ray.get_runtime_context().get_node_id())
        nodes = sorted(self._nodes(), key=lambda node: (node.id != here, node.address, node.id))
        on = spread([node.room for node in nodes], self.workers, what)
        left = [node.room - on.count(i) for i, node in enumerate(nodes)]
        waiting = place_spares(left, self.spares, self.workers, what)
        self._several = len(nodes) > 1
        ours = [i for i, node in enumerate(nodes) if node.id == here and self._several]  # for copies of snapshots
        machines = {i: self._machine(nodes[i]) for i in sorted({*on, *waiting, *ours})}
        self._machines = list(machines.values())
        for machine, folder in zip(
            self._machines, self._wait_for([one.agent.place.remote() for one in self._machines])
        ):
            machine.folder = folder
        if self._lasting:
            (Path(self._lasting) / SESSION).write_text(f"ray-{self._name}")
            self._former = ""
        self.store = RayStore(self._name, self._machines[0].home, "controller", self._living_homes)
        self._init_method = self._meeting_place(len(nodes))
        self._processes = [self._start(machines[i]) for i in on]
        self._spares = [self._warm(machines[i]) for i in waiting]
        self._begin(dict(enumerate(self._processes)))
        self._watch = NodeWatch(self._ray, self._watched, self._died, self._gone)

    def has_room(self, workers: int) -> bool:
        """Return True if the nodes that are there now have room for so many workers."""
        return sum(node.room for node in self._nodes()) >= workers

    def _nodes(self) -> list[Node]:
        return [node for node in nodes_of(self._ray.nodes(), self.gpus) if node.id not in self._dead]

    def _living_homes(self) -> list[int]:
        return [machine.home for machine in self._machines]

    def _actor(self, kind: type, node: Node, *args: Any, **options: Any) -> Any:
        there = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = self._ray.remote(kind).options(scheduling_strategy=there, max_restarts=0, **options)
        return actor.remote(*args)

    def _machine(self, node: Node) -> Machine:
        home, self._homes = self._homes, self._homes + 1
        options = {"num_cpus": 0, "max_concurrency": THREADS, "name": agent_name(self._name, home)}
        names = f"ray-{self._name}", self.workers, self._former
        return Machine(node, home, self._actor(NodeAgent, node, *names, **options))

    def _start(self, machine: Machine) -> Process:
        """Start the process of a worker or spare."""
        options = {"num_cpus": 1, "num_gpus": int(self.gpus), "max_task_retries": 0}
        return Process(self._actor(RayWorker, machine.node, **options), machine, None)

    def _warm(self, machine: Machine) -> Process:
        """Start a spare, without waiting for it."""
        spare = self._start(machine)
        spare.ready = spare.actor.warm.remote()
        return spare

    def _begin(self, ranks: Mapping[int, Process]) -> None:
        """Give processes their ranks."""
        asked = []
        for rank, process in ranks.items():
            store = RayStore(self._name, process.machine.home, str(rank))
            arguments = rank, self.workers, self._init_method, self.timeout, process.machine.folder, store
            process.rank = rank
            asked.append(process.actor.begin.remote(*arguments))
        for process, pid in zip(ranks.values(), self._wait_for(asked)):
            process.pid = pid

    def _meeting_place(self, nodes: int) -> str:
        """Return a file if the cluster has one node, else a port of this process, whose loss ends the run anyway."""
        if self.workers == 1:
            return ""
        if nodes == 1:
            return f"file://{self._machines[0].folder}/meeting"
        from torch.distributed import TCPStore

        address = self._ray.util.get_node_ip_address()
        self._meeting = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{address}:{self._meeting.port}"

    def _wait_for(self, references: Sequence[Any]) -> list[Any]:
        """Return the answers of starting actors. Raises RecipeError if they do not start, WorkerLost if one dies."""
        limit = patience(START)
        try:
            found: list[Any] = self._ray.get(list(references), timeout=limit)
        except self._ray.exceptions.GetTimeoutError:
            raise RecipeError(
                f"cluster.workers = {self.workers}: Ray has not started them within {limit:g} s; is the cluster "
                "busy with another job? (ray status)",
                key="cluster.workers",
            ) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(f"a worker could not start: {str(error).strip()}", key="cluster.start") from None
        return found

    # ---- calls ----

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Send a call; consecutive submissions of one Call pickle it once."""
        if (encoded := self._encoded)[0] is not call:  # of this thread: another one may submit at the same time
            data = pickle.dumps(call, protocol=5)
            encoded = self._encoded = call, len(data), self._ray.put(data) if len(data) > INLINE else data
        process, future = self._processes[rank], Future[Reply]()
        with self._lock:
            if process.lost:
                future.set_exception(lost(call, rank, process.lost, (rank,)))
                return future
            process.calls[future] = call
        _, sent, message = encoded
        answer = process.actor.answer.remote(message).future()
        answer.add_done_callback(partial(self._land, process, call, sent, future))
        return future

    def _land(self, process: Process, call: Call, sent: int, future: Future[Reply], answer: Future[bytes]) -> None:
        """Resolve a call. Runs in Ray's thread, which must not wait for Ray: another thread asks about a death."""
        error = answer.exception()
        if error is not None:
            look = threading.Thread(target=self._fail, args=(process, call, future, error), daemon=True)
            look.start()
        elif self._take(process, future):
            settle(future, call, process.rank, sent, answer.result())

    def _take(self, process: Process, future: Future[Reply]) -> bool:
        """Return True for the one who is to resolve a call."""
        with self._lock:
            return process.calls.pop(future, None) is not None

    def _fail(self, process: Process, call: Call, future: Future[Reply], error: BaseException) -> None:
        if isinstance(error, self._ray.exceptions.RayActorError):
            self._lose([process], self._ending(process))
        elif self._take(process, future):
            where = place_of(call, process.rank)
            future.set_exception(WorkerError(f"{where}: {type(error).__name__}: {error}", key=call.operation))

    def _ending(self, process: Process) -> str:
        """Describe how a worker was lost, by its node if that still answers."""
        if not self._closed and process.machine in self._machines:
            with suppress(self._ray.exceptions.RayError):
                return str(self._ask(process.machine, "ending", process.rank, process.pid))
        return f"the worker (process {process.pid}) has died with its machine {process.machine.node.address}"

    def _ask(self, machine: Machine, method: str, *args: Any, limit: float = LOOK) -> Any:
        return self._ray.get(getattr(machine.agent, method).remote(*args), timeout=limit)

    # ---- losses, seen by the thread that watches ----

    def _watched(self) -> dict[Machine, dict[int, int]]:
        with self._lock:
            found: dict[Machine, dict[int, int]] = {machine: {} for machine in self._machines}
            for process in self._processes:
                if not process.lost and process.machine in found:
                    found[process.machine][process.pid] = process.rank
        return found

    def _died(self, machine: Machine, pid: int, how: str) -> None:
        there = [process for process in self._processes if process.machine is machine and process.pid == pid]
        self._lose(there, how)

    def _gone(self, machine: Machine, why: str) -> None:
        """Give up a node whose agent does not answer, with all processes there."""
        if self._closed:
            return
        with self._lock:
            self._machines = [one for one in self._machines if one is not machine]
            self._spares = [spare for spare in self._spares if spare.machine is not machine]
            there = [process for process in self._processes if process.machine is machine]
        if unreachable(machine.node) is not None:
            self._dead.add(machine.node.id)
        ranks = ", ".join(str(process.rank) for process in there)
        self._lose(there, f"lost with its node {_title(machine.node)}, ranks {ranks}: {why}")

    def _lose(self, processes: Sequence[Process], how: str) -> None:
        """Fail the calls of processes that were lost together."""
        ranks = tuple(process.rank for process in processes)
        for process in processes:
            with self._lock:
                if process.lost:
                    continue
                process.lost = how
                calls, process.calls = process.calls, {}
            for future, call in calls.items():
                future.set_exception(lost(call, process.rank, process.lost, ranks))

    # ---- for recoveries ----

    def life(self, rank: int) -> tuple[int, int]:
        assert self._watch is not None
        return self._watch.lives.get(rank, (0, 0))

    @property
    def scratch(self) -> str:
        if self._lasting and not self._several and self._here() is not None:
            return self._lasting
        folders = {machine.folder for machine in self._machines}
        return f"{folders.pop()}/scratch" if len(folders) == 1 and self._here() is not None else ""

    @property
    def files(self) -> RayFiles | None:
        here = self._here()
        if not self._several or here is None:
            return None
        return RayFiles(self._ray, self._holders, lambda rank: self._processes[rank].machine, lambda: here)

    def _here(self) -> Machine | None:
        """Return the machine of this process, if it has an agent."""
        return next((machine for machine in self._machines if machine.node.id == self._node), None)

    def _holders(self) -> list[Machine]:
        """Return the living nodes that hold snapshots: those of workers, and this one."""
        used = {process.machine for process in self._processes} | {self._here()}
        return [machine for machine in self._machines if machine in used]

    def kill(self, ranks: Iterable[int]) -> None:
        with self._lock:  # another thread may be about to replace them
            found = [(self._processes[rank], self._starting.get(rank)) for rank in ranks]
        processes = [process for both in found for process in both if process is not None]
        there: dict[Machine, list[int]] = {}
        for process in (process for process in processes if process.pid):
            there.setdefault(process.machine, []).append(process.pid)
        asked = [one.agent.kill.remote(pids) for one, pids in there.items() if one in self._machines]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=LOOK)
        self._end_actors([process.actor for process in processes])

    def nodes(self) -> tuple[Mapping[int, str], Collection[str]]:
        on = {process.rank: process.machine.node for process in self._processes}
        busy = Counter(on.values())
        room = {node: node.room - busy[node] for node in self._nodes()}  # spares take a part of it
        movable = [
            _title(node)
            for node, count in busy.items()
            if sum(left for other, left in room.items() if other != node) >= count
        ]
        return {rank: _title(node) for rank, node in on.items()}, movable

    def replace(self, ranks: Sequence[int], evicted: Collection[int] = ()) -> None:
        if not ranks:
            return
        self.kill(ranks)
        self._vacate([self._processes[rank] for rank in ranks])
        for machine in {self._processes[rank].machine for rank in evicted}:
            self._give_up(machine)
        found: dict[int, Process] = {}
        try:
            for rank in ranks:
                found[rank] = self._substitute(self._processes[rank], [*self._staying(ranks), *found.values()])
                with self._lock:
                    self._starting[rank] = found[rank]
            self._begin(found)
        except TilthError as error:
            self._end_actors([process.actor for process in found.values()])
            message = f"rank {ranks[0]}, start: {error}"
            raise WorkerLost(message, key=error.key if error.key == "guard.spares" else "cluster.start") from None
        else:
            with self._lock:
                for rank, process in found.items():
                    self._processes[rank] = process
        finally:
            with self._lock:
                for rank in ranks:
                    self._starting.pop(rank, None)
        self._refill()

    def _give_up(self, machine: Machine) -> None:
        """Use a node no more: end what runs there."""
        spares = [spare for spare in self._spares if spare.machine is machine]
        with self._lock:
            self._dead.add(machine.node.id)
            self._machines = [one for one in self._machines if one is not machine]
            self._spares = [spare for spare in self._spares if spare.machine is not machine]
        self._ray.wait([machine.agent.end.remote(self._pids_on(machine), True)], timeout=2 * LOOK)
        self._end_actors([machine.agent, *(spare.actor for spare in spares)])

    def _staying(self, ranks: Sequence[int]) -> list[Process]:
        return [process for process in self._processes if process.rank not in ranks]

    def _vacate(self, processes: Sequence[Process]) -> None:
        """Wait until killed processes are gone."""
        for machine in self._machines:
            pids = {process.pid: process.rank for process in processes if process.machine is machine}
            if pids:
                with suppress(self._ray.exceptions.RayError):  # then the machine is lost too
                    self._ask(machine, "vacate", pids, limit=2 * LOOK)

    def _substitute(self, lost: Process, others: Sequence[Process]) -> Process:
        """Return the process that takes the place of one: a spare of its node, a new one there, or, if the node is
        gone, a spare elsewhere, or a new one where there is room. others: the workers of the other ranks."""
        if lost.machine in self._machines:
            return self._spare([lost.machine]) or self._start(lost.machine)
        busy = Counter(process.machine.node.id for process in others)
        if found := self._spare(sorted(self._machines, key=lambda machine: -busy[machine.node.id])):
            return found
        taken = busy + Counter(spare.machine.node.id for spare in self._spares)
        left = {node: node.room - taken[node.id] for node in self._nodes()}
        node = max(left, key=lambda node: (left[node], node.id == lost.machine.node.id), default=None)
        if node is None or left[node] < 1:
            raise WorkerLost(
                f"the node {_title(lost.machine.node)} is lost, and no other has room for rank {lost.rank}; with "
                f"guard.spares={self._on_one_node()} the ranks of a node find a place (guard.spares = {self.spares})",
                key="guard.spares",
            )
        return self._start(self._machine_of(node))

    def _on_one_node(self) -> int:
        """Return the most workers that one node has."""
        return max(Counter(process.machine.node.id for process in self._processes).values())

    def _machine_of(self, node: Node) -> Machine:
        """Return the machine of a node, with an agent."""
        for machine in self._machines:
            if machine.node.id == node.id:
                return machine
        machine = self._machine(node)
        machine.folder = self._wait_for([machine.agent.place.remote()])[0]
        with self._lock:
            self._machines = [*self._machines, machine]
        return machine

    def _spare(self, machines: Sequence[Machine]) -> Process | None:
        """Return a spare of the first of these machines that has one, once it is ready; it is no spare any more."""
        for machine in machines:
            for spare in [spare for spare in self._spares if spare.machine is machine]:
                self._spares.remove(spare)
                try:
                    self._wait_for([spare.ready])
                except TilthError as error:
                    print(f"tilth: a spare on {machine.node.address} was lost: {first_line(error)}", file=sys.stderr)
                    self._end_actors([spare.actor])
                    continue
                return spare
        return None

    def _refill(self) -> None:
        """Start spares in the place of those that were taken, where there is room, without waiting for them."""
        taken = Counter(process.machine.node.id for process in [*self._processes, *self._spares])
        room = [machine.node.room - taken[machine.node.id] for machine in self._machines]
        missing = min(self.spares - len(self._spares), sum(room))
        places = place_spares(room, missing, self.workers)
        self._spares += [self._warm(self._machines[place]) for place in places]

    # ---- questions from outside, the end ----

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Send a control message by the worker's node, since an actor's methods wait for the running call."""
        machine, where, key = self._processes[rank].machine, f"role {role}, rank {rank}, {method}", f"{role}.{method}"
        try:
            return self._ask(machine, "control", rank, role, method, arguments, limit=2 * LOOK)
        except self._ray.exceptions.RayTaskError as error:
            known = error.cause if isinstance(error.cause, TilthError) else None
            raise (known or WorkerError(str(error), key=key)) from None
        except self._ray.exceptions.GetTimeoutError:
            message = f"{where}: no answer to a control message within {2 * LOOK:g} s"
            raise CallTimeout(message, key=key) from None
        except self._ray.exceptions.RayError as error:
            gone = WorkerLost(f"{where}: {str(error).strip()}", key=key)
            gone.ranks = (rank,)
            raise gone from None

    def probe(self, rank: int) -> Probe:
        process = self._processes[rank]
        try:
            found: Probe = self._ask(process.machine, "probe", rank, process.pid)
        except self._ray.exceptions.RayError:
            why = f"machine {process.machine.node.address} does not answer"
            return Probe(rank, process.pid, "gone", "", why)
        return found

    def close(self, kill: bool) -> None:
        """End workers and node agents with all payload, and a Ray that was started here. The workers are idle."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        actors = [process.actor for process in [*self._processes, *self._spares]]
        if not kill:
            self._end_actors(actors)
        ends = [machine.agent.end.remote(self._pids_on(machine), kill) for machine in self._machines]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=4 * LOOK)
        self._end_actors([*actors, *(machine.agent for machine in self._machines)])
        if self._started:
            self._ray.shutdown()

    def _pids_on(self, machine: Machine) -> list[int]:
        return [process.pid for process in self._processes if process.machine is machine and process.pid]

    def _end_actors(self, actors: Sequence[Any]) -> None:
        """Let Ray end actors; a stopped process does not react."""
        for actor in actors:
            self._ray.kill(actor)


def _title(node: Node) -> str:
    """Return the name of a node in messages; several may have one address."""
    return f"{node.address} ({node.id[:8]})"
