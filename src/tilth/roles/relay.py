"""Relay of weights: their newest complete version lies in memory that all processes of a machine map, to be fetched at
any time (Laminar, arXiv 2510.12633, section 4).

Ranks of the policy write their boxes and go on; a receiver copies the boxes that it wants between two rounds of its
own. Nobody waits for anybody. A version is written over the older of two slots, so a reader has the time of a whole
step to read the newer one. Each writer voids its stamp of a slot, writes, sets the checksums of what it wrote, and the
stamp last: a version is there once all its stamps are. A stamp covers the checksums, and these the bits, so what is
read while it is written over, or was changed by anything else, never passes for weights, whatever the order in which a
processor shows writes to others.
"""

import fcntl
import hashlib
import itertools
import json
import math
import mmap
import os
import secrets
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import numpy as np
import pyarrow
import torch
import xxhash
from torch import Tensor

from tilth.core.batch import Jagged
from tilth.core.checksum import checksum
from tilth.core.errors import ArgumentError, StorageError, WeightMismatch
from tilth.core.files import writing
from tilth.core.layout import Layout
from tilth.parallel.reshard import Part, Parts, allocate
from tilth.plan.reshard import RelayPiece
from tilth.roles import relay_delta
from tilth.roles.weight_sync import Receiver, verify_weights

SLOTS = 2
TRIES = 4
"""Times that a reader begins again because two newer versions were written while it read."""
LIMIT = 60.0
"""Seconds that a process waits for another one that makes the file."""
ALIGNED = 64
_TABLE = 48
"""Bytes of the table's hash at the begin of the file; the rest of ``ALIGNED`` are its ``id``."""
_STAMP = struct.Struct("<qqQ")
"""Number of the publication (0: void), version, hash of both and of the checksums that the writer set."""


class Publication(NamedTuple):
    """A version of the weights in relays. number: of the publication; it grows, also where a run that goes back to a
    checkpoint, or a step that runs again, writes a version again."""

    number: int
    version: int


Packed = Mapping[int, Callable[[], Jagged]]
"""Writer -> what it has packed of a version."""


class _Found(NamedTuple):
    """A complete version, where it lies, and the checksums of its pieces."""

    slot: int
    publication: Publication
    sums: list[int]


class _TornRead(Exception):
    """A slot was written over while it was read."""


class Relay:
    """Two versions of the weights in a file that processes map. Writers and readers need no order in which to open it.

    A file in the folder of a cluster's session (``/dev/shm``) outlives the workers that write and read it, and goes
    with the session, or, if that is killed, when the next one starts; otherwise ``remove`` it.
    """

    def __init__(self, path: Path, pieces: Sequence[RelayPiece], dtype: torch.dtype) -> None:
        """pieces: ``plan.reshard.relay_pieces``; dtype: of the receivers. All who open a file give the same.

        StorageError without room; WeightMismatch for a file of other pieces or another dtype.
        """
        self.path, self.pieces, self.dtype = path, tuple(pieces), dtype
        self.writers = sorted({piece.writer for piece in self.pieces})
        self._mine: dict[int, list[int]] = defaultdict(list)
        self._parts: dict[str, list[int]] = defaultdict(list)
        for i, piece in enumerate(self.pieces):
            self._mine[piece.writer].append(i)
            self._parts[piece.name].append(i)
        sizes = [piece.box.numel * dtype.itemsize for piece in self.pieces]
        self._sums = _aligned(_STAMP.size * len(self.writers))
        starts = list(itertools.accumulate(map(_aligned, (8 * len(sizes), *sizes)), initial=self._sums))
        self._starts, self._sizes, self._slot, self.nbytes = starts[1:], sizes, starts[-1], sum(sizes)
        words = json.dumps([str(dtype), [[p.name, p.box.offset, p.box.size, p.writer] for p in self.pieces]])
        self._table = hashlib.blake2b(words.encode(), digest_size=_TABLE).digest()
        self._file = self._opened()
        self._map = mmap.mmap(self._file, 0)
        self._data = torch.frombuffer(self._map, dtype=torch.uint8)
        self.id = self._map[_TABLE:ALIGNED].hex()
        """The same for all who have this file open, and for no others."""
        if self._map[:_TABLE] != self._table:
            message = f"the relay {path} holds other boxes of the weights than this worker; remove it"
            raise WeightMismatch(message, key="relay.pieces")

    def _opened(self) -> int:
        """Open the file, and make it first if there is none: whole, with memory reserved, or not at all."""
        with writing(self.path):
            if not self.path.exists():
                with _locked(self.path.parent):
                    self._make()
            return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def _make(self) -> None:
        """Make the file, unless another process was first; memory is reserved once."""
        if self.path.exists():
            return
        with NamedTemporaryFile(dir=self.path.parent, prefix=f".{self.path.name}-") as file:
            os.posix_fallocate(file.fileno(), 0, ALIGNED + SLOTS * self._slot)
            file.write(self._table + secrets.token_bytes(ALIGNED - _TABLE))
            file.flush()
            os.link(file.name, self.path)

    def close(self) -> None:
        """Let go of the file; its memory stays mapped as long as tensors of it are in use."""
        os.close(self._file)

    def remove(self) -> None:
        """Remove the file. Those who have it open are told when they read next."""
        self.path.unlink(missing_ok=True)

    # ---- slots ----

    @property
    def newest(self) -> Publication | None:
        """Newest complete version; None before the first."""
        found = self._newest()
        return None if found is None else found.publication

    def _newest(self) -> _Found | None:
        found = [one for one in map(self._find, range(SLOTS)) if one is not None]
        return max(found, key=lambda one: one.publication.number, default=None)

    def _find(self, slot: int) -> _Found | None:
        """Return the version in a slot; None unless all writers have completed the same one."""
        sums = self._sums_of(slot).copy()
        stamps = {self._stamp(slot, writer, sums) for writer in self.writers}
        publication = stamps.pop()
        return None if stamps or publication is None else _Found(slot, publication, sums.tolist())

    def _stamp(self, slot: int, writer: int, sums: np.ndarray) -> Publication | None:
        number, version, digest = _STAMP.unpack_from(self._map, self._place(slot, writer))
        right = number > 0 and digest == self._digest(number, version, writer, sums)
        return Publication(number, version) if right else None

    def _set_stamp(self, slot: int, writer: int, publication: Publication | None) -> None:
        """Stamp a slot as this writer, its number last; None: void it."""
        place = self._place(slot, writer)
        if publication is not None:
            digest = self._digest(*publication, writer, self._sums_of(slot))
            self._map[place + 8 : place + _STAMP.size] = _STAMP.pack(*publication, digest)[8:]
        self._map[place : place + 8] = struct.pack("<q", publication.number if publication else 0)

    def _digest(self, number: int, version: int, writer: int, sums: np.ndarray) -> int:
        return xxhash.xxh3_64_intdigest(struct.pack("<qq", number, version) + sums[self._mine[writer]].tobytes())

    def _place(self, slot: int, writer: int) -> int:
        return ALIGNED + slot * self._slot + self.writers.index(writer) * _STAMP.size

    def _sums_of(self, slot: int) -> np.ndarray:
        """Checksums of all pieces of a slot, uint64 in the file itself."""
        return np.frombuffer(self._map, np.uint64, len(self.pieces), ALIGNED + slot * self._slot + self._sums)

    def _bytes(self, slot: int, piece: int) -> Tensor:
        start = ALIGNED + slot * self._slot + self._starts[piece]
        return self._data[start : start + self._sizes[piece]]

    def _values(self, slot: int, piece: int) -> Tensor:
        return self._bytes(slot, piece).view(self.dtype).view(self.pieces[piece].box.size)

    # ---- the policy's side ----

    @torch.no_grad()
    def publish(self, own: Iterable[Parts], publication: Publication, writer: int, keeps: Container[str] = ()) -> None:
        """Write this writer's pieces of a version; it is there once all writers have.

        own: its parts of the parameters, some at a time, in any dtype and on any device. publication: the same on all
        writers, with a number that no earlier attempt had. keeps: names that ``own`` leaves out, which have the values
        of the newest version, such as a base that adapters change. ArgumentError for any other one that is left out,
        or for a number that is not above the newest; the version is not there then.
        """
        newest = self._newest()
        if newest is not None and publication.number <= newest.publication.number:
            message = f"publication {publication.number} is not after {newest.publication.number}, the newest"
            raise ArgumentError(message, key="publication.number")
        slot = 0 if newest is None else 1 - newest.slot
        held = self._stamp(slot, writer, self._sums_of(slot)) is not None
        self._set_stamp(slot, writer, None)
        sums, left = self._sums_of(slot), dict.fromkeys(self._mine[writer])
        for parts in own:
            for name in parts:
                for i in (i for i in self._parts[name] if self.pieces[i].writer == writer):
                    values = parts[name].piece(self.pieces[i].box).to(self.dtype)
                    sums[i] = checksum(values)
                    self._values(slot, i).copy_(values)
                    left.pop(i)
        for i in left:
            name = self.pieces[i].name
            if newest is None or name not in keeps:
                message = f"version {publication.version} of the weights lacks {name} of rank {writer}"
                raise ArgumentError(message, key=name)
            self._keep(slot, i, newest, held=held)
        self._set_stamp(slot, writer, publication)

    # ---- other nodes ----

    def pack(self, publication: Publication, writer: int, since: int, keeps: Container[str] = ()) -> Jagged:
        """Return this writer's pieces of a version that it has written, for relays of other nodes.

        since: number of the publication that those have, whose changes are enough; 0: whole pieces. WeightMismatch if
        it is not the one before. keeps: names whose values they have for good. Rows: the checksums, then each piece
        (``relay_delta``), or nothing of one that they keep, uint8.
        """
        slot = next(s for s in range(SLOTS) if self._stamp(s, writer, self._sums_of(s)) == publication)
        old = self._find(1 - slot)
        if since and (old is None or old.publication.number != since):
            raise self._no_base(since, old)
        mine = self._mine[writer]
        rows = [self._sums_of(slot)[mine].view(np.uint8)]
        for i in mine:
            if self.pieces[i].name in keeps:
                rows.append(np.empty(0, np.uint8))
                continue
            new = self._bytes(slot, i).numpy()
            rows.append(relay_delta.packed(new, self._bytes(old.slot, i).numpy()) if since and old else new)
        return Jagged.of(rows)

    def unpack(self, publication: Publication, since: int, packed: Packed) -> None:
        """Write a version that writers on other nodes have packed; pieces that are there stay. No one else may write.

        WeightMismatch if this relay's newest version is not the one that it changes, or for pieces that are none.
        """
        newest = self._newest()
        if since and (newest is None or newest.publication.number != since):
            raise self._no_base(since, newest)
        slot = 0 if newest is None else 1 - newest.slot
        for writer, column in packed.items():
            sums, mine = self._sums_of(slot), self._mine[writer]
            stamp = self._stamp(slot, writer, sums)
            if stamp == publication:
                continue
            self._set_stamp(slot, writer, None)
            rows = column()
            for row, i in enumerate(mine, 1):
                if not len(rows.row(row)):
                    if newest is None:
                        raise self._no_base(since, newest)
                    self._keep(slot, i, newest, held=stamp is not None)
                    continue
                old = self._bytes(slot if newest is None else newest.slot, i).numpy()
                try:
                    self._bytes(slot, i).numpy()[:] = relay_delta.unpacked(rows.row(row), old)
                except (OSError, pyarrow.ArrowException) as error:
                    name, version = self.pieces[i].name, publication.version
                    message = f"{name} of version {version} arrived damaged at the relay {self.path}: {error}"
                    raise WeightMismatch(message, key=name) from None
            sums[mine] = rows.row(0).view(np.uint64)
            self._set_stamp(slot, writer, publication)

    def _keep(self, slot: int, piece: int, newest: _Found, *, held: bool) -> None:
        """Let a piece of a slot have the values of the newest version. held: the slot's checksums are of its bits."""
        sums = self._sums_of(slot)
        if not held or sums[piece] != newest.sums[piece]:
            self._bytes(slot, piece).copy_(self._bytes(newest.slot, piece))
            sums[piece] = newest.sums[piece]

    def _no_base(self, since: int, found: _Found | None) -> WeightMismatch:
        has = "none" if found is None else str(found.publication.number)
        message = f"changes since publication {since} of the weights have no use in the relay {self.path}, which has"
        return WeightMismatch(f"{message} {has}: all versions since the last whole one are needed", key="relay.since")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other process of this node be in this block: versions come over a network in it, however long that
        takes, and calls have limits of their own."""
        with writing(self.path), _locked(self.path.parent, math.inf):
            yield

    # ---- a receiver's side ----

    def pull(
        self,
        into: Receiver,
        wanted: Mapping[str, Layout],
        rank: int,
        have: Publication | None = None,
        *,
        leaves: Container[str] = (),
        device: torch.device | str = "cpu",
    ) -> Publication | None:
        """Let a receiver take the newest complete version, unless it has that; return what it then has.

        wanted: its layouts of the parameters, in its order; rank: of its part; leaves: those that it has for good,
        which are compared only; device: that it computes on.
        Ranks of one engine may find different versions: whoever calls them compares, and calls again.

        WeightMismatch names a tensor whose bits are not those that were written, here or then in the receiver's live
        storage, or says that versions came faster than they could be read; StorageError if the relay was removed.
        """
        for _ in range(TRIES):
            found = self._there()
            if found is None or (have is not None and found.publication.number <= have.number):
                return have
            have, expected = None, dict[str, int]()  # from here on it holds neither
            try:
                stream = self._stream(found, wanted, rank, device, expected)
                into.receive(((n, t) for n, t in stream if n not in leaves), found.publication.version)
            except _TornRead:
                continue
            if into.tolerance == 0:
                verify_weights(expected, into.fingerprint())
            return found.publication
        message = f"the relay {self.path.name} was written over {TRIES} times while it was read"
        raise WeightMismatch(f"{message}; update the policy less often, or use a smaller bucket", key="relay.torn")

    def _there(self) -> _Found | None:
        """Return the newest version; StorageError if the file was removed."""
        if not os.fstat(self._file).st_nlink:
            raise StorageError(
                f"the relay {self.path} was removed while it was in use: its node has left, or its run has ended",
                key="weight_sync.relay",  # the role to make again
            )
        return self._newest()

    def _stream(
        self,
        found: _Found,
        wanted: Mapping[str, Layout],
        rank: int,
        device: torch.device | str,
        expected: dict[str, int],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a rank's part of each tensor with the bits that were written; ``expected`` gets their checksums."""
        like = torch.empty(0, dtype=self.dtype, device=device)
        for name, layout in wanted.items():
            part = allocate({name: layout}, rank, like).get(name)
            if part is None:
                yield name, like.new_empty(0, *layout.shape[1:])
                continue
            inside = [i for i in self._parts[name] if part.box.contains(self.pieces[i].box)]
            self._fill(found, inside, part)
            expected[name] = found.sums[inside[0]] if len(inside) == 1 else checksum(part.values)
            yield name, part.values

    def _fill(self, found: _Found, inside: Sequence[int], part: Part) -> None:
        """Copy pieces into a part; _TornRead, or WeightMismatch, unless they have the bits that were written."""
        for i in inside:
            place = part.piece(self.pieces[i].box)
            place.copy_(self._values(found.slot, i))
            if checksum(place) != found.sums[i]:
                raise self._damaged(found, i)

    def _damaged(self, found: _Found, piece: int) -> Exception:
        """Return what has happened to a piece that is not what was written."""
        if self._find(found.slot) != found:
            return _TornRead()
        name, number = self.pieces[piece].name, found.publication.version
        message = f"{name} in the relay {self.path} has other bits than version {number} was written with"
        return WeightMismatch(message, key=name)


@contextmanager
def _locked(folder: Path, limit: float = LIMIT) -> Iterator[None]:
    """Hold the lock of a folder, which also ends with this process. OSError if another one keeps it for ``limit``
    seconds."""
    place, until = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + limit
    try:
        while True:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another process has held the lock of {folder} for {limit:g} s") from None
                time.sleep(0.05)  # a lock with a limit: nothing to wait on
        yield
    finally:
        fcntl.flock(place, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
        os.close(place)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
