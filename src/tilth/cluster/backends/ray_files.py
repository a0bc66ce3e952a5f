"""Copies of a run's snapshots on other nodes, through the agents of the ``ray`` backend.

Every node has a scratch folder under the same path. The agent that gets a file asks the agent that has it, piece by
piece, so that Ray's object store holds little of it; checksums are compared at both ends.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from tilth.cluster.backends.base import Copied
from tilth.cluster.backends.ray_connect import first_line
from tilth.cluster.backends.ray_watch import Machine
from tilth.core.errors import StorageError


class _Move(NamedTuple):
    """Files on their way. sources: name -> where from."""

    answer: Any
    target: Machine
    sources: Mapping[str, Machine]


class RayFiles:
    """Files of the scratch folders of all nodes.

    machines: returns the living nodes of workers, and the controller's; of: returns the node of a rank; here: returns
    the controller's.
    """

    def __init__(
        self,
        ray: ModuleType,
        machines: Callable[[], Sequence[Machine]],
        of: Callable[[int], Machine],
        here: Callable[[], Machine],
    ) -> None:
        self._ray, self._machines, self._of, self._here = ray, machines, of, here
        self._there: dict[str, set[Machine]] = {}
        """File -> nodes that have it."""
        self._running: list[_Move] = []

    def node(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._of(rank).home

    def begin(self, files: Mapping[str, tuple[int, int]], mirrored: Mapping[str, int]) -> None:
        """Begin to copy files: name -> (rank that has it, rank whose node gets it).

        mirrored: folder -> rank that writes it; the controller's node gets its files, and loses those that are gone.
        """
        wanted: dict[Machine, dict[str, Machine]] = {}
        for name, (owner, peer) in files.items():
            source, target = self._of(owner), self._of(peer)
            self._there[name] = {source}
            if source is not target:
                wanted.setdefault(target, {})[name] = source
        self._running = [self._fetch(target, sources) for target, sources in wanted.items()]
        here = self._here()
        for folder, rank in mirrored.items():
            if (source := self._of(rank)) is not here:
                self._running.append(_Move(here.agent.mirror.remote(folder, source.agent), here, {folder: source}))

    def holders(self) -> dict[str, list[str]]:
        """Return file -> nodes that have it, for ``resume``."""
        return {name: sorted(machine.node.id for machine in machines) for name, machines in self._there.items()}

    def resume(self, holders: Mapping[str, Collection[str]]) -> None:
        """Know again, in the next controller, which of the nodes have which files."""
        living = {machine.node.id: machine for machine in self._machines()}
        self._there = {name: {living[one] for one in nodes if one in living} for name, nodes in holders.items()}

    def wait(self) -> Copied:
        """Wait for the copies that ``begin`` began; return what they were."""
        nbytes, seconds, problem = 0, 0.0, ""
        for move in self._running:
            lost = {move.target, *move.sources.values()}.difference(self._machines())
            if lost and not (move.target not in lost and self._ray.wait([move.answer], timeout=0)[0]):
                problem = f"the node {lost.pop().node.address} is lost"  # and they were not there before
                continue
            try:
                moved, took = self._ray.get(move.answer)
            except self._ray.exceptions.RayError as error:
                problem = first_line(getattr(error, "cause", None) or error)
                continue
            nbytes, seconds = nbytes + moved, max(seconds, took)
            for name in move.sources.keys() & self._there.keys():
                self._there[name].add(move.target)
        self._running = []
        return Copied(nbytes, seconds, problem)

    def gather(self, files: Iterable[str]) -> None:
        """Give every node these files. StorageError if a file was lost with its nodes."""
        living = list(self._machines())
        wanted: dict[Machine, dict[str, Machine]] = {}
        for name in files:
            have = [machine for machine in living if machine in self._there.get(name, ())]
            if not have:
                raise StorageError(f"the snapshot's file {name} was lost with its node", key="snapshot")
            for machine in living:
                if machine not in have:
                    wanted.setdefault(machine, {})[name] = have[0]
        moves = [self._fetch(target, sources) for target, sources in wanted.items()]
        self._all([move.answer for move in moves])
        for move in moves:
            for name in move.sources:
                self._there[name].add(move.target)

    def scatter(self, folder: str, ranks: Collection[int]) -> None:
        """Give the nodes of these ranks the files of a folder of the controller's node."""
        here = self._here()
        there = {self._of(rank) for rank in ranks} - {here}
        self._all([machine.agent.mirror.remote(folder, here.agent) for machine in there])

    def share(self, folder: str, files: Mapping[str, bytes], links: Mapping[str, str]) -> None:
        """Make a folder on every node but the controller's: files with these bytes, and links to files there."""
        others = [machine for machine in self._machines() if machine is not self._here()]
        self._all([machine.agent.make.remote(folder, dict(files), dict(links)) for machine in others])

    def remove(self, folder: str) -> None:
        """Remove a folder on every node but the controller's."""
        others = [machine for machine in self._machines() if machine is not self._here()]
        self._all([machine.agent.remove.remote(folder) for machine in others])

    def _fetch(self, target: Machine, sources: Mapping[str, Machine]) -> "_Move":
        """Begin to fetch files for a node, all in one call, so that its agent has threads left to read for others."""
        agents = {name: source.agent for name, source in sources.items()}
        return _Move(target.agent.fetch.remote(agents), target, sources)

    def _all(self, asked: Sequence[Any]) -> None:
        try:
            self._ray.get(list(asked))
        except self._ray.exceptions.RayTaskError as error:
            raise StorageError(f"files of a snapshot: {first_line(error.cause)}", key="snapshot") from None
        except self._ray.exceptions.RayError as error:
            raise StorageError(f"files of a snapshot: {first_line(error)}", key="snapshot") from None
