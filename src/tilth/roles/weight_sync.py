"""Weight sync: sends the policy's weights to the roles that hold a copy, across workers and layouts, and checks them.

A receiver gets the boxes that it needs and nothing else (``plan.reshard``), bucket by bucket, from one replica of the
policy. An engine on the policy's workers, in the policy's dtype, shares memory with it where the policy is divided by
tp: the training shard is then a slice of the generation weights, and only the rest of them travels (HybridFlow, arXiv
2409.19256, section 5.3). What arrives must have the checksums of what was sent, and each receiver's live storage the
checksums of what arrived.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.config.axes import MODEL
from tilth.config.errors import listed
from tilth.config.roles import ROLES
from tilth.core.checksum import checksum
from tilth.core.errors import WeightMismatch
from tilth.core.layout import Layout, Mesh
from tilth.parallel.lora import merged_parts
from tilth.parallel.reshard import Part, Parts, Resharder, allocate, parts_of, share
from tilth.parallel.sharded import WHOLE, ShardedModel, buckets
from tilth.plan.lora import has_adapters, is_adapter
from tilth.plan.reshard import ReshardPlan
from tilth.roles.rollout import RolloutWorker
from tilth.trace.spans import span

Layouts = Mapping[str, Layout]


class Receiver(Protocol):
    """Role that holds a copy of the policy's weights."""

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take this rank's part of each tensor as they come, in place; all of them must be taken from the stream."""
        ...

    @property
    def tolerance(self) -> float | None:
        """Check: 0: by its fingerprint; above 0: by ``receive`` itself; None: by what it computes."""
        ...

    def fingerprint(self) -> Mapping[str, int]:
        """Return the checksum of this rank's part of each tensor, in the storage that is in use."""
        ...


class Delivery(NamedTuple):
    """Report of one worker about a weight sync. received: tensors; bytes: from other workers; shared: tensors whose
    memory the policy and the receiver share."""

    rank: int
    received: int
    bytes: int
    probe: bool
    """The receiver cannot show its weights; a probe must compare what it computes."""
    shared: int = 0
    taken: int = 0
    """Bytes that the receiver took, from wherever, without those of a base that is sent once."""


@dataclass(frozen=True)
class Route:
    """Path of the weights to one target, seen from this worker."""

    target: bool
    """This worker holds a receiver."""
    wanted: Layouts
    """Layouts of the receiver, by parameter."""
    resharder: Resharder
    dtype: torch.dtype
    adapters: bool
    """The receiver takes the policy's adapters as they are."""
    mine: frozenset[str]
    """Parameters of which this worker's receiver holds a part."""


class WeightSyncWorker:
    """Sender or receiver of weights; on every worker of both."""

    def __init__(
        self,
        context: Context,
        held: Layouts,
        wanted: Mapping[str, Layouts],
        dtypes: Mapping[str, torch.dtype],
        source: Mesh,
        targets: Mapping[str, Mesh],
        *,
        device: torch.device,
        bucket: int = WHOLE,
    ) -> None:
        """held: layouts of the policy's parameters; wanted, dtypes: of each target; source, targets: their meshes;
        device: of this worker's models and of what it sends."""
        self.context, self.device = context, device
        self.held, self.source, self.bucket = dict(held), source, bucket
        self.routes = {name: self._route(mesh, wanted[name], dtypes[name]) for name, mesh in targets.items()}
        self._shared: dict[str, Parts] = {}
        self._bases: dict[str, dict[str, int]] = {}
        """Of targets that take adapters: the checksums of what they have got once and for all."""

    def _route(self, target: Mesh, wanted: Layouts, dtype: torch.dtype) -> Route:
        rank = self.context.rank
        if rank not in (*self.source.ranks, *target.ranks):
            plan = ReshardPlan((rank,), ())
        else:
            plan = ReshardPlan.of(rank, self.source, self.held, target, wanted)
        resharder = Resharder.of(plan, rank, self.device, self.context.generation)
        mine = frozenset(name for name, layout in wanted.items() if layout.mesh.has(rank))
        return Route(rank in target.ranks, wanted, resharder, dtype, has_adapters(wanted), mine)

    @transfer(split="all", gather="all")
    def sync(self, target: str, version: int) -> Delivery:
        """Send the policy's weights to a target, of adapters that it takes A and B alone after the first time.
        WeightMismatch names the tensors that arrived changed, or changed since."""
        route, expected, damaged = self.routes[target], dict[str, int](), list[str]()
        receiver: Receiver | None = self.context.roles[target] if route.target else None  # type: ignore[assignment]
        self._share(target, receiver)
        self._bytes = self._taken = 0
        stream = self._stream(target, expected, damaged)
        sends = self.context.rank in self.source.ranks  # ranks of the policy that learn apart then have one model
        with span("publish") as sent, self._policy().gradients.reducer.averaged() if sends else nullcontext():
            if receiver is not None:
                receiver.receive(stream, version)
            for _ in stream:  # what a worker without a receiver has to send
                pass
            sent.set(bytes=self._bytes)
        with span("verify"):
            if damaged:
                raise _mismatch(damaged, target)
            received = len(expected)
            if route.adapters:
                base = {name: value for name, value in expected.items() if not is_adapter(name)}
                expected = self._bases.setdefault(target, base) | expected
            if receiver is not None and receiver.tolerance == 0:
                verify_weights(expected, receiver.fingerprint(), target)
        probe = receiver is not None and receiver.tolerance is None
        shared = len(self._shared.get(target, ()))
        return Delivery(self.context.rank, received, self._bytes, probe, shared, self._taken)

    def _policy(self) -> ShardedModel:
        return self.context.roles["policy"].engine.sharded  # type: ignore[attr-defined]

    def _own(self, names: Iterable[str], *, apart: bool = False) -> Parts:
        """Return this worker's part of these weights of the policy, with adapters merged in unless these go ``apart``;
        a collective call."""
        if self.context.rank not in self.source.ranks:
            return {}
        policy = self._policy()
        if apart or not policy.adapted:
            own: Mapping[str, Tensor] = {n: policy.parameters[n] for n in names if n in policy.parameters}
        else:
            own = merged_parts(policy, list(names))
        return parts_of(own, self.held, self.context.rank)

    def _share(self, target: str, receiver: Receiver | None) -> None:
        """Let the policy's shards lie in the generation weights of an engine, once, where both can use them.

        FSDP keeps its shards in storage of its own, and an engine of another dtype needs converted values: they get
        copies. A policy that is not divided keeps its own storage too.
        """
        engine, rank = receiver, self.context.rank
        divided = self.source.count(*MODEL) > 1 and self.source.size(*self.source.shards) == 1
        if target in self._shared or not isinstance(engine, RolloutWorker) or not divided:
            return
        if rank not in self.source.ranks or not engine.engine.shares:
            return
        if (
            self._policy().adapted or self._policy().gradients.reducer.apart
        ):  # an engine holds what is merged, or a mean
            return
        policy, own = self.context.roles["policy"], self._own(self.held)
        live = parts_of(dict(engine.engine.named_parameters()), self.routes[target].wanted, rank)
        names = share(self._policy().parameters, own, live)
        if names:
            self._shared[target] = {name: live[name] for name in names}
            engine.follow(lambda: policy.engine.updates)  # type: ignore[attr-defined]

    def _stream(self, target: str, expected: dict[str, int], damaged: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield this worker's part of each tensor in the target's dtype.

        ``expected`` gets their checksums, ``damaged`` the names of those that did not arrive as they were sent.
        """
        route = self.routes[target]
        shapes = {name: self.held[name].shape for name in route.wanted if self._due(target, name)}
        for names in buckets(shapes, self.bucket):
            own = self._own(names, apart=route.adapters)
            into = self._room(target, names) if route.target else {}
            self._bytes += route.resharder.fill(into, own, names, route.dtype)
            damaged += route.resharder.damaged(into, own, names, route.dtype)
            for name in names if route.target else ():
                values = into[name].values if name in into else self._nothing(shapes[name], route.dtype)
                if name in route.mine:
                    expected[name] = checksum(values)
                    self._taken += values.nbytes * (not route.adapters or is_adapter(name))
                yield name, values

    def _due(self, target: str, name: str) -> bool:
        """True unless the target has this weight for good."""
        return target not in self._bases or is_adapter(name)

    def _room(self, target: str, names: list[str]) -> dict[str, Part]:
        """Return where the parts of a bucket go: into shared memory, or new tensors."""
        route, shared = self.routes[target], self._shared.get(target, {})
        found = {name: shared[name] for name in names if name in shared}
        fresh = {name: route.wanted[name] for name in names if name not in shared}
        like = torch.empty(0, dtype=route.dtype, device=self.device)
        return found | allocate(fresh, self.context.rank, like)

    def _nothing(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(0, *shape[1:], dtype=dtype, device=self.device)


def verify_weights(expected: Mapping[str, int], received: Mapping[str, int], target: str = "rollout") -> None:
    """Raise WeightMismatch naming the tensors whose checksum in the receiver's live storage is not the policy's."""
    wrong = [name for name in expected if received.get(name) != expected[name]]
    wrong += [name for name in received if name not in expected]
    if wrong:
        raise _mismatch(wrong, target)


def _mismatch(wrong: list[str], target: str) -> WeightMismatch:
    return WeightMismatch(
        f"after the weight sync, {listed(wrong, 3)} in the {ROLES[target].label} differ from the trainer's; the run "
        "stops before it learns from a wrong policy",
        key=wrong[0],
    )
