"""Compressed sums of gradients with error feedback (BytePS-Compress, arXiv 2105.07829).

Each rank sums a part of the gradients. For the part of rank r, rank i sends d_i = C(g_i + e_i) and keeps the residual
e_i' = g_i + e_i - d_i; rank r has s = sum_i d_i. Copies then gather all s, or with two ways D = C(s + E), and rank r
keeps E' = s + E - D. So over steps the sums of what was applied, of all e and of E are those of the gradients: nothing
is lost. Every rank applies the same bytes, the one that sent them too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.config.open_sets import COMPRESSORS
from tilth.config.schema import CommConfig
from tilth.core.errors import PluginError
from tilth.core.layout import Layout, Placement, Shard
from tilth.core.random import Stream, stream
from tilth.parallel.comm import Group, all_gather, all_to_all, reduce_scatter
from tilth.parallel.compress import Compressor, compressor_of
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import GradientReducer, Piece, Pieces, split
from tilth.plan.layout import copied_along
from tilth.plan.rules import Table, rule_of

GIVEN, SUMS = "residual.", "sum_residual."
"""Prefixes of tensors of the state: what this rank left out of its gradients, and of the sums that it sent."""


SUM = -1
"""Sender of a sum, in place of a rank of the group."""


class CodeForm(NamedTuple):
    """Elements and dtype of the codes of so many values, and the factor on what they stand for."""

    length: int
    dtype: torch.dtype
    factor: float


def by_rank(layout: Layout) -> Layout:
    """Return the layout of tensors like a parameter, of which each data rank has one of its own: [ranks, ...].

    layout: with copies on all data ranks.
    """
    axes, placements = copied_along(layout), list[Placement]()
    for name, own in zip(layout.mesh.names, layout.placements):
        moved = replace(own, dim=own.dim + 1) if isinstance(own, Shard) else own
        placements.append(Shard(0) if name in axes else moved)
    return replace(layout, placements=tuple(placements), shape=(layout.mesh.size(*axes), *layout.shape))


class CompressedReducer(GradientReducer):
    """Sums of compressed gradients. Norms, biases, routers, small tensors and gradients of which further ranks have
    parts travel as they are."""

    by_parts = True

    def __init__(
        self,
        compressor: Compressor,
        *,
        feedback: bool = True,
        two_way: bool = False,
        smallest: int = 65_536,
        seed: int = 0,
    ) -> None:
        """smallest: elements of a tensor; seed: of random numbers."""
        self.compressor, self.two_way, self.smallest, self.seed = compressor, two_way, smallest, seed
        self.feedback = feedback
        self._layouts = dict[str, Layout]()
        self._state = dict[str, Tensor]()
        self._next = dict[str, Tensor]()
        """State after this step, if it is learned."""
        self._sent = dict[str, tuple[Pieces, list[Tensor]]]()
        """Key of a sum -> codes for each rank."""
        self._coded = frozenset[str]()
        self._step = 0
        self._form = cache(self._form_of)

    # Which gradients, and what is left out of them

    def bind(
        self,
        grid: ParallelDims,
        given: Mapping[str, Layout],
        updates: Mapping[str, Layout],
        table: Table,
        own: Mapping[str, Tensor],
    ) -> None:
        self._coded = frozenset(name for name, layout in given.items() if self._codes(name, layout, table))
        for name in (name for name in given if name in self._coded and self.feedback):
            self._layouts[GIVEN + name] = by_rank(given[name])
            if self.two_way:
                self._layouts[SUMS + name] = updates[name]
        for name, layout in self._layouts.items():
            if layout.mesh.has(grid.rank):
                size = [box.size for box in layout.boxes(grid.rank)] or [(0, *layout.shape[1:])]
                self._state[name] = own[name.partition(".")[2]].new_zeros(size[0])

    def _codes(self, name: str, layout: Layout, table: Table) -> bool:
        """True for a matrix of which ranks have nothing but parts and copies: not a part of its gradient."""
        whole = all(getattr(own, "copies", 1) == 1 for own in layout.placements) and layout.mesh.count("layers") == 1
        large = math.prod(layout.shape) >= self.smallest
        return whole and large and rule_of(table, name).kind in ("matrix", "embedding") and bool(copied_along(layout))

    def state(self) -> Mapping[str, Tensor]:
        return self._state

    def layouts(self) -> Mapping[str, Layout]:
        return self._layouts

    def begin(self, step: int) -> None:
        self._step = step
        self._next.clear()
        self._sent.clear()

    def settle(self, learned: bool) -> None:
        if learned:
            self._state |= self._next
        self._next = {}

    # Sums

    @torch.no_grad()
    def code(self, whole: Tensor, group: Group, key: str, pieces: Pieces) -> None:
        rows, sender = whole.view(len(pieces), -1), group.rank()
        self._sent[key] = pieces, [self._pack(*of, r, sender) for r, of in enumerate(zip(rows, pieces))]

    @torch.no_grad()
    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group, key: str) -> None:
        if key not in self._sent:  # of gradients that are never coded
            return super().reduce_scatter(out, whole, group, key)
        (pieces, codes), place, ranks = self._sent.pop(key), group.rank(), group.size()
        out.zero_()
        if self.compressor.summable:
            summed = codes[0].new_empty(max(map(len, codes)))
            reduce_scatter(summed, torch.cat([F.pad(code, (0, len(summed) - len(code))) for code in codes]), group)
            return self._unpack(out, summed, pieces[place], place, 0)
        sizes, count = [len(code) for code in codes], len(codes[place])
        received = codes[0].new_empty(ranks * count)
        all_to_all(received, torch.cat(codes), [count] * ranks, sizes, group).wait()
        for sender, code in enumerate(received.split(count)):
            self._unpack(out, code, pieces[place], place, sender)

    @torch.no_grad()
    def all_gather(self, out: Tensor, own: Tensor, group: Group, key: str, pieces: Pieces) -> None:
        if not self.two_way:
            return super().all_gather(out, own, group, key, pieces)
        code = self._pack(own, pieces[group.rank()], group.rank(), SUM)
        length = max(self._row_length(of, own.dtype) for of in pieces)
        every = code.new_empty(len(pieces) * length)
        all_gather(every, F.pad(code, (0, length - len(code))), group)
        for r, (row, found) in enumerate(zip(out.zero_().view(len(pieces), -1), every.split(length))):
            self._unpack(row, found, pieces[r], r, SUM)

    # Code of a row: 0, or NaN if an element is not finite; then one piece after the other

    def _pack(self, row: Tensor, pieces: Sequence[Piece], owner: int, sender: int) -> Tensor:
        """Return the code of a row [n] of pieces, and change the row to what it stands for."""
        found = [self._to_wire(row.sum()[None] * 0)]
        for part, piece in split(row, pieces):
            if not self._is_coded(piece):
                found.append(self._to_wire(part))
                continue
            left, random = self._left(piece, sender), self._random(piece, owner, sender)
            wanted = part + left.flatten() if left is not None else part.clone()
            code, form = self.compressor.encode(wanted.float(), random), self._form(piece.numel)
            if (code.numel(), code.dtype) != form[:2]:
                raise self._uneven(code, form)
            part.copy_(self._decoded(code, piece, random))
            if left is not None:
                self._after(piece, sender).copy_((wanted - part).view(left.shape))
            found.append(self._to_wire(code.to(row.dtype) if self.compressor.summable else code))
        return torch.cat(found)

    def _unpack(self, out: Tensor, code: Tensor, pieces: Sequence[Piece], owner: int, sender: int) -> None:
        """Add to a row [n] what a code stands for."""
        at = self._length(1, out.dtype)
        out += self._from_wire(code[:at], out.dtype)
        for part, piece in split(out, pieces):
            length = self._piece_length(piece, out.dtype)
            own, at = code[at : at + length], at + length
            if self._is_coded(piece):
                own = self._from_wire(own, self._form(piece.numel).dtype)
                part += self._decoded(own, piece, self._random(piece, owner, sender)).to(out.dtype)
            else:
                part += self._from_wire(own, out.dtype)

    def _is_coded(self, piece: Piece) -> bool:
        return piece.numel > 0 and piece.name in self._coded

    def _decoded(self, code: Tensor, piece: Piece, random: Stream) -> Tensor:
        return self.compressor.decode(code, piece.numel, random) * self._form(piece.numel).factor

    def _left(self, piece: Piece, sender: int) -> Tensor | None:
        """Return what earlier steps left out of a piece; None without feedback."""
        if sender == SUM:
            return self._state.get(SUMS + piece.name)
        whole = self._state.get(GIVEN + piece.name)
        return None if whole is None else whole[0][piece.slices]

    def _after(self, piece: Piece, sender: int) -> Tensor:
        """Return where this step puts what it leaves out of a piece."""
        name = (SUMS if sender == SUM else GIVEN) + piece.name
        whole = self._next.setdefault(name, torch.empty_like(self._state[name]))
        return whole if sender == SUM else whole[0][piece.slices]

    def _random(self, piece: Piece, owner: int, sender: int) -> Stream:
        """Return the random numbers of a sender for a piece in this step; those of codes that are summed are alike.

        They are equal along all other axes, where ranks with the same gradients must round alike."""
        who = SUM if self.compressor.summable else sender
        return stream(self.seed, "comm", self._step, owner, who, piece.name)

    # Bytes; of a compressor whose codes are summed, elements

    def _to_wire(self, x: Tensor) -> Tensor:
        return x if self.compressor.summable else x.contiguous().view(torch.uint8)

    def _from_wire(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        return code if self.compressor.summable else code.clone().view(dtype)  # clone: at any address

    def _length(self, count: int, dtype: torch.dtype) -> int:
        return count if self.compressor.summable else count * dtype.itemsize

    def _piece_length(self, piece: Piece, dtype: torch.dtype) -> int:
        if not self._is_coded(piece):
            return self._length(piece.numel, dtype)
        form = self._form(piece.numel)
        return self._length(form.length, form.dtype)

    def _row_length(self, pieces: Sequence[Piece], dtype: torch.dtype) -> int:
        return self._length(1, dtype) + sum(self._piece_length(piece, dtype) for piece in pieces if piece.name)

    def _form_of(self, count: int) -> CodeForm:
        code = self.compressor.encode(torch.zeros(count), stream(0, "form"))
        shrinks = self.feedback and self.compressor.unbiased
        return CodeForm(code.numel(), code.dtype, self.compressor.delta(count) if shrinks else 1.0)

    def _uneven(self, code: Tensor, form: CodeForm) -> PluginError:
        name = type(self.compressor).__name__
        there, right = f"{code.numel()} {code.dtype}", "both must depend on the number of values alone"
        message = f"compressor {name}: a code of {there}, where that of zeros has {form.length} {form.dtype}; {right}"
        return PluginError(message, key=f"compressor.{name}.encode")


def reducer_of(comm: CommConfig, seed: int) -> GradientReducer:
    """Return what sums gradients by the keys of ``policy.comm``. RecipeError, PluginError: see ``compressor_of``."""
    feedback = comm.feedback and "residual" in COMPRESSORS[comm.gradients].state
    made = compressor_of(comm.gradients, comm.options)
    return CompressedReducer(made, feedback=feedback, two_way=comm.two_way, smallest=comm.smallest, seed=seed)
