"""Finished spans on their way to a file: packed numbers, so that one costs no object and no collection of garbage.

Each thread packs its events into chunks of its own and takes no lock; one other thread takes them from there. An event
takes its place in the chunk before it is written there, because a collection of garbage may come between the two and is
an event itself; a place whose id is still 0 has not been written yet.
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
CHUNK = 512
"""Events in a chunk (52 KB)."""
FULL = CHUNK * SIZE
Taken = list[tuple[str, bytes]]
"""Packed events of threads by name, on their way from the recorder to the writer."""
MOST_TEXTS = 65_536
"""Most different details, say; those beyond are all called OTHERS, so that memory stays bounded."""
OTHERS = "(others)"


class Chunk:
    """Room for events: bytes [read, used) wait to be taken."""

    __slots__ = ("buffer", "read", "used")

    def __init__(self, size: int = FULL) -> None:
        self.buffer = bytearray(size)
        self.read = 0
        self.used = FULL - size

    def written(self) -> int:
        """Up to where it may be taken."""
        used = self.used
        ids = memoryview(self.buffer).cast("q")[self.read // 8 : used // 8 : SIZE // 8].tolist()
        return self.read + SIZE * ids.index(0) if 0 in ids else used


NONE = Chunk(0)
"""What a thread has before its first event: no room."""


class EventBuffer:
    """The events of one thread: that thread alone adds, one other takes."""

    __slots__ = ("_before", "_taken", "chunk", "dropped", "full")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.chunk = NONE
        self.full: deque[Chunk] = deque()
        self.dropped = 0
        self._before, self._taken = -FULL, 0  # bytes of all chunks before this one (NONE counts as a full one)

    @property
    def waiting(self) -> int:
        """Events that were added and not taken. Any thread may ask; it may be out by a chunk while one is added."""
        return (self._before + self.chunk.used - self._taken) // SIZE

    def grow(self) -> Chunk:
        """A chunk with room, after the one that is full."""
        fresh = Chunk()
        if self.chunk.used >= FULL:  # else a collection in the line above was an event of this thread, and came here
            if self.chunk is not NONE:
                self.full.append(self.chunk)
            self.chunk = fresh
            self._before += FULL
        return self.chunk

    def take(self) -> bytes:
        """What was added since the last time, packed as FORMAT says, oldest first. What it raises (MemoryError) leaves
        everything where it was."""
        last = self.chunk  # looked at before the full ones, as it may become one of them meanwhile
        full = [self.full[i] for i in range(len(self.full))]
        ends = list[tuple[Chunk, int]]()
        for chunk in [*takewhile(lambda chunk: chunk is not last, full), *([last] if last is not NONE else [])]:
            ends.append((chunk, chunk.written()))
            if ends[-1][1] < FULL:  # those behind an event that is being written wait with it
                break
        taken = b"".join([memoryview(chunk.buffer)[chunk.read : end] for chunk, end in ends])
        for chunk, end in ends:
            chunk.read = end
        while self.full and self.full[0].read >= FULL:
            self.full.popleft()
        self._taken += len(taken)
        return taken


class Codes(Generic[T]):
    """Numbers for texts, given once and for all. Usable from any thread, without a lock.

    first: has number 0. others: stands for all that come when there are MOST_TEXTS already.
    """

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
        """Number -> text."""
        return {code: text for text, code in list(self._codes.items())}


class EventNames(NamedTuple):
    """What the numbers of events stand for."""

    op: Mapping[int, str]
    detail: Mapping[int, str]
    where: Mapping[int, tuple[str, str]]
    """Role and place."""
