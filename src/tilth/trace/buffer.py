"""Buffers of finished spans, as packed numbers: an event makes no Python object and triggers no garbage collection.

Each thread packs events into its own chunks without a lock; the writer's thread takes them. An event reserves its place
before it is packed, since a garbage collection, which is an event too, may come in between. An id of 0 marks a place
that is reserved and not packed yet.
"""

import itertools
import struct
from collections import deque
from collections.abc import Mapping
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
FORMAT = struct.Struct("@9qd5i4x")
"""id, parent, step, seq, start, duration, tokens, squares, bytes; flops; micro_batch, depth, op, detail, where."""
SIZE = FORMAT.size
CHUNK = 512  # events in a chunk (52 KB)
FULL = CHUNK * SIZE
Taken = list[tuple[str, bytes]]  # packed events with the name of their thread
MOST_TEXTS = 65_536  # most different texts of a kind, such as details; later ones become OTHERS, which bounds memory
OTHERS = "(others)"


class Chunk:
    """Room for events; bytes [read, used) are waiting."""

    __slots__ = ("buffer", "read", "used")

    def __init__(self, size: int = FULL) -> None:
        self.buffer = bytearray(size)
        self.read = 0
        self.used = FULL - size

    def written(self) -> int:
        """Return the end of the packed events."""
        used = self.used
        ids = memoryview(self.buffer).cast("q")[self.read // 8 : used // 8 : SIZE // 8].tolist()
        return self.read + SIZE * ids.index(0) if 0 in ids else used


NONE = Chunk(0)  # the chunk of a thread before its first event, without room


class EventBuffer:
    """The events of one thread, which adds them; one other thread takes them."""

    __slots__ = ("_before", "_taken", "chunk", "dropped", "full")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all events."""
        self.chunk = NONE
        self.full: deque[Chunk] = deque()
        self.dropped = 0
        self._before, self._taken = -FULL, 0  # bytes of all chunks before this one (NONE counts as a full one)

    @property
    def waiting(self) -> int:
        """Return the number of waiting events; off by a chunk while one is added. Callable from any thread."""
        return (self._before + self.chunk.used - self._taken) // SIZE

    def grow(self) -> Chunk:
        """Return a chunk with room, after the full one."""
        fresh = Chunk()
        if self.chunk.used >= FULL:  # else a garbage collection in the line above has grown it
            if self.chunk is not NONE:
                self.full.append(self.chunk)
            self.chunk = fresh
            self._before += FULL
        return self.chunk

    def take(self) -> bytes:
        """Take the new events in FORMAT, oldest first. An exception (MemoryError) changes nothing."""
        last = self.chunk  # read before the full ones, as it may become one of them meanwhile
        full = [self.full[i] for i in range(len(self.full))]
        ends = list[tuple[Chunk, int]]()
        for chunk in [*takewhile(lambda chunk: chunk is not last, full), *([last] if last is not NONE else [])]:
            ends.append((chunk, chunk.written()))
            if ends[-1][1] < FULL:  # events behind one that is being packed wait with it
                break
        taken = b"".join([memoryview(chunk.buffer)[chunk.read : end] for chunk, end in ends])
        for chunk, end in ends:
            chunk.read = end
        while self.full and self.full[0].read >= FULL:
            self.full.popleft()
        self._taken += len(taken)
        return taken


class Codes(Generic[T]):
    """Numbers of texts, for any thread, without a lock. first: number 0; others: replaces those after MOST_TEXTS."""

    def __init__(self, first: T, others: T) -> None:
        self._codes: dict[T, int] = {first: 0}
        self._next = itertools.count(1)
        self._others = others

    def __getitem__(self, text: T) -> int:
        code = self._codes.get(text)
        if code is None:
            code = self._codes.setdefault(text if len(self._codes) < MOST_TEXTS else self._others, next(self._next))
        return code

    def texts(self) -> dict[int, T]:
        return {code: text for text, code in list(self._codes.items())}


class EventNames(NamedTuple):
    """Texts of the numbers in events; where: role and place."""

    op: Mapping[int, str]
    detail: Mapping[int, str]
    where: Mapping[int, tuple[str, str]]
