"""The sum of gradients over ranks, as one object that another may replace: one that sends less than it is given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilth.core.errors import ModelError
from tilth.core.layout import Layout
from tilth.parallel.comm import Collective, Group, all_gather, all_reduce, reduce_scatter
from tilth.parallel.dims import ParallelDims
from tilth.plan.packing import portions
from tilth.plan.rules import Table

BUCKET = 1 << 25
"""Bytes of tensors that one collective sums."""
End = Callable[[], object]
"""Waits for a sum that was started."""


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

    bucket_bytes = BUCKET
    """Bytes of tensors that one collective sums."""
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

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group, key: str) -> End:
        """Start to fill ``out`` [n] with this rank's part of the sum of every rank's contiguous ``whole``
        [n * ranks]."""
        return reduce_scatter(out, whole, group).wait

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
        going = Sends()
        for places in self.buckets(tensors):
            going.add(self.start_sum([tensors[i] for i in places], group, f"{key}.{places[-1]}"))
        going.finish()

    def start_sum(self, bucket: Sequence[Tensor], group: Group, key: str) -> End:
        """Start to sum tensors of one dtype over the group, in place."""
        flat = bucket[0].flatten() if len(bucket) == 1 else torch.cat([t.flatten() for t in bucket])
        return partial(_spread, self.all_reduce(flat, group, key), flat, bucket)

    def buckets(self, tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        """Yield the places of tensors that are summed together: neighbours of one dtype."""
        for _, alike in groupby(range(len(tensors)), lambda i: tensors[i].dtype):
            yield from portions(alike, lambda i: tensors[i].nbytes, self.bucket_bytes)

    def prepare(self) -> None:
        """Prepare for the optimizer's step."""

    def settle(self, learned: bool) -> None:
        """End a step. learned: False drops what it left out, as its gradients were dropped."""

    def follow(self, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Tensor]) -> None:
        """Give it the optimizers of this rank and their state, by kind and parameter: "exp_avg.NAME"."""

    def restoring(self) -> AbstractContextManager[None]:
        """Name, in the block, all state that a checkpoint of other ranks may have."""
        return nullcontext()

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


class Sends:
    """Sums on their way, of which one goes on while the next one is filled; they end in the order of their starts."""

    def __init__(self) -> None:
        self._ends = list[End]()

    def add(self, end: End) -> None:
        """Add one that was started."""
        self._ends.append(end)
        if len(self._ends) > 1:
            self._ends.pop(0)()

    def finish(self) -> None:
        """Wait for all."""
        while self._ends:
            self._ends.pop(0)()


class ReadySums:
    """Sums of buckets of gradients, each started when the last backward pass of a step has left all of its gradients,
    while the pass goes on. All ranks start them in one order."""

    def __init__(
        self,
        buckets: Sequence[Sequence[str]],
        parameters: Mapping[str, nn.Parameter],
        start: Callable[[int], End],
    ) -> None:
        """buckets: names, in about the order in which a pass leaves their gradients; start: starts the sum of one."""
        self._buckets, self._start, self._going = buckets, start, Sends()
        self._places = {name: i for i, names in enumerate(buckets) for name in names}
        self.begin()
        for name in self._places:
            parameters[name].register_post_accumulate_grad_hook(partial(self._ready, name))

    def begin(self) -> None:
        """Begin a step: no sum is started, and passes that follow are not the last one."""
        self._missing, self._next, self._opened = [set(names) for names in self._buckets], 0, False
        self._going = Sends()

    def open(self) -> None:
        """Let the pass that follows, the last one of the step on this rank, start sums."""
        self._opened = True

    def _ready(self, name: str, p: Tensor) -> None:
        """Take note that the gradient of a parameter is complete. ModelError: its sum is on its way already."""
        place = self._places[name]
        if not self._opened:
            return
        if place < self._next:
            message = f"{name} has a gradient after its last backward pass; a loss may run one such pass alone"
            raise ModelError(message, key=name)
        self._missing[place].discard(name)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._advance()

    def finish(self) -> None:
        """Start the sums that are left, and wait for all."""
        self._opened = False
        while self._next < len(self._buckets):
            self._advance()
        self._going.finish()
        self.begin()

    @torch.no_grad()
    def _advance(self) -> None:
        number, self._next = self._next, self._next + 1
        self._going.add(self._start(number))


def _spread(summed: Collective, flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Wait for the sum of a flat bucket, and copy it to its tensors."""
    summed.wait()
    for t, part in zip(bucket, flat.split([t.numel() for t in bucket])):
        t.copy_(part.view_as(t))


EXACT = GradientReducer()
