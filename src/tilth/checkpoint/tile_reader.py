"""Read parts of stored pieces into memory: only the tiles that are needed, each verified while it is in a core's cache.

A piece is a matrix of rows (``planning.tiles``), of which a reader wants some rows and a range of columns. The tiles
that meet those are read in steps of about ``STEP`` bytes: straight into the target where its memory has the same order,
else into a scratch buffer and from there to their place.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from tilth.checkpoint.manifest import Piece
from tilth.checkpoint.planning import tiles
from tilth.checkpoint.storage import Ranges, Storage
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Shape, interval_boxes, runs

STEP = 1 << 19  # bytes that are read and verified at a time; with the copy that is hashed they fit into an L2 cache
SMALL = 1 << 16  # neighbouring pieces of at most this many bytes are read from a disk together
BLOCK = 1 << 23  # bytes of one request to a remote store
REQUESTS = 8  # concurrent requests to a remote store


class Want(NamedTuple):
    """A part of a stored piece to read."""

    tensor: str
    piece: Piece
    itemsize: int
    common: Box  # the part, in coordinates of the piece
    target: Tensor | None  # of the size of ``common``, any device and strides; None: only verify


class Fetched(NamedTuple):
    """Result of reading: an error for each tensor and file where it is corrupt, and the bytes read from storage."""

    problems: list[CheckpointError]
    nbytes: int


Progress = Callable[[int], None]
"""Called with the number of further bytes that have been read."""


def fetch(storage: Storage, wants: Sequence[Want], threads: int = 1, progress: Progress | None = None) -> Fetched:
    """Read and verify all wants, also behind damage; OSError if the storage fails.

    threads: readers of a local disk, each with a part of the bytes. A remote store gets several requests at a time.
    """
    ordered = sorted(wants, key=lambda want: (want.piece.file, want.piece.byte0))
    parts = [ordered] if storage.remote or threads == 1 else _shares(ordered, threads)
    readers = [_Reader(storage, progress) for _ in parts]
    if len(parts) == 1:
        readers[0].read(parts[0])
    else:
        with ThreadPoolExecutor(len(parts), "tilth-read") as pool:
            for done in [pool.submit(reader.read, part) for reader, part in zip(readers, parts)]:
                done.result()
    corrupt = dict.fromkeys(found for reader in readers for found in reader.corrupt)
    problems = [
        CheckpointError(f"tensor {name} is corrupt in file {file}", key=f"{name}.checksum") for name, file in corrupt
    ]
    return Fetched(problems, sum(reader.nbytes for reader in readers))


def _shares(wants: Sequence[Want], parts: int) -> list[Sequence[Want]]:
    """Cut wants into runs of about the same number of bytes; into fewer parts where there is little to read."""
    ends = np.cumsum([want.common.numel * want.itemsize for want in wants])
    total = int(ends[-1]) if len(ends) else 0
    parts = max(1, min(parts, total // (4 * STEP)))
    cuts = [0, *np.searchsorted(ends, [total * i // parts for i in range(1, parts)]).tolist(), len(wants)]
    return [wants[i:j] for i, j in pairwise(cuts)]


class _PieceCut(NamedTuple):
    """The wanted part of a piece, as rows under tiles, and the tiles that contain it. The elements of a single row
    count as rows, so that its tiles are bands of rows."""

    leading: Shape
    width: int
    rows: Sequence[int]  # cuts of the tiles, from 0 to the end
    columns: Sequence[int]
    wanted: Box  # rows, as a box of ``leading``
    interval: tuple[int, int]  # rows [first, last) if they are neighbours, else (0, 0)
    left: int  # columns [left, right)
    right: int
    first: int  # bands of columns [first, last) that contain them
    last: int
    bands: list[tuple[int, int]]  # runs of bands of rows
    itemsize: int

    @property
    def edges(self) -> tuple[int, int]:
        """Columns [start, stop) that are read."""
        return self.columns[self.first], self.columns[self.last]

    @property
    def start(self) -> int:
        return self.columns[self.first]

    @property
    def nbytes(self) -> int:
        """Bytes of a row that are read."""
        return (self.columns[self.last] - self.start) * self.itemsize

    @property
    def stride(self) -> int:
        """Bytes from a row to the next."""
        return self.width * self.itemsize


@lru_cache(maxsize=4096)
def _cut(size: Shape, itemsize: int, common: Box) -> _PieceCut:
    rows, columns = tiles(size, itemsize)
    if math.prod(size[:-1]) == 1:  # one row, or a single number
        leading, width, rows, columns = size[-1:] or (1,), 1, columns, [0, 1]
        wanted, left, right = Box(common.offset[-1:] or (0,), common.size[-1:] or (1,)), 0, 1
    else:
        leading, width, left = size[:-1], size[-1], common.offset[-1]
        wanted, right = Box(common.offset[:-1], common.size[:-1]), left + common.size[-1]
    first, last = bisect_right(columns, left) - 1, bisect_left(columns, right)
    found = runs(wanted, leading)
    interval = (found.starts[0], found.starts[0] + found.length) if len(found.starts) == 1 else (0, 0)
    bands: list[tuple[int, int]] = []
    for start in found.starts:
        i, j = bisect_right(rows, start) - 1, bisect_left(rows, start + found.length)
        if bands and i <= bands[-1][1]:
            i = bands.pop()[0]
        bands.append((i, j))
    return _PieceCut(leading, width, rows, columns, wanted, interval, left, right, first, last, bands, itemsize)


class _Step(NamedTuple):
    """Rows [start, stop) that are read at a time: ``bands`` whole bands of one height from ``first`` on, or a part of
    one band (0)."""

    first: int
    bands: int
    start: int
    stop: int


def _steps(cut: _PieceCut) -> Iterator[_Step]:
    rows, nbytes = cut.rows, cut.nbytes
    for i, end in cut.bands:
        while i < end:
            start, height = rows[i], rows[i + 1] - rows[i]
            if height * nbytes > STEP and height > 1:
                some = max(1, STEP // nbytes)
                yield from (_Step(i, 0, s, min(s + some, rows[i + 1])) for s in range(start, rows[i + 1], some))
                i += 1
                continue
            count = 1
            most = min(end - i, max(1, STEP // max(1, height * nbytes)))
            while count < most and rows[i + count + 1] - rows[i + count] == height:
                count += 1
            yield _Step(i, count, start, rows[i + count])
            i += count


class _TileHasher:
    """Checksums of the tiles of a piece, from its rows step by step."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._open: list[xxh3_64] = []
        self._copy = np.empty(0, np.uint8)

    def add(self, cut: _PieceCut, step: _Step, rows: memoryview) -> None:
        columns, bands = cut.last - cut.first, max(1, step.bands)
        if columns > 1:
            rows = self._by_columns(rows, bands, columns, cut)
        size = len(rows) // (bands * columns)
        parts = (rows[i : i + size] for i in range(0, len(rows), size))
        if step.bands:
            self.found += map(xxh3_64_intdigest, parts)
            return
        self._open = self._open or [xxh3_64() for _ in range(columns)]  # tiles larger than a step
        for hasher, part in zip(self._open, parts):
            hasher.update(part)
        if step.stop == cut.rows[step.first + 1]:
            self.found += [hasher.intdigest() for hasher in self._open]
            self._open = []

    def _by_columns(self, rows: memoryview, bands: int, columns: int, cut: _PieceCut) -> memoryview:
        """Copy to [bands of rows, bands of columns, height, bytes]: the rows of each tile one after another."""
        if len(self._copy) < len(rows):
            self._copy = np.empty(max(2 * STEP, len(rows)), np.uint8)
        shape = (bands, len(rows) // (bands * cut.nbytes), columns, cut.nbytes // columns)
        source = np.frombuffer(rows, np.uint8).reshape(shape).swapaxes(1, 2)
        copy = self._copy[: len(rows)]
        np.copyto(copy.reshape(source.shape), source)
        return copy.data


def tile_checksums(data: memoryview, size: Sequence[int], itemsize: int) -> list[int]:
    """Return the xxh3_64 of the tiles of a piece, in their order; data: its bytes, row-major."""
    if not len(data):
        return []
    cut, hasher = _cut(tuple(size), itemsize, Box.whole(size)), _TileHasher()
    for step in _steps(cut):
        hasher.add(cut, step, data[step.start * cut.stride : step.stop * cut.stride])
    return hasher.found


class _Reader:
    """Read wants, file after file, with buffers of its own."""

    def __init__(self, storage: Storage, progress: Progress | None) -> None:
        self.corrupt: list[tuple[str, str]] = []
        self.nbytes = 0
        self._storage, self._progress = storage, progress
        self._scratch = torch.empty(2 * STEP, dtype=torch.uint8)
        self._hasher = _TileHasher()

    def read(self, wants: Sequence[Want]) -> None:
        """Read wants sorted by file."""
        files = [(file, list(group)) for file, group in groupby(wants, lambda want: want.piece.file)]
        with torch.no_grad():
            if self._storage.remote:
                with _StoreSource(self._storage, files) as far:
                    for file, some in files:
                        far.file = file
                        self._read_all(far, some)
                return
            for file, some in files:
                with self._storage.ranges(file) as ranges:
                    self._read_all(_DiskSource(ranges, some, self._storage.gap), some)

    def _read_all(self, source: Ranges, wants: list[Want]) -> None:
        """Read the wants of one file."""
        for want in wants:
            before = source.bytes_read
            sound = self._one_tile(source, want) if _is_one_tile(want) else self._tiles(source, want)
            if not sound:
                self.corrupt.append((want.tensor, want.piece.file))
            self.nbytes += source.bytes_read - before
            if self._progress:
                self._progress(source.bytes_read - before)

    def _one_tile(self, source: Ranges, want: Want) -> bool:
        """Read a small piece as a whole, the case of most tensors; True if it is sound."""
        piece, target = want.piece, want.target
        direct = _memory(target)
        into = self._room(piece.nbytes) if direct is None else direct
        source.read_into(piece.byte0, into)
        if target is not None and direct is None:
            target.copy_(self._scratch[: piece.nbytes].view(target.dtype).view(piece.size))
        return xxh3_64_intdigest(into) == piece.checksums[0]

    def _tiles(self, source: Ranges, want: Want) -> bool:
        """Read any part of any piece; True if its tiles are sound."""
        cut = _cut(want.piece.size, want.itemsize, want.common)
        straight = _memory(want.target) if (cut.left, cut.right) == cut.edges else None
        self._hasher.found = []
        for step in _steps(cut):
            rows = slice(step.start, step.stop)
            into = _rows(straight, cut, rows)
            direct = into is not None
            if into is None:
                into = self._room((step.stop - step.start) * cut.nbytes)
            at = want.piece.byte0 + rows.start * cut.stride + cut.start * cut.itemsize
            if cut.stride == cut.nbytes:
                source.read_into(at, into)
            else:
                source.read_rows(at, cut.stride, cut.nbytes, into)
            self._hasher.add(cut, step, into)
            if want.target is not None and not direct:
                _place(want.target, self._scratch, cut, rows)
        return self._hasher.found == _expected(want.piece, cut)

    def _room(self, nbytes: int) -> memoryview:
        if len(self._scratch) < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch.numpy().data[:nbytes]


def _is_one_tile(want: Want) -> bool:
    return len(want.piece.checksums) == 1 and want.common.size == want.piece.size


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bytes, uint8 [nbytes]; ``view`` would keep the stride of one element."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _memory(target: Tensor | None) -> memoryview | None:
    """Return the bytes of a contiguous CPU tensor, else None."""
    if target is None or not target.is_contiguous() or target.device.type != "cpu":
        return None
    return as_bytes(target).numpy().data


def _rows(straight: memoryview | None, cut: _PieceCut, rows: slice) -> memoryview | None:
    """Return the place of some rows of a piece in the target, if everything that is read of them is wanted."""
    start, stop = cut.interval
    if straight is None or rows.start < start or rows.stop > stop:
        return None
    return straight[(rows.start - start) * cut.nbytes : (rows.stop - start) * cut.nbytes]


def _place(target: Tensor, scratch: Tensor, cut: _PieceCut, rows: slice) -> None:
    """Copy the wanted part of some rows from the scratch buffer to the target."""
    target = target.reshape(*cut.wanted.size, cut.right - cut.left)  # a view: only dimensions of size 1 change
    width = cut.nbytes // cut.itemsize
    read = scratch[: (rows.stop - rows.start) * cut.nbytes].view(target.dtype).view(-1, width)
    columns, at = slice(cut.left - cut.start, cut.right - cut.start), 0
    for box in interval_boxes(cut.leading, rows.start, rows.stop):
        common = box.intersect(cut.wanted)
        if common:
            block = read[at : at + box.numel].view(*box.size, width)
            target[common.within(cut.wanted).slices].copy_(block[(*common.within(box).slices, columns)])
        at += box.numel


def _expected(piece: Piece, cut: _PieceCut) -> list[int]:
    columns = len(cut.columns) - 1
    bands = (band for i, j in cut.bands for band in range(i, j))
    if cut.last - cut.first == columns and len(cut.bands) == 1:
        return list(piece.checksums[cut.bands[0][0] * columns : cut.bands[0][1] * columns])
    return [c for band in bands for c in piece.checksums[band * columns + cut.first : band * columns + cut.last]]


def _extents(wants: Iterable[Want], gap: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals of a file to read, in order; rows at most ``gap`` apart are one with what is between them.

    The sources are to be read in this order; another one costs more requests."""
    for want in wants:
        start = want.piece.byte0
        if _is_one_tile(want):
            yield start, start + want.piece.nbytes
            continue
        cut = _cut(want.piece.size, want.itemsize, want.common)
        rows, left = cut.rows, start + cut.start * cut.itemsize
        for i, j in cut.bands:
            if cut.stride - cut.nbytes <= gap:
                yield left + rows[i] * cut.stride, left + (rows[j] - 1) * cut.stride + cut.nbytes
            else:
                begins = (left + row * cut.stride for row in range(rows[i], rows[j]))
                yield from ((begin, begin + cut.nbytes) for begin in begins)


def _joined(extents: Iterable[tuple[int, int]], gap: int, most: int) -> Iterator[tuple[int, int]]:
    """Join neighbours up to ``most`` bytes."""
    joined: tuple[int, int] | None = None
    for start, stop in extents:
        if joined and start - joined[1] <= gap and stop - joined[0] <= most:
            joined = joined[0], max(stop, joined[1])
            continue
        if joined:
            yield joined
        joined = start, stop
    if joined:
        yield joined


class _DiskSource(Ranges):
    """A local file: small neighbours are read together, everything else straight to its target."""

    def __init__(self, ranges: Ranges, wants: list[Want], gap: int) -> None:
        self._ranges = ranges
        few = _extents((want for want in wants if want.piece.nbytes <= SMALL), 0)
        small = (extent for extent in few if extent[1] - extent[0] <= SMALL)
        self._blocks = _joined(small, gap, STEP)
        self._data = np.empty(STEP, np.uint8).data
        self._start, self._stop = next(self._blocks, _END)
        self._loaded = False

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self._ranges.bytes_read

    def read_into(self, offset: int, into: memoryview) -> None:
        while offset >= self._stop:
            (self._start, self._stop), self._loaded = next(self._blocks, _END), False
        start, stop = self._start, self._stop
        if offset < start or offset + len(into) > stop or stop - start == len(into):
            self._ranges.read_into(offset, into)
            return
        if not self._loaded:
            self._ranges.read_into(start, self._data[: stop - start])
            self._loaded = True
        into[:] = self._data[offset - start : offset - start + len(into)]

    def read_rows(self, offset: int, stride: int, nbytes: int, into: memoryview) -> None:
        self._ranges.read_rows(offset, stride, nbytes, into)


_END = (1 << 63, 1 << 63)


class _BlockRead(NamedTuple):
    """A request to a store and its future data."""

    file: str
    start: int
    stop: int
    data: "Future[memoryview]"


class _StoreSource(Ranges):
    """Files of a store: near ranges share a request, and several requests run at a time, ahead of use."""

    def __init__(self, storage: Storage, files: Sequence[tuple[str, list[Want]]]) -> None:
        self.file = ""  # the file that is read now
        self.bytes_read = 0
        self._storage = storage
        self._pool = ThreadPoolExecutor(REQUESTS, "tilth-read")
        self._later = ((file, *block) for file, wants in files for block in _requests(wants, storage.gap))
        self._coming: deque[_BlockRead] = deque()

    def read_into(self, offset: int, into: memoryview) -> None:
        while len(into):
            block = self._block(offset)
            if block is None:
                self.bytes_read += len(into)
                into[:] = self._request(self.file, offset, offset + len(into))
                return
            part = block.data.result()[offset - block.start :][: len(into)]
            into[: len(part)] = part
            into, offset = into[len(part) :], offset + len(part)

    def _block(self, offset: int) -> _BlockRead | None:
        """Return the first request with this byte of the file and drop those before it, which served earlier reads."""
        self._ask()
        for i, block in enumerate(self._coming):
            if block.file == self.file and block.start <= offset < block.stop:
                for _ in range(i):
                    self._coming.popleft()
                return block
        return None

    def _ask(self) -> None:
        while len(self._coming) < 2 * REQUESTS and (request := next(self._later, None)):
            self.bytes_read += request[2] - request[1]
            self._coming.append(_BlockRead(*request, self._pool.submit(self._request, *request)))

    def _request(self, file: str, start: int, stop: int) -> memoryview:
        data = memoryview(bytearray(stop - start))
        with self._storage.ranges(file) as ranges:
            ranges.read_into(start, data)
        return data

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _requests(wants: list[Want], gap: int) -> Iterator[tuple[int, int]]:
    for start, stop in _joined(_extents(wants, gap), gap, BLOCK):
        yield from ((at, min(stop, at + BLOCK)) for at in range(start, stop, BLOCK))
