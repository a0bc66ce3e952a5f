"""The sum of gradients over ranks, as one object that another may replace: one that sends less than it is given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilth.core.layout import Layout
from tilth.parallel.comm import Collective, Group, all_gather, all_reduce, reduce_scatter
from tilth.parallel.dims import ParallelDims
from tilth.plan.rules import Table

BUCKET = 1 << 25
"""Bytes of tensors that one collective sums."""


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
    apart = False
    """True: nothing sums gradients over copies (``mesh.copies``). Each rank learns from its own, times the number of
    copies, and ``settle`` brings their models together."""
    common: Sequence[str] = ()
    """If ranks are apart, kinds of the optimizer's state that they have alike."""

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

    def sum_in_place(self, tensors: Sequence[Tensor], group: Group | None, key: str) -> None:
        """Sum tensors over the group, in flat buckets: one is on its way while the next one is filled."""
        if group is None:
            return
        bucket, ends = list[Tensor](), list[Callable[[], None]]()
        for i, tensor in enumerate(tensors):
            bucket.append(tensor)
            following = tensors[i + 1] if i + 1 < len(tensors) else None
            full = sum(t.nbytes for t in bucket) + (0 if following is None else following.nbytes) > BUCKET
            if following is None or full or following.dtype != tensor.dtype:
                flat = bucket[0].flatten() if len(bucket) == 1 else torch.cat([t.flatten() for t in bucket])
                ends.append(partial(_spread, self.all_reduce(flat, group, f"{key}.{i}"), flat, bucket))
                bucket = []
                if len(ends) > 1:
                    ends.pop(0)()
        for end in ends:
            end()

    def prepare(self) -> None:
        """Prepare for the optimizer's step."""

    def settle(self, learned: bool) -> None:
        """End a step. learned: False drops what it left out, as its gradients were dropped."""

    def follow(self, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Tensor]) -> None:
        """Give it the optimizers of this rank and their state, by kind and parameter: "exp_avg.NAME"."""

    def restart(self) -> None:
        """Begin a phase with a state of zeros; a collective call."""
        for tensor in self.state().values():
            tensor.zero_()

    def equal(self, name: str) -> bool:
        """True if copies of a parameter have the same bits now, between two steps."""
        return True

    def averaged(self) -> AbstractContextManager[None]:
        """Let copies of the parameters be equal in the block, the mean of what they are; a collective call."""
        return nullcontext()

    def state(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the tensors that the next step depends on, by name."""
        return {}

    def layouts(self) -> Mapping[str, Layout]:
        """Return the layouts of all tensors of ``state``, those of other ranks included."""
        return {}

    def divided(self, rows: Tensor, ranks: int) -> Tensor:
        """Return what each of this number of ranks gets of a state that others had: rows [ranks before, ...]."""
        return rows.sum(0) / ranks


def _spread(summed: Collective, flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Wait for the sum of a flat bucket, and copy it to its tensors."""
    summed.wait()
    for t, part in zip(bucket, flat.split([t.numel() for t in bucket])):
        t.copy_(part.view_as(t))


EXACT = GradientReducer()
