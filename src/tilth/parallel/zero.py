"""ZeRO-1 (arXiv 1910.02054): ranks that hold the same parameters divide their updates.

Once a step gradients are summed to the ranks that update parts of them, the optimizer changes these parts, and all
ranks gather the new weights. In between every rank has whole parameters, so ranks run any numbers of micro-batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilth.core.layout import Box, Layout
from tilth.parallel.checksums import GivenSums, exact_sum
from tilth.parallel.comm import Group
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import End, GradientPiece, GradientReducer, ReadySums, split

Kind = tuple[bool, tuple[str, ...]]
"""True for experts; axes of the ranks that divide an update."""


class Bucket(NamedTuple):
    """Parameters that travel together."""

    kind: Kind
    names: Sequence[str]
    group: Group
    pieces: list[list[GradientPiece]]
    """Of each rank of the group."""

    @property
    def own(self) -> list[GradientPiece]:
        """Pieces of this rank."""
        return self.pieces[self.group.rank()]

    @property
    def key(self) -> str:
        """Name of the sum of its gradients."""
        return f"updates.{self.names[0]}"

    def room(self, like: Tensor) -> Tensor:
        """Return zeros [ranks, elements] with a row for the pieces of each rank."""
        return like.new_zeros(len(self.pieces), max(1, *(sum(p.numel for p in pieces) for pieces in self.pieces)))


class GradientShards:
    """Gradients of parameters that several ranks hold, of which each rank sums a part."""

    def __init__(
        self,
        reducer: GradientReducer,
        grid: ParallelDims,
        whole: Mapping[str, nn.Parameter],
        held: Mapping[str, Layout],
        layouts: Mapping[str, Layout],
        buckets: Iterable[tuple[Kind, Sequence[str]]],
    ) -> None:
        """whole: this rank's learned parameters, with layouts ``held``; layouts: of updates (``plan.layout``)."""
        self.reducer, self.grid, self.layouts, self._whole, self._held = reducer, grid, layouts, whole, held
        self.given: dict[Kind, GivenSums] = {}
        """Sums of the gradients that this rank gives."""
        self.buckets: list[Bucket] = []
        for kind, names in buckets:
            group, ranks = grid.group(*kind[1]), grid.ranks(*kind[1])
            assert group is not None  # several ranks
            self.buckets.append(Bucket(kind, names, group, [[*self._pieces(names, rank)] for rank in ranks]))
        self._summed = dict[int, Tensor]()
        self.ready = ReadySums([bucket.names for bucket in self.buckets], whole, self._start)

    def _pieces(self, names: Sequence[str], rank: int) -> Iterator[GradientPiece]:
        for layout, name in ((self.layouts[name], name) for name in names):
            if layout.mesh.has(rank):
                slices: tuple[slice, ...] = (slice(0, 0),)
                for box in layout.boxes(rank):  # at most one
                    slices = box.within(self._held[name].boxes(self.grid.rank)[0]).slices
                yield GradientPiece(name, slices, self._whole[name][slices].numel())

    def _start(self, number: int) -> End:
        """Start to sum a bucket to this rank's row."""
        bucket = self.buckets[number]
        blob = bucket.room(self._whole[bucket.names[0]])
        for row, pieces in zip(blob, bucket.pieces):
            for part, piece in split(row, pieces):
                grad = self._whole[piece.name].grad
                assert grad is not None  # ``GradientSums.reduce`` makes it, or a backward pass
                _copy(part, grad[piece.slices])
        self.reducer.code(blob, bucket.group, bucket.key, bucket.pieces)
        self.given[bucket.kind].add(blob)
        summed = self._summed[number] = torch.empty_like(blob[0])
        return self.reducer.reduce_scatter(summed, blob.view(-1), bucket.group, bucket.key)

    def _sums(self, *, keep: bool) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield each bucket with the sum of this rank's row. keep: the gradients, else drop them."""
        self.ready.finish()
        for number, bucket in enumerate(self.buckets):
            for name in bucket.names if not keep else ():
                self._whole[name].grad = None
            yield bucket, self._summed.pop(number)

    @torch.no_grad()
    def sum_up(self) -> dict[str, Tensor]:
        """Sum the gradients of whole parameters, in place. Returns the sum of elements of each part of this rank."""
        found = dict[str, Tensor]()
        for bucket, summed in self._sums(keep=True):
            found |= {piece.name: exact_sum([part]) for part, piece in split(summed, bucket.own)}
            every = torch.empty(len(bucket.pieces) * len(summed), dtype=summed.dtype, device=summed.device)
            self.reducer.all_gather(every, summed, bucket.group, bucket.key, bucket.pieces)
            for row, pieces in zip(every.view(len(bucket.pieces), -1), bucket.pieces):
                for part, piece in split(row, pieces):
                    grad = self._whole[piece.name].grad
                    assert grad is not None
                    there = grad[piece.slices]
                    there.copy_(part.view_as(there))
        return found


class UpdateShards(GradientShards):
    """This rank's parts of what it updates. An optimizer takes it in place of a ``ShardedModel``."""

    def __init__(
        self,
        reducer: GradientReducer,
        grid: ParallelDims,
        whole: Mapping[str, nn.Parameter],
        held: Mapping[str, Layout],
        layouts: Mapping[str, Layout],
        buckets: Iterable[tuple[Kind, Sequence[str]]],
    ) -> None:
        super().__init__(reducer, grid, whole, held, layouts, buckets)
        self.parts: dict[str, nn.Parameter] = {}
        """Parameters that this rank updates: the part that it updates, perhaps without elements."""
        for name, p in whole.items():
            if layouts[name].mesh.has(grid.rank):
                self.parts[name] = p if layouts[name] is held[name] else nn.Parameter(torch.empty_like(p[:0]))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the parts have the present weights, which may lie in other memory than before."""
        for bucket in self.buckets:
            for name, slices, _ in bucket.own:
                self.parts[name].data = self.reducer.main(name, self._whole[name].data[slices])

    @torch.no_grad()
    def scatter(self) -> None:
        """Sum the gradients of whole parameters to those of the parts, and drop them."""
        for bucket, summed in self._sums(keep=False):
            for part, piece in split(summed, bucket.own):
                self.parts[piece.name].grad = part.view_as(self.parts[piece.name])

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the whole parameters with the parts of all ranks."""
        for bucket in self.buckets:
            every = bucket.room(self._whole[bucket.names[0]])
            for row, pieces in zip(every, bucket.pieces) if self.reducer.by_difference else ():
                for part, piece in split(row, pieces):
                    _copy(part, self._whole[piece.name][piece.slices])
            own = torch.zeros_like(every[0])
            for part, piece in split(own, bucket.own):
                _copy(part, self.parts[piece.name])
            self.reducer.gather_weights(every, own, bucket.group, bucket.pieces)
            for row, pieces in zip(every, bucket.pieces):
                for part, piece in split(row, pieces):
                    there = self._whole[piece.name][piece.slices]
                    there.copy_(part.view_as(there))

    # What an optimizer of matrices needs of a ``ShardedModel``

    def assemble(self, names: Sequence[str], parts: Mapping[str, Tensor], *, stage: bool) -> dict[str, Tensor]:
        """Assemble the matrices that this rank updates, from the ranks that divide each of them."""
        axes, own = self._dividing, {name: parts[name].detach() for name in names}
        if not names or self.grid.size(*axes) == 1:
            return own
        return self.grid.gather_boxes(axes, {name: self.layouts[name] for name in names}, own, own[names[0]])

    def own_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of what ``assemble`` has returned for a parameter."""
        layout, ranks = self.layouts[name], self.grid.ranks(*self._dividing)
        for box in layout.boxes(self.grid.rank):
            return full[box.within(Box.around([b for rank in ranks for b in layout.boxes(rank)])).slices]
        return full[:0]

    @property
    def _dividing(self) -> list[str]:
        """Axes along which ranks with the same data hold parts of a matrix."""
        return [name for name in self.grid.mesh.over("parameters") if name not in self.grid.mesh.shards]


def _copy(flat: Tensor, values: Tensor) -> None:
    flat.view(values.shape).copy_(values)
