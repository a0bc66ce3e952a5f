"""Gradients of one rank, summed over all ranks that have others of the same parameters, and what sums them.

Every sum goes through one ``GradientReducer``: FSDP's reduce-scatters, the sums over copies and over ranks with a part
of a gradient, and those of gradients that a pipeline defers. Sums over ranks are checked as far as it promises.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from tilth.config.axes import DATA
from tilth.core.errors import ModelError
from tilth.core.layout import Layout
from tilth.models.decoder import Decoder
from tilth.models.moe import Experts
from tilth.parallel.checksums import GivenSums, GradientDigests, exact_sum
from tilth.parallel.comm import Group, is_dtensor, is_fsdp
from tilth.parallel.deferred import DeferredGradients
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import End, GradientReducer, ReadySums
from tilth.parallel.zero import GradientShards, UpdateShards
from tilth.plan.layout import copied_along

ROUNDINGS = 64
"""Roundings of the norm of all gradients that a sum of them may be off by."""
Partial = Sequence[tuple[Group, Sequence[str]]]


class GradientSums:
    """Sums of the gradients of this rank's parameters over ranks, with their checks."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        grid: ParallelDims,
        own: Mapping[str, nn.Parameter],
        local: Mapping[str, nn.Parameter],
        layouts: Mapping[str, Layout],
        partial: Partial,
        reducer: GradientReducer,
        deferred: DeferredGradients | None,
    ) -> None:
        """own: parameters of the parts; local: this rank's part of each; layouts: of all; partial: parameters whose
        gradients are summed over a further group."""
        self.reducer, self._grid, self._own, self._local, self._partial = reducer, grid, own, local, partial
        self._layouts = layouts
        self._shards: GradientShards | None = None
        self._summed = dict(local)
        """What gets the sums of gradients: of a divided update the part of this rank."""
        self._config, self._deferred = parts[-1].config, deferred
        modules = [module for part in parts for module in part.modules()]
        self._fsdp = [module for module in modules if is_fsdp(module)]
        self._stacked = {p for module in modules if isinstance(module, Experts) for p in module.parameters()}
        self.looks: list[tuple[bool, int]] = [(False, 1), (True, self._experts_every())]
        """(experts only, N): the gradients are checked every N steps."""
        self.given = [given for look in self.looks if (given := self._watched(*look)) is not None]
        self._single = [GradientDigests(self._held_alone(experts), every) for experts, every in self.looks]
        self._changed = ""
        """Names of gradients that changed before they were multiplied."""
        self._ready: ReadySums | None = None
        """Sums over copies that are started beside the last backward pass."""
        self._may_start = False
        self._early = dict[str, Tensor]()
        """Sums of shards of gradients that change afterwards: a further group adds to them, or copies take them."""

    def divide(self, shards: GradientShards) -> None:
        """Sum gradients by parts from now on, those of updates or of all copies, with the checks of other shards."""
        self._shards, self._ready, mesh = shards, shards.ready, self._grid.mesh
        if isinstance(shards, UpdateShards):
            self._summed |= shards.parts
        for kind, group in {bucket.kind: bucket.group for bucket in shards.buckets}.items():
            names = [piece.name for bucket in shards.buckets if bucket.kind == kind for piece in bucket.own]
            (experts, axes), rank = kind, self._grid.rank
            apart, every = [axis for axis in mesh.over(*DATA) if axis not in axes], self.looks[experts][1]
            where = mesh.index(rank, *apart), mesh.size(*apart), every
            shards.given[kind] = GivenSums(group, names, *where, self.reducer.tolerance)
        self.given = [*shards.given.values()]

    def _of_copies(self) -> ReadySums | None:
        """Return the sums of gradients over copies, in buckets, those of the last layers first, which passes leave
        first; None without copies."""
        group = self._grid.group(*self._grid.mesh.copies)
        if group is None or self.reducer.apart or self._shards is not None:
            return None
        by_fsdp = {name for name, p in self._own.items() if is_dtensor(p)} - self._late
        own = {n: p for n, p in self._local.items() if n not in by_fsdp and p.requires_grad and p.numel()}
        names = [*reversed(own)]
        places = [*self.reducer.buckets([own[name] for name in names])]
        some = [[names[i] for i in one] for one in places]

        def start(number: int) -> End:
            bucket = [grad for name in some[number] if (grad := own[name].grad) is not None]
            return self.reducer.start_sum(bucket, group, f"copies.{number}")

        return ReadySums(some, own, start)

    def begin(self, step: int, *, early: bool = False) -> None:
        """Begin a step: forget what was given in the one before. early: sums may start beside the last pass."""
        self.reducer.begin(step)
        self._may_start, self._ready = early, self._ready or self._of_copies()
        if self._ready is not None:
            self._ready.begin()
        self._changed = ""
        for given in self.given:
            given.begin(step)
        for single in self._single:
            single.begin(step)

    def last_pass(self) -> None:
        """Let the backward pass that follows, the last of this step, start sums, if they may start."""
        if self._may_start and self._ready is not None:
            self._ready.open()

    def _experts_every(self) -> int:
        """Return N, where gradients of experts are checked every N steps: a token reaches few of a rank's experts, and
        checking all of them in every step would be too slow."""
        config = self._config
        chosen = self._grid.mesh.count("experts") * config.experts_per_token
        return max(1, round(config.num_experts / chosen)) if chosen else 1

    def _watched(self, experts: bool, every: int) -> GivenSums | None:
        """Record the communications of FSDP, with the sums of gradients that it adds up before they are sent: those of
        experts, which are sent to fewer ranks, or all others."""
        mesh = self._grid.mesh
        shards = mesh.expert_shards if experts else mesh.shards
        peers, apart = self._grid.group(*shards), [axis for axis in mesh.shards if axis not in shards]
        own = {n: p for n, p in self._own.items() if is_dtensor(p) and p.requires_grad}
        names, sums = [n for n, p in own.items() if (p in self._stacked) == experts], None
        if names and peers is not None:
            sums = GivenSums(
                peers, names, mesh.index(self._grid.rank, *apart), mesh.size(*apart), every, self.reducer.tolerance
            )
        if modules := [m for m in self._fsdp if isinstance(m, Experts) == experts]:
            from tilth.parallel.fsdp import watch

            watch(modules, self._grid.group(*mesh.copies), sums, self.reducer, {p: n for n, p in own.items()})
        return sums

    def _held_alone(self, experts: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, of experts or all others, with gradients that no other rank holds, nor FSDP sends,
        where there are several ranks."""
        partial, apart = {name for _, names in self._partial for name in names}, self.reducer.apart
        if len(self._grid.mesh) > 1 and (apart or self._grid.group(*self._grid.mesh.copies) is None):
            for name, p in self._own.items():
                mine = (p in self._stacked) == experts and name not in partial
                alone = apart or not copied_along(self._layouts[name])
                if mine and alone and p.requires_grad and not is_dtensor(p):
                    yield name, p

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum gradients over all data ranks after the backward passes of a step, into those of its local part.

        ModelError if a backward pass has left a gradient with a weight whose gradients are deferred.
        """
        for name, p in self._own.items():
            local = self._local[name]
            if is_dtensor(p) and name in self._late and p.grad is not None:
                raise ModelError(
                    f"{name} has a gradient from a backward pass beside the one that was deferred; a loss may use it "
                    "through its layer alone, or take pp_schedule 1f1b",
                    key=name,
                )
            if is_dtensor(p) and name not in self._late:
                local.grad = p.grad.to_local() if is_dtensor(p.grad) else None
                p.grad = None
            if local.grad is None and local.requires_grad and len(self._grid.mesh) > 1:
                local.grad = torch.zeros_like(local)
        for module in self._fsdp:
            module.reshard()
        self._early = {}
        if isinstance(self._shards, UpdateShards):
            self._shards.scatter()
        elif self._shards is not None:
            self._early = self._shards.sum_up()
        elif self.reducer.apart:
            self._changed = self._changed_alone()  # before the program changes them
            own = [p.grad for p in self._local.values() if p.grad is not None]
            torch._foreach_mul_(own, self._grid.size(*self._grid.mesh.copies))
        elif (ready := self._ready or self._of_copies()) is not None:
            self._ready = ready
            ready.finish()
        partial = {name for _, names in self._partial for name in names}
        further = [n for given in self.given for n in given.names if n in partial and n not in self._early]
        self._early |= {n: self._shard_sum([n]) for n in further}
        for number, (group, names) in enumerate(self._partial):
            grads = [self._summed[name].grad for name in names]
            self.reducer.sum_in_place([grad for grad in grads if grad is not None], group, f"partial.{number}")

    @torch.no_grad()
    def misreduced(self) -> str:
        """Return how this rank's shard of the gradients differs from what all ranks gave for it, or which gradient that
        it alone holds has changed since its backward pass; "" if none does.

        A collective call of the data ranks after ``reduce``. It sees sums: a difference below the rounding of the
        whole gradient stays unseen, and one that is not finite is the business of the gradient's norm.
        """
        changed = self._changed or self._changed_alone()
        wrong = f"that of {changed} has other bits than the backward pass has left" if changed else ""
        if self._late or not any(given.looks for given in self.given):
            return wrong
        placed = [given.placed() for given in self.given]
        found = self._grid.sum(torch.cat(placed), *DATA).split([len(one) for one in placed])
        for given, sums in zip(self.given, found):
            if wrong or given.sums is None:  # this step has no look at them
                continue
            late = [n for n in given.names if n not in self._early]
            parts = [self._early[n] for n in given.names if n in self._early]
            parts += [self._shard_sum(late)] if late else []
            shard, (gave, scale) = float(torch.stack(parts).sum()) if parts else 0.0, given.own(sums)
            count = sum(self._summed[name].numel() for name in given.names)
            limit = (ROUNDINGS + math.sqrt(count) / 8) * scale
            if abs(shard - gave) > limit and math.isfinite(shard - gave):
                explained = f"rounding explains {limit:.2g}"
                wrong = f"the shard's sum is {shard:.9g}, all ranks gave {gave:.9g} for it; {explained}"
        return wrong

    def _changed_alone(self) -> str:
        """Return the names of gradients that this rank alone holds and that are not as backward passes left them."""
        return " and ".join(filter(None, [single.changed() for single in self._single]))

    def _shard_sum(self, names: Sequence[str]) -> Tensor:
        grads = [grad for name in names if (grad := self._summed[name].grad) is not None]
        assert len(grads) == len(names)  # since ``reduce``
        return exact_sum(grads)

    @property
    def _late(self) -> Set[str]:
        """Parameters whose gradients backward passes leave to be computed."""
        return frozenset() if self._deferred is None else self._deferred.names
