"""Publish weights to engines that take them when they can, and compare log-probs of trainer and engine in every step;
``tilth.roles`` compares the weights."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.lazy import LazyMap
from tilth.cluster.controller.leases import LeasedStore
from tilth.config.schema import Recipe
from tilth.core.batch import Lease
from tilth.core.errors import LogprobMismatch, WorkerLost
from tilth.core.layout import Mesh
from tilth.engines.protocol import EngineError
from tilth.rl.metrics import Metric
from tilth.roles.relay import Publication
from tilth.roles.relay_sync import SentVersion

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_MISMATCH = {"fp32": 1e-3, "bf16": 0.5}
"""Largest tolerated |log-prob difference| of one token: far above rounding, far below a wrong tensor's effect."""
CORRECTED_MISMATCH = 2.0
"""Largest tolerated difference with a correction; a factor of 7 in probability cannot be corrected."""

_numbers = itertools.count(1)
"""Of the publications of this controller, whatever is made again meanwhile."""


class Publisher:
    """Versions of the policy that engines take from a relay (``roles.relay_sync``).

    All replicas take each version after their round under way, unless ``offer`` is set: it gets what was published, and
    calls ``pull`` for each replica in its own time, from any thread.
    """

    def __init__(
        self,
        weight_sync: WorkerGroup,
        policy: Mesh,
        rollout: Mesh,
        store: LeasedStore,
        whole_every: int,
        *,
        adapters: bool = False,
    ) -> None:
        """policy, rollout: meshes of the roles of these names; whole_every: of so many versions that go to relays of
        other nodes the first is whole; adapters: engines take these apart from their base, which goes there once."""
        self.store, self._whole_every, place = store, whole_every, weight_sync.mesh.ranks.index
        self._bases = int(adapters)
        self._apart = len({*weight_sync.relay_id("rollout")}) > 1
        """There are other nodes."""
        self._sent: list[SentVersion] = []
        """To relays of other nodes: the version with the base of adapters, then all from the last whole one on."""
        self._kept: list[Lease] = []
        """Of each."""
        self.sent_bytes = 0
        """Of the newest of them."""
        self._policy = weight_sync.part("to", [place(rank) for rank in policy.ranks])
        engines = [list(map(place, rollout.only("dp", [i]).ranks)) for i in range(rollout.size("dp"))]
        self._replicas = range(len(engines))
        self._part = cache(lambda *replicas: weight_sync.part("to", [one for i in replicas for one in engines[i]]))
        self.offer: Callable[[Publication], None] | None = None
        self._newest = Publication(0, -1)
        self._left = set[int]()
        """Replicas that are lost."""
        self._pulls: list[Mapping[int, None]] = []
        self._lease: Lease | None = None
        """Of the pulls since the last publication."""
        self._lock = threading.Lock()
        """Held while a version is written, and while a pull is sent, so that ranks of one engine take the same one."""

    def publish(self, version: int) -> int:
        """Write the policy's weights to the relay, and let the engines take them; return the bytes that were written.

        Returns once they are written: what an engine that takes them is asked for then comes from these weights.
        Waits first for pulls under way, so that no version is overwritten while it is read.
        """
        with self._lock:
            self._wait()
            self._newest = Publication(next(_numbers), version)
            anew = self._apart and not self._sent
            written = self._policy.publish("rollout", self._newest, self._sent, anew=anew)
            if self._apart:
                self._pack()
        if self.offer is None:
            self.pull()
        else:
            self.offer(self._newest)
        return sum(written)

    def pull(self, replica: int | None = None) -> Publication:
        """Let a replica, None: each that is not lost, take what was published last, before what it is asked for next;
        return that. EngineError [weight_sync.pull] for one that is lost: it would draw with the weights it was made
        with."""
        with self._lock:
            if replica in self._left:
                message = f"replica {replica} is lost and takes no weights; its new worker takes them when it joins"
                raise EngineError(message, key="weight_sync.pull")
            self._send(self._replicas if replica is None else [replica])
            return self._newest

    def _send(self, replicas: Sequence[int]) -> None:
        """Let these replicas, but lost ones, pull, in one call. (Called with the lock.)"""
        self._lease = self._lease or self.store.lease("weights")
        if living := [place for place in replicas if place not in self._left]:
            with self.store.under(self._lease):  # not the step's, which ends without them
                self._pulls.append(self._part(*living).pull("rollout", self._newest, self._sent))

    def leave(self, replica: int) -> None:
        """Let a replica that is lost take nothing, until ``join``."""
        with self._lock:
            self._left.add(replica)

    def join(self, replica: int) -> Publication:
        """Let a new replica take what was published last, before what it is asked for next, and what comes after it;
        return that."""
        with self._lock:
            self._left.discard(replica)
            self._send([replica])
            return self._newest

    def _pack(self) -> None:
        """Let relays of other nodes have the newest version: whole, or what has changed since the one before."""
        if len(self._sent) == self._bases + self._whole_every:
            self._free(self._bases)
        since = self._sent[-1].publication.number if len(self._sent) > self._bases else 0
        self._kept.append(self.store.lease("weights"))
        with self.store.under(self._kept[-1]):
            packed = self._policy.pack("rollout", self._newest, since, base=not self._sent)
        columns = {writer: handle for one in packed for writer, handle in one.items()}
        self.sent_bytes = sum(handle.nbytes for handle in columns.values())
        self._sent.append(SentVersion(self._newest, since, columns))

    def _free(self, first: int = 0) -> None:
        """Free what was sent, from this place on."""
        self.store.release(*self._kept[first:])
        self._sent, self._kept = self._sent[:first], self._kept[:first]

    def wait(self) -> None:
        """Wait for pulls under way, and free what they have taken. Raises what stopped one."""
        with self._lock:
            self._wait()
            self._free()

    def _wait(self) -> None:
        """Wait for the pulls, all at once. Raises what stopped one, also where another thread has heard of it, but for
        a loss, which is that of the worker's next call too. (Called with the lock.)"""
        if self._lease is not None:
            self._lease.release()
            pulls, self._pulls, self._lease = self._pulls, [], None
            calls = [call for pull in pulls if isinstance(pull, LazyMap) for call in pull.calls]
            for error in (call.future.exception() for call in calls):
                if error is not None and not isinstance(error, WorkerLost):
                    raise error


@dataclass(frozen=True)
class SyncBounds:
    """The engine's dtype, and the largest log-prob difference of a token between trainer and engine."""

    dtype: torch.dtype
    mismatch: float

    @classmethod
    def of(cls, recipe: Recipe) -> "SyncBounds":
        """Return the recipe's bounds; 0 in parity mode."""
        t = recipe.train
        usual = CORRECTED_MISMATCH if recipe.algorithm.correction else DEFAULT_MISMATCH[t.precision]
        return cls(DTYPES[t.precision], 0.0 if t.parity else t.mismatch or usual)


def check_mismatch(metrics: Mapping[str, Metric], bounds: SyncBounds, step: int) -> None:
    """Raise LogprobMismatch if the log-probs of some token differ by more than the bound.

    ``mismatch/max`` is only there if the update began with the weights that generated the batch.
    """
    found = metrics.get("mismatch/max")
    worst = float(found.total) if found is not None and found.count else 0.0
    if not worst <= bounds.mismatch:  # NaN too
        raise LogprobMismatch(
            f"step {step + 1}: log-probs of trainer and rollout engine differ by up to {worst:.3g}, "
            f"more than train.mismatch={bounds.mismatch:g}; they compute different policies",
            key="train.mismatch",
        )
