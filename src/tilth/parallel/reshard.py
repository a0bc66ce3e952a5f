"""Resharding between ranks: boxes of parameters travel by a plan, and weights go from training to generation.

A rank receives what it lacks of its generation shard, of which its training shard is a part, in the same memory (the
zero-redundancy transition of HybridFlow, arXiv 2409.19256, table 2), bucket by bucket (``roles.weight_sync``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilth.core.checksum import checksum
from tilth.core.errors import ArgumentError
from tilth.core.layout import Box, Layout, Mesh, Replicate
from tilth.parallel.comm import Group, all_to_all
from tilth.parallel.dims import ParallelDims
from tilth.plan.reshard import Move, ReshardPlan


class Part(NamedTuple):
    """A box of a parameter and its values, a tensor of the box's size with any strides."""

    box: Box
    values: Tensor

    def piece(self, box: Box) -> Tensor:
        """Return a view of a box inside of this one."""
        return self.values if box == self.box else self.values[box.within(self.box).slices]


Parts = Mapping[str, Part]


def parts_of(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int) -> dict[str, Part]:
    """Return a rank's part of each tensor; none where it is empty. ArgumentError for a part of several boxes."""
    found = {}
    for name, tensor in tensors.items():
        boxes = layouts[name].boxes(rank)
        if len(boxes) > 1:
            raise ArgumentError(f"{name}: rank {rank} holds {len(boxes)} boxes; one can be resharded", key=name)
        if boxes:
            found[name] = Part(boxes[0], tensor.detach())
    return found


@dataclass(frozen=True)
class Resharder:
    """Communication of a plan on one of its ranks. All ranks of the plan call its methods in the same order."""

    plan: ReshardPlan
    rank: int
    group: Group | None
    """Of the plan's ranks, in their order."""
    device: torch.device
    """Of what travels."""

    @classmethod
    def of(cls, plan: ReshardPlan, rank: int, device: torch.device, generation: int = 0) -> "Resharder":
        """Return the communication of a plan; generation: of the roles (``ParallelDims``)."""
        line = Mesh(("to",), (len(plan.ranks),), plan.ranks)
        return cls(plan, rank, ParallelDims.of(line, rank, generation).group("to"), device)

    def fill(self, into: Parts, own: Parts, names: Sequence[str], dtype: torch.dtype) -> int:
        """Write what this rank needs of some parameters into ``into``; return the bytes that came from other ranks.

        own: parts that it has; they may share memory with ``into``. dtype: of ``into`` on every rank, in which values
        travel.
        """
        for move in self.plan.kept(self.rank, names):
            target, source = into[move.name].piece(move.box), own[move.name].piece(move.box)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        if self.group is None:
            return 0
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return sum(self._hop(hop, into, into if hop else own, names, empty) for hop in self.plan.hops(names))

    def _hop(self, hop: int, into: Parts, own: Parts, names: Sequence[str], empty: Tensor) -> int:
        assert self.group is not None
        sent, received = self.plan.sent(self.rank, names, hop), self.plan.received(self.rank, names, hop)
        flat = [own[move.name].piece(move.box).to(empty.dtype).reshape(-1) for move in sent]
        out = empty.new_empty(sum(move.box.numel for move in received))
        whole = torch.cat(flat) if flat else empty
        counts = self._counts(received, source=True), self._counts(sent, source=False)
        all_to_all(out, whole, *counts, self.group).wait()
        for move, values in zip(received, out.split([move.box.numel for move in received])):
            into[move.name].piece(move.box).copy_(values.view(move.box.size))
        return out.nbytes

    def damaged(self, into: Parts, own: Parts, names: Sequence[str], dtype: torch.dtype) -> list[str]:
        """Return the parameters of which something arrived with another checksum than it was sent with.

        Arguments are those of ``fill``, after it.
        """
        if self.group is None or not self.plan.hops(names):
            return []
        sent, received = self.plan.sent(self.rank, names), self.plan.received(self.rank, names)
        pieces = ((into if move.hop else own)[move.name].piece(move.box) for move in sent)
        sums = torch.tensor([_signed(checksum(piece.to(dtype))) for piece in pieces], dtype=torch.int64)
        found = sums.new_empty(len(received))
        counts = self._counts(received, source=True, each=True), self._counts(sent, source=False, each=True)
        all_to_all(found, sums, *counts, self.group).wait()
        pairs = zip(received, found.tolist())
        wrong = [move.name for move, total in pairs if _signed(checksum(into[move.name].piece(move.box))) != total]
        return list(dict.fromkeys(wrong))

    def _counts(self, moves: Iterable[Move], *, source: bool, each: bool = False) -> list[int]:
        """Return the elements, or the number of moves, of each rank of the plan."""
        counts = dict.fromkeys(self.plan.ranks, 0)
        for move in moves:
            counts[move.source if source else move.target] += 1 if each else move.box.numel
        return list(counts.values())


def _signed(value: int) -> int:
    return value - 2**63


def share(parameters: Mapping[str, Tensor], own: Parts, storage: Parts, *, strided: bool = False) -> list[str]:
    """Move training shards into their slices of generation weights; return the names that share memory from now on.

    parameters: training tensors, whose ``data`` becomes a view; own: their boxes; storage: generation weights. A shard
    that is no part of its rank's generation shard, or of another dtype or device, stays where it is. So does a slice
    along columns, which is not contiguous, unless ``strided``: torch's fused AdamW takes the memory of a strided
    parameter for contiguous.
    """
    found = []
    for name, part in own.items():
        there = storage.get(name)
        if there is None or not there.box.contains(part.box) or there.values.dtype != part.values.dtype:
            continue
        view = there.piece(part.box)
        if view.device != part.values.device or not (strided or view.is_contiguous()):
            continue
        if view.data_ptr() != parameters[name].data_ptr():
            view.copy_(parameters[name].data)
            parameters[name].data = view
        found.append(name)
    return found


def whole_layout(layout: Layout, mesh: Mesh) -> Layout:
    """Return the layout of whole copies on all ranks of a mesh."""
    return Layout(mesh, (Replicate(),) * len(mesh.names), layout.shape)


def allocate(layouts: Mapping[str, Layout], rank: int, like: Tensor) -> dict[str, Part]:
    """Return uninitialised parts of a rank in these layouts; like: their dtype and device."""
    boxes = {name: layout.boxes(rank) for name, layout in layouts.items()}
    return {name: Part(box, like.new_empty(box.size)) for name, found in boxes.items() for box in found}
