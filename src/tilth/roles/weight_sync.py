"""Weight sync: sends the policy's weights to the roles that hold a copy, across workers and layouts, and checks them.

Weights travel in buckets of whole tensors: every replica of the policy assembles them where a receiver shares its
workers, and the policy's first worker sends them to the other receivers. Each receiver's live storage must have the
checksums of what the policy sent.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.config.roles import ROLES
from tilth.core.checksum import checksum
from tilth.core.errors import WeightMismatch
from tilth.core.layout import Mesh, Shape
from tilth.models.value import OUTPUT
from tilth.parallel.comm import broadcast
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import WHOLE, ShardedModel, buckets
from tilth.trace.spans import span


class Receiver(Protocol):
    """Role that holds a copy of the policy's weights."""

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take whole tensors as they come, in place; all of them must be taken from the stream."""
        ...

    @property
    def tolerance(self) -> float | None:
        """Check: 0: by its fingerprint; above 0: by ``receive`` itself; None: by what it computes."""
        ...

    def fingerprint(self) -> Mapping[str, int]:
        """Return the checksum of each whole tensor of the storage that is in use."""
        ...


class Delivery(NamedTuple):
    """Report of one worker about a weight sync, in bytes and tensors."""

    rank: int
    received: int
    bytes: int
    probe: bool
    """The receiver cannot show its weights; a probe must compare what it computes."""


@dataclass(frozen=True)
class Route:
    """Path of the weights to one target, seen from this worker."""

    target: bool
    """This worker holds a receiver."""
    gathers: bool
    """It assembles whole tensors: for itself, for its peers or to send them."""
    outside: ParallelDims | None
    """The sender and the receivers without a part of the policy, if this worker is one of them."""


class WeightSyncWorker:
    """Sender or receiver of weights; on every worker of both."""

    def __init__(
        self,
        context: Context,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, torch.dtype],
        source: Mesh,
        targets: Mapping[str, Mesh],
        *,
        device: torch.device,
        bucket: int = WHOLE,
    ) -> None:
        """shapes: of the policy's parameters; dtypes: wanted by each target; source, targets: their meshes; device: of
        this worker's models and of what it sends."""
        self.context, self.device = context, device
        self.shapes = dict(shapes)
        self.dtypes = dict(dtypes)
        self.source = source
        self.routes = {name: self._route(mesh) for name, mesh in targets.items()}
        self.bucket = bucket
        self._bytes = 0

    def _route(self, target: Mesh) -> Route:
        rank, inside = self.context.rank, set(self.source.ranks)
        strangers = tuple(r for r in target.ranks if r not in inside)
        members = (self.source.ranks[0], *strangers)
        source = rank in inside
        shared = any(r in inside for r in target.ranks)
        first_replica = source and not self.source.index(rank, *self.source.copies)
        return Route(
            target=rank in target.ranks,
            gathers=source and (shared or first_replica),
            outside=ParallelDims.of(Mesh(("to",), (len(members),), members), rank, self.context.generation)
            if strangers and rank in members
            else None,
        )

    @transfer(split="all", gather="all")
    def sync(self, target: str, version: int) -> Delivery:
        """Send the policy's weights to a target. WeightMismatch names the tensors that arrived changed."""
        route, dtype, expected = self.routes[target], self.dtypes[target], dict[str, int]()
        receiver: Receiver | None = self.context.roles[target] if route.target else None  # type: ignore[assignment]
        self._bytes = 0
        stream = self._stream(route, dtype, expected)
        with span("publish") as sent:
            if receiver is not None:
                receiver.receive(stream, version)
            for _ in stream:  # what a worker without a receiver has to send
                pass
            sent.set(bytes=self._bytes)
        with span("verify"):
            self._send_checksums(route, expected)
            if receiver is not None and receiver.tolerance == 0:
                wanted = {name: expected[name] for name in self._wanted(target)}
                verify_weights(wanted, receiver.fingerprint(), target)
        probe = receiver is not None and receiver.tolerance is None
        return Delivery(self.context.rank, len(expected) if receiver is not None else 0, self._bytes, probe)

    def _wanted(self, target: str) -> list[str]:
        """Names of the tensors that a target must hold; a value model has no output head."""
        return [name for name in self.shapes if not ROLES[target].values or not name.startswith(OUTPUT)]

    def _stream(self, route: Route, dtype: torch.dtype, expected: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors in the target's dtype; ``expected`` gets their checksums."""
        for names in buckets(self.shapes, self.bucket):
            whole: dict[str, Tensor] = {}
            if route.gathers:
                policy: ShardedModel = self.context.roles["policy"].engine.sharded  # type: ignore[attr-defined]
                whole = {name: tensor.detach().to(dtype) for name, tensor in policy.assemble(names).items()}
                expected |= {name: checksum(tensor) for name, tensor in whole.items()}
            if route.outside is not None:
                whole = self._broadcast(route.outside, names, whole, dtype)
            yield from whole.items()

    def _broadcast(
        self, grid: ParallelDims, names: list[str], whole: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Broadcast one flat buffer of a bucket from the first rank of the grid."""
        sizes = [math.prod(self.shapes[name]) for name in names]
        if whole:
            flat = torch.cat([whole[name].reshape(-1) for name in names])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        _send(flat, grid)
        self._bytes += flat.nbytes
        return {name: part.view(self.shapes[name]) for name, part in zip(names, flat.split(sizes))}

    def _send_checksums(self, route: Route, expected: dict[str, int]) -> None:
        """Send the policy's checksums to the receivers outside of its workers."""
        if route.outside is None:
            return
        names = list(self.shapes)
        sums = torch.tensor([expected.get(name, 0) - 2**63 for name in names], dtype=torch.int64)
        _send(sums, route.outside)
        expected |= {name: total + 2**63 for name, total in zip(names, sums.tolist())}


def _send(x: Tensor, grid: ParallelDims) -> None:
    """Broadcast x from the first rank of the grid."""
    group = grid.group("to")
    assert group is not None  # a sender and a stranger at least
    broadcast(x, grid.mesh.ranks[0], group)


def verify_weights(expected: Mapping[str, int], received: Mapping[str, int], target: str = "rollout") -> None:
    """Raise WeightMismatch naming the tensors whose checksum in the receiver's live storage is not the policy's."""
    wrong = [name for name in expected if received.get(name) != expected[name]]
    wrong += [name for name in received if name not in expected]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise WeightMismatch(
            f"after the weight sync, {', '.join(wrong[:3])}{more} in the {ROLES[target].label} differ from the "
            "trainer's; the run stops before it learns from a wrong policy",
            key=wrong[0],
        )
