"""Local methods: data ranks learn apart, and bring their models together less often or in parts.

The optimizer of rank i steps with n times its own gradient, of n ranks, so that the mean of the models follows the sum
of all gradients. Between two syncs ranks have models of their own; what they have alike is declared by ``equal``. One
rank alone takes the plain optimizer's steps, with its bits: a run may shrink to it, and grow again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilth.config.open_sets import LOCAL_METHODS, WEIGHT_CODES
from tilth.config.roles import resolve
from tilth.config.schema import CommConfig
from tilth.core.layout import Layout
from tilth.core.random import stream
from tilth.parallel.comm import Group
from tilth.parallel.compress import checked, compressor_of
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import GradientReducer
from tilth.parallel.sync import CompressedReducer, TwoLevelReducer, TwoLevels, by_rank
from tilth.plan.rules import Table, rule_of

LOCAL, SHARED = "local.", "shared."
"""Prefixes of tensors of the state: the model of one rank, and what all ranks have of it."""


class Averaging(GradientReducer):
    """Local SGD, or another optimizer: all ranks average their models every H steps (arXiv 1805.09767).

    State of the optimizer stays with its rank.
    """

    apart = True

    def __init__(self, every: int = 1, smallest: int = 65_536, seed: int = 0) -> None:
        """every: H; smallest: elements of a tensor that travels in parts; seed: of random numbers."""
        self.every, self.smallest, self.seed = every, smallest, seed
        self.step = 0
        """Steps of all ranks so far, those left out included."""
        self._ranks = 1
        self._group: Group | None = None
        self._restores = False
        self._own, self._kept = dict[str, Tensor](), dict[str, Tensor]()
        self._held: Mapping[str, Layout] = {}
        self._rows: Mapping[str, Layout] = {}

    def bind(
        self,
        grid: ParallelDims,
        given: Mapping[str, Layout],
        updates: Mapping[str, Layout],
        table: Table,
        own: Mapping[str, Tensor],
    ) -> None:
        copies = grid.mesh.copies
        self._group, self._ranks, self._own = grid.group(*copies), grid.size(*copies), dict(own)
        self._held, self._rows = given, {name: by_rank(layout) for name, layout in given.items()}

    @property
    def alone(self) -> bool:
        """True for one rank, whose model is that of all; not while it reads those of several."""
        return self._group is None and not self._restores

    @contextmanager
    def restoring(self) -> Iterator[None]:
        self._restores = True
        try:
            yield
        finally:
            self._restores = False

    @property
    def synced(self) -> bool:
        """True between a sync of the models and the next step."""
        return self.alone or self.step % self.every == 0

    def equal(self, name: str) -> bool:
        return self.synced or name not in self._held

    def state(self) -> Mapping[str, Tensor]:
        own = {name: self._kept.get(name, p) for name, p in self._own.items() if not self.equal(name)}
        return {LOCAL + name: p.detach()[None] for name, p in own.items()}

    def layouts(self) -> Mapping[str, Layout]:
        return {LOCAL + name: layout for name, layout in self._rows.items() if not self.equal(name)}

    def divided(self, rows: Tensor, ranks: int) -> Tensor:
        return rows.mean(0)

    def begin(self, step: int) -> None:
        self.step = step

    @torch.no_grad()
    def settle(self, learned: bool) -> None:
        self.step += 1
        if self.synced and not self.alone:
            self.sync()

    def sync(self) -> None:
        """Average models at the end of a period."""
        self.mean(list(self._own.values()))

    def mean(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over all ranks; the same bits on each."""
        self.sum_in_place(tensors, self._group, "models")
        if tensors and self._group is not None:
            torch._foreach_div_(tensors, self._ranks)

    @torch.no_grad()
    def restart(self) -> None:
        self.mean(list(self._own.values()))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with torch.no_grad():
            self._kept = {name: p.clone() for name, p in self._own.items() if not self.equal(name)}
            self.mean([self._own[name] for name in self._kept])
        try:
            yield
        finally:
            kept, self._kept = self._kept, {}
            with torch.no_grad():
                for name, p in kept.items():
                    self._own[name].copy_(p)


class ErrorReset(Averaging):
    """CSER: partial averages with error reset (arXiv 2007.13221).

    Rank i has x_i = z + e_i with z of all ranks. A step of its optimizer moves x_i by -p_i. Of each tensor all ranks
    draw the same block: there x_i and z move by -mean p, elsewhere x_i by -p_i, which e_i takes up. Every H steps, in
    another block, x_i = z = mean x. Norms, biases, routers and small tensors are no blocks: they are averaged in each
    step. Relative to gradients, 1 / changes + 1 / (H models) of the elements travel.
    """

    def __init__(
        self, every: int = 1, smallest: int = 65_536, seed: int = 0, *, changes: int = 16, models: int = 2
    ) -> None:
        """changes: one block of this number is averaged in each step; 1: gradients are summed, and ranks are never
        apart; 0: nothing is averaged between resets. models: one block of this number is reset every H steps."""
        super().__init__(every, smallest, seed)
        self.changes = checked("changes", changes, changes >= 0, "0 or more")
        self.models = checked("models", models, models > 0, "1 or more")
        self.apart = changes != 1
        self._places, self._shared = dict[str, int](), dict[str, Tensor]()
        self._before = dict[str, Tensor]()
        """Blocks before the optimizer's step."""

    def bind(
        self,
        grid: ParallelDims,
        given: Mapping[str, Layout],
        updates: Mapping[str, Layout],
        table: Table,
        own: Mapping[str, Tensor],
    ) -> None:
        super().bind(grid, given, updates, table, own)
        kinds = {name: rule_of(table, name).kind for name in given}
        large = [name for name, layout in given.items() if math.prod(layout.shape) >= self.smallest]
        self._large = {name for name in large if kinds[name] in ("matrix", "embedding")}
        self._places = {name: i for i, name in enumerate(given if self.changes == 0 else sorted(self._large))}
        """Tensors that ranks do not have alike, those of other stages included: their order in the draw of blocks."""
        if not self.alone:
            self._shared = {name: own[name].detach().clone() for name in self._places if name in own}

    def equal(self, name: str) -> bool:
        return self.alone or name not in self._places

    def state(self) -> Mapping[str, Tensor]:
        return {**super().state(), **{SHARED + name: z for name, z in self._shared.items()}}

    def layouts(self) -> Mapping[str, Layout]:
        shared = {} if self.alone else {SHARED + name: self._held[name] for name in self._places}
        return {**super().layouts(), **shared}

    def blocks(self, way: str, parts: int) -> dict[str, slice]:
        """Return the elements of each tensor of this rank that all ranks average now."""
        drawn = stream(self.seed, way, self.step).integers(0, len(self._places), max(1, parts)).tolist()
        found = dict[str, slice]()
        for name in (name for name in self._places if name in self._own):
            of, count = parts if name in self._large else min(parts, 1), self._own[name].numel() if parts else 0
            at = drawn[self._places[name]] % max(1, of)
            found[name] = slice(count * at // max(1, of), count * (at + 1) // max(1, of))
        return found

    def _parts(self, tensors: Mapping[str, Tensor], blocks: Mapping[str, slice]) -> dict[str, Tensor]:
        """Return views of these blocks."""
        return {name: tensors[name].detach().view(-1)[block] for name, block in blocks.items()}

    def prepare(self) -> None:
        if self._group is None:  # the optimizer's steps stay as they are, and there is nothing that others have
            return
        self._blocks = self.blocks("changes", self.changes)
        whole = {name: slice(None) for name in self._own if name not in self._places}
        self._before = {name: x.clone() for name, x in self._parts(self._own, self._blocks | whole).items()}

    @torch.no_grad()
    def settle(self, learned: bool) -> None:
        before, self._before = self._before, {}
        if learned and self._group is not None:
            whole = {name: slice(None) for name in before}
            now = self._parts(self._own, whole | self._blocks)
            moved = {name: x - now[name] for name, x in before.items()}
            self.mean(list(moved.values()))
            for name, z in self._parts(self._shared, self._blocks).items():
                z.sub_(moved[name])
            for name, x in now.items():
                x.copy_(before[name] - moved[name])
        super().settle(learned)

    def sync(self) -> None:
        blocks = self.blocks("models", self.models)
        own = self._parts(self._own, blocks)
        self.mean(list(own.values()))
        for name, z in self._parts(self._shared, blocks).items():
            z.copy_(own[name])

    @torch.no_grad()
    def restart(self) -> None:
        super().restart()
        for name, z in self._shared.items():
            z.copy_(self._own[name])


class LocalAdaAlter(Averaging):
    """Local AdaAlter: models and the optimizer's sums of squares are averaged every H steps (arXiv 1911.09030).

    The optimizer counts its steps, so a period has H that were not left out. It has ``every`` = H, and names in
    ``averaged`` the kinds of its state that are averaged, and in ``common`` those that are equal on all ranks, and are
    the others at the end of a period. One rank alone knows all squares: its period is 1.
    """

    def __init__(self, every: int = 1, smallest: int = 65_536, seed: int = 0) -> None:
        super().__init__(every, smallest, seed)
        self._more, self._common, self._count, self._done = list[Tensor](), list[Tensor](), torch.zeros(()), 0

    def follow(self, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Tensor]) -> None:
        (optimizer,) = optimizers
        optimizer.every = 1 if self._group is None else self.every  # type: ignore[attr-defined]
        self.common, averaged = optimizer.common, optimizer.averaged  # type: ignore[attr-defined]
        self._more, self._common = (
            [tensor for name, tensor in state.items() if name.partition(".")[0] in kinds]
            for kinds in (averaged, self.common)
        )
        self._count = next(tensor for name, tensor in state.items() if name.startswith("step."))

    @property
    def synced(self) -> bool:
        return self.alone or self._done % self.every == 0

    def begin(self, step: int) -> None:
        super().begin(step)
        self._done = int(self._count)

    @torch.no_grad()
    def settle(self, learned: bool) -> None:
        self.step, self._done = self.step + 1, self._done + learned
        if learned and self._group is None:
            torch._foreach_copy_(self._common, self._more)  # that further ranks would go on with
        elif learned and self.synced:
            self.mean([*self._own.values(), *self._more])

    @torch.no_grad()
    def restart(self) -> None:
        super().restart()
        self._done = int(self._count)


def local_method(comm: CommConfig, seed: int) -> GradientReducer:
    """Return the local method of ``policy.comm.local``. RecipeError: an option is wrong."""
    made: GradientReducer = resolve(LOCAL_METHODS[comm.local])(comm.every, comm.smallest, seed, **comm.options)
    return made


def reducer_of(comm: CommConfig, seed: int) -> GradientReducer:
    """Return what sums gradients by the keys of ``policy.comm``. RecipeError, PluginError: see ``compressor_of``."""
    made = _made(comm, seed)
    made.bucket_bytes = comm.bucket_bytes
    return made


def _made(comm: CommConfig, seed: int) -> GradientReducer:
    if comm.exact:
        return GradientReducer()
    if comm.local != "none":
        return local_method(comm, seed)
    weights = None if comm.weights == "exact" else resolve(WEIGHT_CODES[comm.weights])()
    how: dict[str, Any] = {"weights": weights, "smallest": comm.smallest, "seed": seed}
    made = None if comm.gradients == "exact" else compressor_of(comm.gradients, comm.options)
    if isinstance(made, TwoLevels):
        return TwoLevelReducer(made, node_size=comm.node_size, **how)
    return CompressedReducer(made, feedback=comm.residual, two_way=comm.two_way, **how)
