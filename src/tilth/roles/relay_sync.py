"""Weight sync in two halves that do not wait for each other: the policy publishes to a relay, engines take from it.

Each node has a relay of its own. What the policy's ranks write into that of their node goes to the others as payload:
whole versions now and then, and what has changed between them. On each node the first who needs it unpacks it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.protocol import transfer
from tilth.core.batch import Handle
from tilth.core.errors import WeightMismatch
from tilth.parallel.sharded import buckets
from tilth.plan.lora import is_adapter
from tilth.plan.reshard import relay_pieces
from tilth.roles.relay import Publication, Relay
from tilth.roles.weight_sync import Delivery, Layouts, Receiver, WeightSyncWorker
from tilth.trace.spans import span


class SentVersion(NamedTuple):
    """A version on its way to the relays of other nodes. since: number of the publication that it changes, 0: it is
    whole; columns: writer -> what it has packed."""

    publication: Publication
    since: int
    columns: Mapping[int, Handle]


class RelaySyncWorker(WeightSyncWorker):
    """Weight sync that reaches some targets by relays; ``sync`` is for the others."""

    def __init__(self, *given: Any, relays: Mapping[str, Path], session: SessionDir | None = None, **more: Any) -> None:
        """given, more: as of ``WeightSyncWorker``; relays: target -> file of its relay on this machine; session: their
        folder, if this worker is to remove it."""
        super().__init__(*given, **more)
        self._session = session
        self.relays = {target: self._relay(target, path) for target, path in relays.items()}
        self._published = set[str]()
        self._have: dict[str, Publication] = {}

    def _relay(self, target: str, path: Path) -> Relay:
        route = self.routes[target]
        return Relay(path, relay_pieces(self.source, self.held, route.wanted), route.dtype)

    def close(self) -> None:
        """Close the relays, and remove their folder if it belongs to this worker."""
        for relay in self.relays.values():
            relay.close()
        if self._session is not None:
            self._session.remove()

    @transfer(split="all", gather="all")
    def relay_id(self, target: str) -> str:
        """Return what the ranks of one node have in common."""
        return self.relays[target].id

    @transfer(split="all", gather="all")
    def publish(
        self, target: str, publication: Publication, sent: Sequence[SentVersion] = (), *, anew: bool = False
    ) -> int:
        """Write this rank's boxes of the policy's weights into a relay, of adapters that the target takes A and B alone
        after the first time; return their bytes, but for a base that is sent once.

        A call of all ranks of the policy. sent: as of ``pull``, of earlier versions; anew: there are none of them, so a
        relay may lack what ranks of other nodes have published.
        """
        relay, names = self.relays[target], self._names(target, whole=anew or target not in self._published)
        self._bring(relay, sent)
        shapes = {name: self.held[name].shape for name in names}
        apart, rank = self.routes[target].adapters, self.context.rank
        with span("publish") as written:
            own = (self._own(some, apart=apart) for some in buckets(shapes, self.bucket))
            if rank in relay.writers:
                relay.publish(own, publication, rank, keeps=self.routes[target].wanted.keys() - names.keys())
            for _ in own:  # what a rank that writes nothing has to add
                pass
            counted = self._names(target, whole=False)
            size = sum(p.box.numel for p in relay.pieces if p.writer == rank and p.name in counted)
            written.set(bytes=size * relay.dtype.itemsize)
        self._published.add(target)
        return size * relay.dtype.itemsize

    @transfer(split="all", gather="all")
    def pack(self, target: str, publication: Publication, since: int, *, base: bool) -> dict[int, Handle]:
        """Put what this rank has published where other nodes find it; see ``Relay.pack``. base: with the base of
        adapters."""
        relay, rank = self.relays[target], self.context.rank
        if rank not in relay.writers:
            return {}
        keeps = self.routes[target].wanted.keys() - self._names(target, whole=base).keys()
        with span("pack") as put:
            found = self.context.store.put("weights", relay.pack(publication, rank, since, keeps))
            put.set(bytes=found.nbytes)
        return {rank: found}

    def _bring(self, relay: Relay, sent: Sequence[SentVersion]) -> None:
        """Bring the relay of this node up to date with these versions, unless another rank of it has."""
        if not sent or ((newest := relay.newest) is not None and newest.number >= sent[-1].publication.number):
            return
        with span("unpack"), relay.alone():
            for one in sent:
                if (newest := relay.newest) is None or newest.number < one.publication.number:
                    get = self.context.store.get
                    packed = {writer: partial(get, handle) for writer, handle in one.columns.items()}
                    relay.unpack(one.publication, one.since, packed)

    @transfer(split="all", gather="merge")
    def pull(self, target: str, publication: Publication, sent: Sequence[SentVersion] = ()) -> dict[int, Delivery]:
        """Let this rank's receiver take what was published, or what came after it.

        sent: all versions to relays of other nodes from the last whole one on, if there are other nodes; before them
        the one with the base of adapters.
        WeightMismatch as of ``Relay.pull``, and where the relay does not have it.
        """
        receiver: Receiver = self.context.roles[target]  # type: ignore[assignment]
        relay, have, rank = self.relays[target], self._have.get(target), self.context.rank
        wanted, names = self.routes[target].wanted, self._names(target, whole=have is None)
        self._bring(relay, sent)
        with span("pull") as taken:
            leaves = wanted.keys() - names.keys()
            found = relay.pull(receiver, wanted, rank, have, leaves=leaves, device=self.device)
            counted = self._names(target, whole=False)
            size = sum(box.numel for layout in counted.values() for box in layout.boxes(rank)) * relay.dtype.itemsize
            taken.set(bytes=size)
        if found is None or found.number < publication.number:
            message = f"version {publication.version} of the weights was published, and the relay {relay.path} lacks it"
            raise WeightMismatch(message, key="relay.missing")
        self._have[target] = found
        return {rank: Delivery(rank, len(names), size, False, taken=size)}

    def _names(self, target: str, *, whole: bool) -> Layouts:
        """Return the parameters that travel, with the target's layouts."""
        route = self.routes[target]
        return {n: layout for n, layout in route.wanted.items() if whole or not route.adapters or is_adapter(n)}
