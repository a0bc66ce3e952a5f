"""The sum of gradients over ranks, as one object that another may replace: one that sends less than it is given."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from tilth.core.layout import Layout
from tilth.parallel.comm import Collective, Group, all_gather, all_reduce, reduce_scatter
from tilth.parallel.dims import ParallelDims
from tilth.plan.rules import Table


class GradientPiece(NamedTuple):
    """Part of a tensor that this rank computes with, which one rank of a group sums or updates."""

    name: str
    """"" for elements without a meaning, between pieces."""
    slices: tuple[slice, ...]
    numel: int


Pieces = Sequence[Sequence[GradientPiece]]
"""Of each rank of a group, in the order of its row."""


def split(row: Tensor, pieces: Sequence[GradientPiece]) -> Iterator[tuple[Tensor, GradientPiece]]:
    """Return the part of a flat row that each piece has; those without a meaning are left out."""
    counts = [piece.numel for piece in pieces]
    parts = zip(row[: sum(counts)].split(counts), pieces) if counts else iter(())
    return ((part, piece) for part, piece in parts if piece.name)


class GradientReducer:
    """Sum of gradients over ranks, exact but for rounding. Every rank of a model has one, of the same class.

    A subclass may send less and keep what it leaves out as its ``state``. ``key`` names a sum: the same in each step,
    with the same number of elements.
    """

    tolerance = 0.0
    """Largest relative error of an element that is sent, beyond the epsilon of its dtype. The checks of sums allow for
    it, and see no error that is smaller."""
    by_difference = False
    """True: ``gather_weights`` needs the weights before a step in its ``out``."""
    by_parts = False
    """True: ranks with the same parameters each sum a part of the gradients, and gather the sums."""

    def bind(
        self,
        grid: ParallelDims,
        given: Mapping[str, Layout],
        updates: Mapping[str, Layout],
        table: Table,
        own: Mapping[str, Tensor],
    ) -> None:
        """Prepare for the gradients of learned parameters. given: layouts of what a rank computes of them, with copies
        on all data ranks; updates: of the sums of parts; both also of other stages. own: this rank's parameters."""

    def begin(self, step: int) -> None:
        """Begin a step, whose number is the same on all ranks."""

    def code(self, whole: Tensor, group: Group, key: str, pieces: Pieces) -> None:
        """Change contiguous ``whole`` [n * ranks] to what this rank is going to give to ``reduce_scatter``."""

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group, key: str) -> None:
        """Fill ``out`` [n] with this rank's part of the sum of every rank's contiguous ``whole`` [n * ranks]."""
        reduce_scatter(out, whole, group)

    def all_gather(self, out: Tensor, own: Tensor, group: Group, key: str, pieces: Pieces) -> None:
        """Fill contiguous ``out`` [n * ranks] with the sums of all ranks; the same bits on every rank."""
        all_gather(out, own, group)

    def main(self, name: str, part: Tensor) -> Tensor:
        """Return what an optimizer updates in place of this part of a weight that all ranks have."""
        return part.contiguous()

    def gather_weights(self, out: Tensor, own: Tensor, group: Group, pieces: Pieces) -> None:
        """Fill ``out`` [ranks, n] with every rank's updated ``own`` [n]; the same bits on every rank."""
        all_gather(out.view(-1), own, group)

    def all_reduce(self, x: Tensor, group: Group, key: str) -> Collective:
        """Start to sum contiguous x [n] over the group in place; the same bits on every rank."""
        return all_reduce(x, group)

    def settle(self, learned: bool) -> None:
        """End a step. learned: False drops what it left out, as its gradients were dropped."""

    def state(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the tensors that the next step depends on, by name."""
        return {}

    def layouts(self) -> Mapping[str, Layout]:
        """Return the layouts of all tensors of ``state``, those of other ranks included."""
        return {}


EXACT = GradientReducer()
