"""Process groups of a world whose other ranks do not exist: they record what one rank issues, and waits for.

What a call would bring from others is made up, so that the rank goes on: sums are its own numbers, gathers its own part
for each rank, messages 0. A broadcast brings what its source sent in an earlier recording. Values mean nothing; sizes,
groups and their order are those of a real run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tilth.core.layout import Mesh
from tilth.parallel.comm import Exchange
from tilth.parallel.dims import leave

NAME = "recorded"


@dataclass(frozen=True, eq=False)
class GroupKey:
    """A group as one of its ranks sees it: the ranks of a class have one key and groups of their own. Made by ``of``,
    so that equal ones are one."""

    label: str
    axes: tuple[str, ...]
    """Along which its members differ."""
    members: tuple[tuple[int, ...], ...]
    """Coordinates of each along ``axes``."""

    @classmethod
    @cache
    def of(cls, label: str, axes: tuple[str, ...], members: tuple[tuple[int, ...], ...]) -> "GroupKey":
        return cls(label, axes, members)


class Peer(NamedTuple):
    """The other end of a message: a place in the group, or in a unit of ranks that compute a micro-batch together."""

    place: int
    unit: tuple[int, ...] = ()


class Issue(NamedTuple):
    """A collective or message that a rank begins. nbytes: of the whole tensor."""

    op: str
    group: GroupKey
    nbytes: int
    peer: Peer | None = None
    """Source of a broadcast, other end of a message."""


class Wait(NamedTuple):
    """A rank goes on when what it began as event ``at`` has ended."""

    at: int


Program = list[Issue | Wait]
"""Events of one rank, in order."""


class Tape:
    """What the rank that is being recorded does."""

    def __init__(self) -> None:
        self.sent: dict[tuple[Any, GroupKey, int], list[Tensor]] = {}
        """Broadcasts by what ranks of one replica share, group, and number in the group."""
        self.replica: Any = None
        self.most = 0
        self.unit: tuple[int, ...] = ()
        self.mesh = Mesh.of({})
        self.begin(self.mesh, 0)

    def begin(self, mesh: Mesh, most: int, replica: Any = None) -> None:
        """Begin a recording. most: the greatest number of micro-batches of any rank."""
        self.program: Program = []
        self.mesh, self.most, self.replica = mesh, most, replica
        self.numbers = Counter[GroupKey]()


TAPE = Tape()


class _Work(dist.Work):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.waited = at, False

    def wait(self, *_: Any) -> bool:
        if not self.waited:
            TAPE.program.append(Wait(self.at))
        self.waited = True
        return True

    def is_completed(self) -> bool:
        return True


class Recorded(dist.ProcessGroup):
    """A group of this rank and others that do not exist."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._size, self._key = rank, size, None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def key(self) -> GroupKey:
        if self._key is None:
            places = [TAPE.mesh.at(rank) for rank in dist.get_process_group_ranks(self)]
            axes = tuple(name for name in TAPE.mesh.names if len({at[name] for at in places}) > 1)
            label = self.group_name.partition("of-")[0]
            self._key = GroupKey.of(label, axes, tuple(tuple(at[name] for name in axes) for at in places))
        return self._key

    def _issue(self, op: str, nbytes: int, peer: Peer | None = None) -> _Work:
        TAPE.program.append(Issue(op, self.key, nbytes, peer))
        TAPE.numbers[self.key] += 1
        return _Work(len(TAPE.program) - 1)

    # ---- as torch calls them ----

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        (x,) = tensors
        if opts is not None and opts.reduceOp == dist.ReduceOp.MAX:
            x.fill_(TAPE.most)
        return self._issue("all_reduce", x.nbytes)

    def all_gather_single(self, out: Tensor, own: Tensor, opts: Any = None) -> _Work:
        out.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        return self._issue("all_gather", out.nbytes)

    def reduce_scatter_single(self, out: Tensor, whole: Tensor, opts: Any = None) -> _Work:
        out.view(-1).copy_(whole.reshape(self._size, -1)[self._place])
        return self._issue("reduce_scatter", whole.nbytes)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        (x,), source = tensors, opts.rootRank
        at = TAPE.replica, self.key, TAPE.numbers[self.key]
        if source == self._place:
            TAPE.sent[at] = [x.clone()]
        else:
            x.copy_(*TAPE.sent[at])
        return self._issue("broadcast", x.nbytes, Peer(source))

    def all_to_all_single(self, out: Tensor, x: Tensor, received: Any, sent: Any, opts: Any = None) -> _Work:
        out.zero_()
        return self._issue("all_to_all", x.nbytes)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        return self._issue("send", tensors[0].nbytes, self._peer(to))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        tensors[0].zero_()
        return self._issue("receive", tensors[0].nbytes, self._peer(source))

    def _peer(self, place: int) -> Peer:
        return Peer(TAPE.unit.index(place), TAPE.unit) if TAPE.unit else Peer(place)


if NAME.upper() not in dist.Backend.backend_list and not hasattr(dist.Backend, NAME.upper()):
    dist.Backend.register_backend(NAME, lambda store, rank, size, timeout: Recorded(rank, size), devices=["cpu"])


@contextmanager
def alone_in(mesh: Mesh, rank: int) -> Iterator[None]:
    """Be rank ``rank`` of the mesh in the block; no other rank exists."""
    exchange: Callable[..., None] = Exchange.__init__

    def in_unit(self: Exchange, members: Any, *rest: Any) -> None:
        TAPE.unit = members.ranks if len(members.ranks) < members.group.size() else ()
        try:
            exchange(self, members, *rest)
        finally:
            TAPE.unit = ()

    dist.init_process_group(NAME, store=FakeStore(), rank=rank, world_size=len(mesh))
    Exchange.__init__ = in_unit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Exchange.__init__ = exchange  # type: ignore[method-assign]
        leave()
