"""Collectives: every collective of Tilth, each with a span; those of torch's FSDP are in ``parallel.fsdp``.

A span has the ranks of its group, or those of it that take part, as ``detail``, in ascending order, and as ``seq`` its
number among all communications of these ranks. All of them issue them in one order, so the events of one communication
share one (detail, seq). Its ``bytes`` are those of this rank's tensor: the input of an all-reduce or a reduce-scatter,
the local part of a gather, the tensor of a broadcast, what it sends to others in an exchange or an all-to-all. Its time
includes waiting for the last member; where a device works beside the host, it is the time to queue it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

from tilth.trace.spans import span

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Group = dist.ProcessGroup
MAX = dist.ReduceOp.MAX
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Members:
    """Ranks of a group that exchange messages in it: all of them, or some. No group of their own is made."""

    group: Group
    ranks: tuple[int, ...]
    """Of the group, ascending: the order of their ring."""

    @classmethod
    def of(cls, group: Group) -> "Members":
        """Return all ranks of a group."""
        return cls(group, tuple(range(group.size())))

    @property
    def place(self) -> int:
        """Place of this process among the members."""
        return self.ranks.index(self.group.rank())

    @property
    def world(self) -> list[int]:
        """Numbers of the members in the world."""
        every = dist.get_process_group_ranks(self.group)
        return [every[rank] for rank in self.ranks]


_ranks: dict[Group | Members, str] = {}
_counts: dict[str, int] = {}
"""Communications so far, by ranks: two groups of the same ranks count together."""
_outer: list[span] = []
"""Open spans that communications of other threads belong to; see ``lent``."""


def communication(op: str, group: Group | Members, nbytes: int) -> span:
    """Return the span of the next communication of these ranks, to be entered at once."""
    ranks = _ranks.get(group)
    if ranks is None:
        world = group.world if isinstance(group, Members) else dist.get_process_group_ranks(group)
        ranks = _ranks[group] = ",".join(map(str, sorted(world)))
    return _numbered(op, ranks, nbytes)


def _numbered(op: str, ranks: str, nbytes: int) -> span:
    number = _counts[ranks] = _counts.get(ranks, -1) + 1
    if not _outer:
        return span(op, bytes=nbytes, detail=ranks, seq=number)
    outer = _outer[-1]
    return span(op, outer.step, outer.micro_batch, bytes=nbytes, detail=ranks, seq=number, where=outer.where)


@contextmanager
def lent(outer: span) -> Iterator[None]:
    """Assign communications in the block to this open span, whatever thread issues them: in a backward pass on a device
    torch runs hooks in other threads."""
    _outer.append(outer)
    try:
        yield
    finally:
        _outer.pop()


def forget() -> None:
    """Reset the counters: the groups are destroyed."""
    _ranks.clear()
    _counts.clear()


# Collectives. All ranks of the group call them in the same order.


class Collective:
    """A collective on its way: its tensors are not to be used until ``wait`` returns.

    The span is that of the wait, so it has the time that was not hidden by other work.
    """

    def __init__(self, op: str, group: Group | Members, nbytes: int, works: Sequence[dist.Work | None]) -> None:
        self._op, self._group, self._bytes = op, group, nbytes
        self._works = [work for work in works if work is not None]

    def wait(self) -> Tensor | None:
        """Wait until it has ended on this rank."""
        with communication(self._op, self._group, self._bytes):
            for work in self._works:
                work.wait()
        return None


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Collective:
    """Start to reduce contiguous x over the group in place, by default to the sum; the same bits on every rank."""
    return Collective("all_reduce", group, x.nbytes, [dist.all_reduce(x, op, group=group, async_op=True)])


def all_gather(out: Tensor, own: Tensor, group: Group) -> None:
    """Fill contiguous ``out`` [n * ranks, ...] with every rank's contiguous ``own`` [n, ...], in order."""
    with communication("all_gather", group, own.nbytes):
        _all_gather(out, own, group=group)


def reduce_scatter(out: Tensor, whole: Tensor, group: Group) -> Collective:
    """Start to fill ``out`` [n, ...] with the rank's part of the sum of every rank's contiguous ``whole``
    [n * ranks, ...]."""
    work = _reduce_scatter(out, whole, group=group, async_op=True)
    return Collective("reduce_scatter", group, whole.nbytes, [work])


def broadcast(x: Tensor, source: int, group: Group) -> None:
    """Broadcast contiguous x from rank ``source`` of the world."""
    with communication("broadcast", group, x.nbytes):
        dist.broadcast(x, source, group=group)


def all_to_all(out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Collective:
    """Start to fill contiguous ``out`` with ``received[r]`` rows of each rank r, which get ``sent[r]`` rows of
    contiguous x."""
    own = sent[group.rank()] * (x.nbytes // max(len(x), 1))
    work = dist.all_to_all_single(out, x, list(received), list(sent), group=group, async_op=True)
    return Collective("all_to_all", group, x.nbytes - own, [work])


class Exchange(Collective):
    """Tensors on their way to some of the members, and from some of them.

    All members make one at the same time; those between the same two ranks arrive in order.
    """

    def __init__(
        self, members: Members, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]
    ) -> None:
        """sent, received: (place among the members, contiguous tensor); an empty one does not travel."""
        ends = [(dist.isend, *one) for one in sent] + [(dist.irecv, *one) for one in received]
        group, ranks = members.group, members.ranks
        ops = [dist.P2POp(op, x, group=group, group_peer=ranks[to]) for op, to, x in ends if x.numel()]
        nbytes = sum(x.nbytes for _, x in sent)
        super().__init__("exchange", members, nbytes, dist.batch_isend_irecv(ops) if ops else [])
        self._held, self._received = list(sent), received

    def wait(self) -> Tensor | None:
        """Wait for all and return what was received first."""
        super().wait()
        self._held.clear()
        return self._received[0][1] if self._received else None


# Messages from one rank to another. Both ranks of a channel issue them in one order.


@dataclass(frozen=True)
class Channel:
    """One direction between two ranks: a group of these two, in which only ``source`` sends.

    Each direction has a group of its own, so that no message waits for one that goes the other way: a device executes
    the messages of a group in order.
    """

    group: Group
    source: int
    target: int
    name: str = ""
    """Distinguishes channels between the same ranks."""

    def send(self, x: Tensor) -> dist.Work:
        """Start to send contiguous x, which must stay as it is until the result's ``wait`` returns."""
        with _numbered("send", self._detail, x.nbytes):
            work = dist.isend(x, self.target, group=self.group)
        assert work is not None  # this rank is a member
        return work

    def post(self, out: Tensor) -> dist.Work:
        """Start to receive into contiguous ``out``; to be finished by ``receive``, in the order of the posts."""
        work = dist.irecv(out, self.source, group=self.group)
        assert work is not None
        return work

    def receive(self, out: Tensor, work: dist.Work) -> None:
        """Wait for a message that was posted."""
        with _numbered("receive", self._detail, out.nbytes):
            work.wait()

    @property
    def _detail(self) -> str:
        return f"{self.source}>{self.target}"


# What FSDP divides; see ``parallel.fsdp``


def is_dtensor(p: Tensor | None) -> "TypeGuard[DTensor]":
    """Return True if FSDP divides a parameter or gradient. Told by a method: one process never imports DTensor."""
    return hasattr(p, "to_local")


def is_fsdp(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return True if FSDP divides parameters of a module, told as in ``is_dtensor``."""
    return hasattr(module, "set_requires_gradient_sync")
