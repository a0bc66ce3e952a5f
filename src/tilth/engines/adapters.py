"""Adapters of requests: many low-rank changes of one base, each for its own rows of a pass.

Rows of an adapter are gathered, and the adapters of a pass are stacked: two batched products per layer, whatever their
number, and no other row is touched; those of experts are applied expert by expert. Ranks are padded to a multiple of 8
and stacked with their like, so that the ranks of others change no bit; nor do their rows, in parity mode.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilth.config.schema import LoraConfig
from tilth.core.device import to_device
from tilth.core.errors import DataError, ModelError, RecipeError
from tilth.models.lora import LinearChange
from tilth.models.moe import ExpertContext, MoE, Routing, RunExperts, combine_pairs, gather_pairs, sort_by_expert
from tilth.models.peft import check_adapter
from tilth.models.steady import linear, stacked_linear
from tilth.parallel.sharded import ShardedModel
from tilth.plan.kernels import round_up
from tilth.plan.lora import adapter_rows, blocks_of, pair_of, scale_of, weight_of
from tilth.plan.shape import sized_names

RANKS = 8
"""Ranks are padded to a multiple of this."""
Halves = Mapping[str, tuple[Tensor, Tensor]]
"""Module -> A [rank, in] and B [out, rank], or stacks of them, [adapters, ...]; B with the scale."""


class LoadedAdapter:
    """An adapter that requests may name; those in flight keep it alive."""

    def __init__(self, serial: int, rank: int, halves: Halves, experts: Halves) -> None:
        """serial: distinct for each content that an engine has held, whatever its name; rank: padded; experts: stacks
        of all experts, [experts, ...]."""
        self.serial, self.rank, self.halves, self.experts = serial, rank, halves, experts

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors on this rank."""
        return sum(a.nbytes + b.nbytes for a, b in (*self.halves.values(), *self.experts.values()))


def salt_of(version: int, adapter: LoadedAdapter | None) -> int:
    """Return the salt of the prefix cache: a hash of the version of the weights and the adapter."""
    return version + ((adapter.serial if adapter else 0) << 32)


class _RowGroup(NamedTuple):
    """Rows of one pass whose adapters have one padded rank."""

    stacks: Halves
    source: Tensor
    """int64 [adapters * rows]: row of x; fillers take row 0."""
    real: Tensor | None
    """Places in ``source`` without fillers; None: there are none."""
    rows: Tensor
    """Row of x of each such place."""

    def add_(self, path: str, found: Tensor, x: Tensor) -> None:
        """Add the change of one layer to its result [N, out] of x [N, in]."""
        if path not in self.stacks:
            return
        a, b = self.stacks[path]
        inner = stacked_linear(x.index_select(0, self.source).view(len(a), -1, x.shape[1]), a)
        change = stacked_linear(inner, b).flatten(0, 1)
        found.index_add_(0, self.rows, change if self.real is None else change.index_select(0, self.real))


class _RowChange(LinearChange):
    """Change of a layer by the adapters of the rows of the pass that runs."""

    def __init__(self, bank: "AdapterBank", path: str) -> None:
        super().__init__()
        self._bank, self._path = bank, path

    def changed(self, product: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = product(x, weight, bias)
        self.add_(found, x)
        return found

    def add_(self, found: Tensor, x: Tensor) -> None:
        for group in self._bank.groups:
            group.add_(self._path, found, x)


class _ExpertChange(nn.Module):
    """Change of the layers of all experts by the adapters of the rows of the pass that runs."""

    merges = False

    def __init__(self, bank: "AdapterBank", path: str) -> None:
        super().__init__()
        self._bank, self._path = bank, path

    def of_experts(self, layers: Sequence[Callable[[Tensor], Tensor]]) -> list[Callable[[Tensor], Tensor]]:
        """Return the changed layers; see ``models.lora.Adapter``."""
        return [partial(self._changed, layer, expert) for expert, layer in enumerate(layers)]

    def grouped(self, found: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """Return the changed result for rows sorted by expert; see ``models.lora.Adapter``."""
        for expert, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
            self._bank.add_of_expert_(self._path, expert, found[begin:end], x[begin:end])
        return found

    def _changed(self, layer: Callable[[Tensor], Tensor], expert: int, x: Tensor) -> Tensor:
        found = layer(x)
        self._bank.add_of_expert_(self._path, expert, found, x)
        return found


class AdapterBank:
    """Adapters by name, beside the weights of one engine."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded, self._sends = sharded, False
        self._modules: dict[str, nn.Module] = dict(sharded.model.named_modules())
        self._held: dict[str, LoadedAdapter] = {}
        self._serials = itertools.count(1)
        self._stacks: dict[tuple[int, ...], Halves] = {}
        self._used: set[tuple[int, ...]] = set()
        self.groups: Sequence[_RowGroup] = ()
        """Of the pass that runs."""
        self._owners: list[LoadedAdapter] = []
        """Adapters of experts in the pass that runs."""
        self._owner = torch.zeros(0, dtype=torch.int64)
        """Number among these of each row of the pass, int64; -1: none."""
        self._sorted: Sequence[Tensor] = ()
        """The same of the rows of each expert, in the layer that runs."""

    @property
    def names(self) -> list[str]:
        """Names that requests may use."""
        return list(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters by name, and of the stacks of the last passes."""
        stacks = [half for stack in self._stacks.values() for pair in stack.values() for half in pair]
        return sum(own.nbytes for own in self._held.values()) + sum(half.nbytes for half in stacks)

    def find(self, name: str, what: str) -> LoadedAdapter | None:
        """Return an adapter, None for the empty name. DataError for an unknown one; what: who names it."""
        if name and name not in self._held:
            there = ", ".join(self._held) or "none"
            message = f"{what}: there is no adapter {name!r}; there are: {there}"
            raise DataError(message, key="request.adapter")
        return self._held[name] if name else None

    def remove(self, name: str) -> None:
        """Forget a name. DataError if it is unknown."""
        if not name:
            raise DataError("the adapter to remove has no name", key="adapter.name")
        self.find(name, "the adapter to remove")
        del self._held[name]

    @torch.no_grad()
    def load(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Hold copies of the tensors under a name; see ``GenerationEngine.load_adapter``."""
        if not name:
            raise DataError("an adapter has no name; give it one", key="adapter.name")
        self._check(name, lora, tensors)
        rank, scale, halves = round_up(lora.rank, RANKS), scale_of(lora), dict[str, tuple[Tensor, Tensor]]()
        experts = dict[str, tuple[Tensor, Tensor]]()
        for weight in dict.fromkeys(map(weight_of, tensors)):
            for box in self._sharded.boxes(weight):
                here = self._sharded.parameters[weight]
                of_a, of_b = blocks_of(box.slices, lora.rank)
                a, b = (tensors[half].detach() for half in pair_of(weight))
                wide = (0, rank - lora.rank)
                a, b = F.pad(a[of_a], (0, 0, *wide)), F.pad(b[of_b].float() * scale, wide)
                own = halves if a.ndim == 2 else experts
                own[weight.removesuffix(".weight")] = (_copy(a, here), _copy(b, here))
        for path in (*halves, *experts):
            if self._modules[path].lora is None:
                self._modules[path].lora = (_RowChange if path in halves else _ExpertChange)(self, path)
        if experts and not self._sends:
            self._sends = True
            for block in (one for one in self._modules.values() if isinstance(one, MoE)):
                block.register_forward_pre_hook(self._sending)
        self._held[name] = LoadedAdapter(next(self._serials), rank, halves, experts)

    def _check(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Raise ModelError for an adapter that this engine's model cannot use."""
        config, what = self._sharded.model.config, f"adapter {name!r}"
        if not lora.rank:
            raise ModelError(f"{what} has rank 0; the least is 1", key="adapter.rank")
        try:
            wanted = sized_names(config, adapter_rows(config.table, lora, "targets"))
        except RecipeError as error:
            raise ModelError(f"{what}: {error}: an adapter of another base", key="adapter.targets") from error
        check_adapter(what, tensors, wanted)
        for half, tensor in tensors.items():
            weight = weight_of(half)
            parent = self._modules[weight.rpartition(".")[0].rpartition(".")[0]]
            if tensor.ndim != 2 and self._sharded.parameters[weight].shape != self._sharded.layouts[weight].shape:
                message = f"{what}: {weight} is of experts, which several ranks divide; serve it merged, or on one rank"
                raise ModelError(message, key=f"{weight}.experts")
            if weight.endswith("kv_b_proj.weight") and getattr(parent, "latent", False):
                message = f"{what}: {weight} is part of attention to latents; serve it merged, or with parity"
                raise ModelError(message, key=f"{weight}.latent")
            if not tensor.isfinite().all():
                raise ModelError(f"{what}: {half} is not finite", key=f"{half}.finite")

    # A pass

    @contextmanager
    def serving(self, owners: Sequence[LoadedAdapter | None], width: int) -> Iterator[bool]:
        """Change rows of the passes within by their adapters: ``width`` rows for each owner. Yields False if no row has
        one."""
        self.groups = self._grouped(owners, width) if any(owners) else ()
        self._owners = list(dict.fromkeys(own for own in owners if own is not None and own.experts))
        if self._owners:
            numbers = [self._owners.index(own) if own in self._owners else -1 for own in owners]
            self._owner = torch.tensor(numbers).repeat_interleave(width).to(self._sharded.device)
        try:
            yield bool(self.groups)
        finally:
            self.groups, self._owners = (), []

    def _sending(self, block: nn.Module, arguments: tuple[Tensor, ExpertContext | None]) -> Any:
        """Note whose rows each expert of a block gets, where rows have adapters of experts."""
        x, ctx = arguments
        return (x, replace(ctx or ExpertContext(), dispatch=self._dispatch)) if self._owners else None

    def _dispatch(self, x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
        """``models.moe.dispatch_here``, which notes the rows."""
        order, place, counts = sort_by_expert(routing, experts)
        owner = F.pad(self._owner, (0, len(x) - len(self._owner)), value=-1)  # rows of parity mode
        self._sorted = owner[order // routing.experts.shape[1]].split(counts.tolist())
        return combine_pairs(run(gather_pairs(x, routing, order, place), counts), routing, order, place)

    def add_of_expert_(self, path: str, expert: int, found: Tensor, x: Tensor) -> None:
        """Add the changes of one expert's layer to its result [n, out] of x [n, in], which may have fillers behind."""
        for number, own in enumerate(self._owners):
            rows = torch.nonzero(self._sorted[expert] == number).flatten()
            if path not in own.experts or not len(rows):
                continue
            a, b = (half[expert] for half in own.experts[path])
            found.index_add_(0, rows, linear(linear(x.index_select(0, rows), a, None), b, None))

    def _grouped(self, owners: Sequence[LoadedAdapter | None], width: int) -> list[_RowGroup]:
        rows = dict[LoadedAdapter, list[int]]()
        for place, owner in enumerate(owners):
            if owner is not None:
                rows.setdefault(owner, []).extend(range(place * width, (place + 1) * width))
        alike = dict[int, list[LoadedAdapter]]()
        for owner in sorted(rows, key=lambda own: own.serial):
            alike.setdefault(owner.rank, []).append(owner)
        return [self._group(those, [rows[own] for own in those]) for those in alike.values()]

    def _group(self, adapters: Sequence[LoadedAdapter], rows: Sequence[Sequence[int]]) -> _RowGroup:
        most = max(map(len, rows))
        source = np.zeros((len(adapters), most), np.int64)
        for own, some in zip(source, rows):
            own[: len(some)] = some
        real = np.flatnonzero(np.arange(most) < np.array([[len(some)] for some in rows]))
        every, some_places = to_device([source.ravel(), real], self._sharded.device)
        places = None if len(real) == source.size else some_places
        return _RowGroup(self._stacked(adapters), every, places, every if places is None else every[places])

    def _stacked(self, adapters: Sequence[LoadedAdapter]) -> Halves:
        """Return the stacks of some adapters of one rank; an adapter without a layer has zeros there."""
        if len(adapters) == 1:
            return {path: (a[None], b[None]) for path, (a, b) in adapters[0].halves.items()}
        key = tuple(own.serial for own in adapters)
        self._used.add(key)
        if key not in self._stacks:
            zeros = {
                path: (torch.zeros_like(a), torch.zeros_like(b))
                for own in adapters
                for path, (a, b) in own.halves.items()
            }
            self._stacks[key] = {
                path: (torch.stack(a), torch.stack(b))
                for path, none in zeros.items()
                for a, b in [zip(*(own.halves.get(path, none) for own in adapters))]
            }
        return self._stacks[key]

    def forget_stacks(self) -> None:
        """Drop the stacks that no pass has used since the last call."""
        self._stacks = {key: stack for key, stack in self._stacks.items() if key in self._used}
        self._used = set()


def _copy(half: Tensor, weight: Tensor) -> Tensor:
    """Return a copy of its own, on the device and in the dtype of its weight."""
    return half.to(weight.device, weight.dtype, copy=True).contiguous()
