"""Collectives: every collective of Tilth, each with a span; those of torch's FSDP are in ``parallel.fsdp``.

A span has the ranks of its group as ``detail``, in ascending order, and as ``seq`` its number among all communications
of these ranks. All members issue them in one order, so the events of one communication share one (detail, seq). Its
``bytes`` are those of this rank's tensor: the input of an all-reduce or a reduce-scatter, the local part of a gather,
the tensor of a broadcast, what it sends to others in an exchange or an all-to-all. Its time includes waiting for the
last member; where a device works beside the host, it is the time to queue it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
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

_ranks: dict[Group, str] = {}
_counts: dict[str, int] = {}
"""Communications so far, by ranks: two groups of the same ranks count together."""
_outer: list[span] = []
"""Open spans that communications of other threads belong to; see ``lent``."""


def communication(op: str, group: Group, nbytes: int) -> span:
    """Return the span of the next communication of this group, to be entered at once."""
    ranks = _ranks.get(group)
    if ranks is None:
        ranks = _ranks[group] = ",".join(map(str, sorted(dist.get_process_group_ranks(group))))
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


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce contiguous x over the group in place, by default to the sum; the same bits on every rank."""
    with communication("all_reduce", group, x.nbytes):
        dist.all_reduce(x, op, group=group)


def all_gather(out: Tensor, own: Tensor, group: Group) -> None:
    """Fill contiguous ``out`` [n * ranks, ...] with every rank's contiguous ``own`` [n, ...], in order."""
    with communication("all_gather", group, own.nbytes):
        _all_gather(out, own, group=group)


def reduce_scatter(out: Tensor, whole: Tensor, group: Group) -> None:
    """Fill ``out`` [n, ...] with the rank's part of the sum of every rank's contiguous ``whole`` [n * ranks, ...]."""
    with communication("reduce_scatter", group, whole.nbytes):
        _reduce_scatter(out, whole, group=group)


def broadcast(x: Tensor, source: int, group: Group) -> None:
    """Broadcast contiguous x from rank ``source`` of the world."""
    with communication("broadcast", group, x.nbytes):
        dist.broadcast(x, source, group=group)


def all_to_all(out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> None:
    """Fill contiguous ``out`` with ``received[r]`` rows of each rank r, which get ``sent[r]`` rows of contiguous x."""
    own = sent[group.rank()] * (x.nbytes // max(len(x), 1))
    with communication("all_to_all", group, x.nbytes - own):
        dist.all_to_all_single(out, x, list(received), list(sent), group=group)


class Exchange:
    """One tensor on its way to a rank of a group, and one from a rank of it, either perhaps missing.

    All ranks of the group make one at the same time; those between the same two ranks arrive in order.
    """

    def __init__(self, group: Group, to: int, sent: Tensor | None, source: int, received: Tensor | None) -> None:
        """to, source: ranks of the group; sent, received: contiguous, None or empty: nothing."""
        ends = ((dist.isend, sent, to), (dist.irecv, received, source))
        some = [(op, x, peer) for op, x, peer in ends if x is not None and x.numel()]
        self._group, self._held, self._received = group, sent, received
        self._bytes = 0 if sent is None else sent.nbytes
        ops = [dist.P2POp(op, x, group=group, group_peer=peer) for op, x, peer in some]
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> Tensor | None:
        """Wait for both and return what was received. The span has the time that was not hidden by other work."""
        with communication("exchange", self._group, self._bytes):
            for work in self._works:
                work.wait()
        self._held = None
        return self._received


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


# Gradients that FSDP sends; see ``parallel.fsdp``


def is_dtensor(p: Tensor | None) -> "TypeGuard[DTensor]":
    """Return True if FSDP divides a parameter or gradient. Told by a method: one process never imports DTensor."""
    return hasattr(p, "to_local")


def is_fsdp(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return True if FSDP divides parameters of a module, told as in ``is_dtensor``."""
    return hasattr(module, "set_requires_gradient_sync")


SUMMED = 1024
"""Neighbours that are added up in the tensor's dtype, before float64."""
FEW = 1 << 13
"""Elements that are so few that they are added up in float64 at once."""


class GivenSums:
    """Sums of the gradients that this rank has given to reduce-scatters in a step, for each rank that gets them.

    The shard that a rank gets has the sum of what all ranks gave for it, but for rounding (checksums of algorithm-based
    fault tolerance: Huang and Abraham, 1984).
    """

    def __init__(
        self, group: Group, names: Sequence[str] = (), place: int = 0, places: int = 1, every: int = 1
    ) -> None:
        """names: parameters whose gradients are given; place: of this group, where several hold different parts of
        them; every: number of steps of which one is looked at."""
        self.group, self.names, self.place, self.places, self.every = group, list(names), place, places, every
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.looks = step % self.every == 0
        self.sums: Tensor | None = None
        """float64 [ranks + 1]: for each rank of the group; the norm of what was given, times its dtype's epsilon."""

    def add(self, given: Tensor) -> None:
        """Add a rank's contribution, whose equal parts go to the ranks of the group in order."""
        if not self.looks:
            return
        parts = exact_sums(given.view(self.group.size(), -1))
        scale = _size(given).double() * torch.finfo(given.dtype).eps
        found = torch.cat([parts, scale[None]])
        self.sums = found if self.sums is None else self.sums + found

    def placed(self) -> Tensor:
        """Return the sums where those of this group lie among those of all: float64 [places * (ranks + 1)]."""
        found = torch.zeros(self.places, self.group.size() + 1, dtype=torch.float64)
        if self.sums is not None:
            found = found.to(self.sums.device)
            found[self.place] = self.sums
        return found.flatten()

    def own(self, placed: Tensor) -> tuple[float, float]:
        """Return what all ranks gave for this rank's shard, and the norms times epsilon. placed: its sum over ranks."""
        *parts, scale = placed.view(self.places, -1)[self.place].tolist()
        return parts[self.group.rank()], scale


def _size(x: Tensor) -> Tensor:
    """Estimate the L2 norm of contiguous x by every fourth group of neighbours, for a bound far above the rounding."""
    count = x.numel() // (4 * SUMMED)
    if count * SUMMED < FEW:
        return torch.linalg.vector_norm(x)
    some = x.view(-1)[: count * 4 * SUMMED].view(-1, 4, SUMMED)[:, 0]
    return 2 * torch.linalg.vector_norm(torch.linalg.vector_norm(some, dim=1))


def exact_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row of contiguous [rows, n] in float64: float64 [rows]. Neighbours are added up before
    (torch adds them in pairs), which is several times as fast."""
    count = rows.shape[1]
    if count % SUMMED == 0:  # of two dimensions torch adds up neighbours faster than of three
        return rows.view(-1, SUMMED).sum(1).view(len(rows), -1).sum(1, dtype=torch.float64)
    if count < FEW:
        return rows.sum(1, dtype=torch.float64)
    whole = count // SUMMED * SUMMED
    found = rows[:, :whole].unflatten(1, (-1, SUMMED)).sum(2).sum(1, dtype=torch.float64)
    return found + rows[:, whole:].sum(1, dtype=torch.float64)


def exact_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all elements of some tensors in float64, as ``exact_sums``: float64 []."""
    parts = [tensors[0].new_zeros(1)]  # all others may be empty
    for flat in (tensor.reshape(-1) for tensor in tensors):
        whole = len(flat) // SUMMED * SUMMED
        parts += [flat[:whole].view(-1, SUMMED).sum(1)] if whole else []
        parts += [flat[whole:].sum()[None]] if whole < len(flat) else []
    return torch.cat(parts).sum(dtype=torch.float64)
