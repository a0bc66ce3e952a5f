"""Replicas that restore the same parts of a checkpoint read disjoint tensors and broadcast them to each other.

Together they read each byte from storage once (section 4.1 of ByteCheckpoint, arXiv 2407.20143).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from tilth.checkpoint.tile_reader import as_bytes
from tilth.core.errors import CheckpointError, TilthError
from tilth.plan.packing import balance

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Parts = Mapping[str, Sequence[Tensor]]
"""Targets by name of the tensor."""
MESSAGE = 1 << 24  # bytes of small tensors in one broadcast
_BOARD = 1024  # bytes of a rank's status


@dataclass(frozen=True)
class Share:
    """Ranks that restore the same parts of the same tensors, at the same time."""

    ranks: tuple[int, ...]
    """In the same order on all of them."""
    me: int
    """The rank of this process."""
    broadcast: Callable[[Tensor, int], None]
    """Fill a contiguous uint8 tensor with what it holds on that rank; called on all ranks in the same order."""

    @classmethod
    def of_group(cls, group: "ProcessGroup", ranks: Sequence[int], me: int) -> "Share":
        """Make the share of a process group, from global ranks."""
        from tilth.parallel import comm

        def broadcast(tensor: Tensor, source: int) -> None:
            comm.broadcast(tensor, source, group)

        return cls(tuple(ranks), me, broadcast)

    def each(self, work: Callable[[], T], wanted: int = 0) -> T:
        """Return the result of ``work`` on this rank if it succeeded on all ranks; all of them call this.

        wanted: a checksum of the work, equal on all ranks. An exception of one rank is raised there as it is, and on
        the others as a CheckpointError with the rank and the message, so that none waits for data that will not come.
        """
        problem = "it ended before its part was read"
        try:
            found = work()
            problem = ""
        except TilthError as error:
            problem = str(error)
            raise
        finally:
            others = self._exchange(wanted, problem)
        for other in others:
            raise other
        return found

    def _exchange(self, wanted: int, problem: str) -> list[CheckpointError]:
        """Share what each rank wants and its problem ("": none); return the other ranks' problems."""
        status = {rank: self._broadcast_status(rank, wanted, problem) for rank in self.ranks}
        failed, strangers = [], []
        for rank, (what, text) in status.items():
            if text and rank != self.me:
                message = f"rank {rank}, which reads for rank {self.me} too: {text}"
                failed.append(CheckpointError(message, key=f"rank{rank}"))
            if what != wanted:
                message = f"rank {rank} restores other parts than rank {self.me}"
                strangers.append(CheckpointError(message, key=f"rank{rank}.parts"))
        return failed + strangers

    def _broadcast_status(self, rank: int, wanted: int, problem: str) -> tuple[int, str]:
        board = torch.zeros(_BOARD, dtype=torch.uint8)
        if rank == self.me:
            text = wanted.to_bytes(8, "little") + problem.encode()[: _BOARD - 8]
            board[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast(board, rank)
        raw = board.numpy().tobytes()
        return int.from_bytes(raw[:8], "little"), raw[8:].rstrip(b"\0").decode(errors="ignore")


def together(share: Share, wanted: int, parts: Parts, read: Callable[[Collection[str]], None]) -> None:
    """Fill ``parts`` on all ranks of the share: each reads some and receives the rest.

    wanted: a checksum of what is restored, equal on all ranks. A failure of one rank is raised on all (``Share.each``).
    """
    owners = divided(parts, share.ranks)
    mine = {name for name, owner in owners.items() if owner == share.me}
    share.each(lambda: read(mine), wanted)
    for rank in share.ranks:
        for message in _messages([t for name in parts if owners[name] == rank for t in parts[name]]):
            _send(share, message, rank)


def divided(parts: Parts, ranks: Sequence[int]) -> dict[str, int]:
    """Return the rank that reads each tensor, so that all read nearly the same bytes."""
    names = sorted(parts)
    shares = balance([sum(t.nbytes for t in parts[name]) for name in names], len(ranks))
    return {names[row]: rank for rank, rows in zip(ranks, shares) for row in rows.tolist()}


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors for one broadcast: of one dtype, up to ``MESSAGE`` bytes or a larger one alone."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        message, nbytes = list[Tensor](), 0
        for tensor in alike:
            if message and nbytes + tensor.nbytes > MESSAGE:
                yield message
                message, nbytes = [], 0
            message.append(tensor)
            nbytes += tensor.nbytes
        yield message


def _send(share: Share, message: list[Tensor], rank: int) -> None:
    if len(message) == 1 and message[0].is_contiguous():
        share.broadcast(as_bytes(message[0]), rank)
        return
    if rank == share.me:
        flat = torch.cat([tensor.reshape(-1) for tensor in message])
    else:
        flat = message[0].new_empty(sum(tensor.numel() for tensor in message))
    share.broadcast(as_bytes(flat), rank)
    if rank != share.me:
        for tensor, part in zip(message, flat.split([tensor.numel() for tensor in message])):
            tensor.copy_(part.view(tensor.shape))
