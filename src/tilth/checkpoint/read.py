"""Read tensors by name and box: only the tiles that are needed, each verified while it is read.

Replicas that restore the same parts read disjoint tensors and broadcast them to each other, so that together they read
each byte from storage once (section 4.1 of ByteCheckpoint, arXiv 2407.20143).
"""

import errno
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash
from torch import Tensor

from tilth.checkpoint.directory import complete, quarantine, step_of
from tilth.checkpoint.manifest import Manifest, TensorEntry, load_manifest, raise_problems
from tilth.checkpoint.snapshot import held, views
from tilth.checkpoint.storage import Location, Storage, is_url, split, storage_of
from tilth.checkpoint.tile_reader import REQUESTS, Want, as_bytes, fetch
from tilth.core.errors import CheckpointError, StorageError, TilthError
from tilth.core.layout import Box, Layout
from tilth.plan.packing import balance, portions

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
        yield from portions(alike, lambda tensor: tensor.nbytes, MESSAGE)


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


# ---- a checkpoint ----


_THREADS = 4
_HEADER = 8 << 20  # bytes of a header that are read at a time

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and their total."""


def open_checkpoint(path: Location, share: Share | None = None) -> "Checkpoint":
    """Open a checkpoint, a directory or a URL: read the manifest and compare the sizes of the files.

    share: ranks that all open it now; a failure of one is raised on all. CheckpointError if the manifest or a file is
    missing, torn or of another checkpoint; StorageError if the store fails.
    """
    return _open(path) if share is None else share.each(lambda: _open(path))


def _open(path: Location) -> "Checkpoint":
    storage = storage_of(path)
    if not is_url(path) and not Path(path).is_dir():
        raise CheckpointError(f"{path} is not a checkpoint: no such directory", key="path")
    with _reading(path):
        manifest = load_manifest(storage, "")
        promised = step_of(path)
        if promised is not None and promised != manifest.step:
            message = f"{path} holds the manifest of step {manifest.step}, not of step {promised}"
            raise CheckpointError(message, key="path.step")
        raise_problems(path, damaged_files(storage, manifest).values())
    return Checkpoint(path, storage, manifest)


def newest_valid(
    root: Location, say: Callable[[str], None], check: Callable[["Checkpoint"], None] = lambda checkpoint: None
) -> "Checkpoint":
    """Return the newest checkpoint under ``root`` of which every byte is what was saved.

    check: raises CheckpointError for a checkpoint to pass over, which stays where it is. A damaged one is put aside
    (``quarantine``), so that it is never taken again. ``say`` gets a line for each. CheckpointError if none is left;
    StorageError, and nothing is put aside, if the store itself fails.
    """
    for path in reversed(complete(root)):
        try:
            checkpoint = open_checkpoint(path)
            try:
                check(checkpoint)
            except CheckpointError as error:
                say(f"{error}; it is passed over")
                continue
            checkpoint.verify()
        except CheckpointError as error:
            aside = quarantine(path, str(error))
            say(f"{error}; it is put aside" + (f" as {aside}" if aside != path else ""))
            continue
        return checkpoint
    raise CheckpointError(f"there is no valid checkpoint under {root}", key="root")


def damaged_files(storage: Storage, manifest: Manifest) -> dict[str, CheckpointError]:
    """Return an error, by file name, for each data file that is missing or not of the size in the manifest."""
    names = list(manifest.files)
    sizes = _each(storage, storage.size, names)
    there = storage.names() if None in sizes else []
    found = {}
    for name, size in zip(names, sizes):
        if size is None and name in there:
            found[name] = CheckpointError(f"file {name} is no regular file of this folder", key=f"{name}.type")
        elif size is None:
            found[name] = CheckpointError(f"file {name} is missing", key=f"{name}.missing")
        elif size != manifest.files[name].nbytes:
            message = f"file {name} has {size} bytes, expected {manifest.files[name].nbytes}"
            found[name] = CheckpointError(message, key=f"{name}.nbytes")
    return found


def _each(storage: Storage, ask: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """Call ``ask`` for each file; for a store several calls run at a time."""
    if not storage.remote:
        return list(map(ask, names))
    with ThreadPoolExecutor(REQUESTS, "tilth-read") as pool:
        return list(pool.map(ask, names))


class Checkpoint:
    """An open checkpoint; tensors are read on demand."""

    def __init__(self, path: Location, storage: Storage, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.bytes_read = 0
        """Bytes of data files requested from the storage since it was opened."""
        self._storage = storage

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def objects(self) -> dict[str, Any]:
        """The saved JSON objects."""
        return self.manifest.objects

    @property
    def groups(self) -> list[str]:
        """The names of the groups of tensors."""
        return list(self.manifest.groups)

    def names(self, group: str) -> list[str]:
        """Return the tensors of a group, in the order in which they were saved."""
        return list(self._group(group))

    def entry(self, group: str, name: str) -> TensorEntry:
        """Return shape, dtype and boxes of a tensor."""
        if name not in self._group(group):
            raise CheckpointError(f"checkpoint {self.path}: no tensor {name} in group {group}", key=f"{group}/{name}")
        return self.manifest.entry(group, name)

    def read(self, group: str, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor or one box of it (only the tiles that meet it) as a CPU tensor. CheckpointError if corrupt."""
        entry = self.entry(group, name)
        wanted = box or Box.whole(entry.shape)
        if len(wanted.size) != len(entry.shape) or not Box.whole(entry.shape).contains(wanted):
            message = f"checkpoint {self.path}: {wanted} is not in {group}/{name} of shape {entry.shape}"
            raise CheckpointError(message, key="box")
        out = torch.empty(wanted.size, dtype=entry.torch_dtype)
        self._fetch(list(self._wants(group, name, [wanted], [out])))
        return out

    def restore(
        self, group: str, into: Mapping[str, Tensor], layouts: Mapping[str, Layout] | None = None, rank: int = 0,
        share: Share | None = None,
    ) -> None:  # fmt: skip
        """Copy a group into these tensors, in place, on any device.

        layouts: of every tensor of the group; ``into`` then holds the shares of ``rank``, from whatever boxes were
        saved. Without layouts each target is a whole tensor. share: replicas that restore the same parts at the same
        time and together read them once.

        Names, shapes and dtypes must match, else nothing is copied. CheckpointError lists every tensor that is missing,
        unexpected, of another shape or dtype, or corrupt. Tiles are verified as they arrive: after damage the contents
        of the targets are undefined.
        """
        tensors = self._group(group)
        parts = _held(into, layouts, rank)
        problems = list(_mismatches(group, self.manifest, into, layouts, rank, parts))
        targets = {name: parts[name][1] or () for name in tensors if name in parts}

        def read(names: Collection[str]) -> None:
            raise_problems(self.path, problems)
            found = (self._wants(group, name, parts[name][0], targets[name]) for name in targets if name in names)
            self._fetch([want for wants in found for want in wants])

        with torch.no_grad():
            if share is None:
                read(targets.keys())
            else:
                text = f"step {self.step} " + "".join(f"{group}/{name} {parts[name][0]} " for name in targets)
                together(share, xxhash.xxh3_64_intdigest(text.encode()), targets, read)

    def verify(self, progress: Progress | None = None) -> None:
        """Verify every byte of every file; CheckpointError lists each damaged file and tensor."""
        with _reading(self.path):
            damaged = damaged_files(self._storage, self.manifest)
            there = [name for name in self.manifest.files if name not in damaged]
            problems = [*damaged.values(), *filter(None, _each(self._storage, self._header_problem, there))]
            wants = [want for group in self.groups for name in self.names(group) for want in self._pieces(group, name)]
            wants = [want for want in wants if want.piece.file not in damaged]
            counter = _Counter(progress, sum(want.piece.nbytes for want in wants)) if progress else None
            fetched = fetch(self._storage, wants, _threads(), counter)
        self.bytes_read += fetched.nbytes + sum(self.manifest.files[name].header_nbytes for name in there)
        raise_problems(self.path, problems + fetched.problems)

    def _group(self, group: str) -> Collection[str]:
        if group not in self.manifest.groups:
            known = ", ".join(self.groups) or "none"
            raise CheckpointError(f"checkpoint {self.path}: no group {group}; it has {known}", key=group)
        return self.manifest.groups[group].keys()

    def _wants(self, group: str, name: str, boxes: Sequence[Box], targets: Sequence[Tensor]) -> Iterator[Want]:
        """Yield the parts of stored pieces that make up these boxes."""
        entry, what = self.manifest.entry(group, name), f"{group}/{name}"
        itemsize = entry.torch_dtype.itemsize
        for box, target in zip(boxes, targets):
            for piece in entry.meeting(box):
                if piece.offset == box.offset and piece.size == box.size:
                    yield Want(what, piece, itemsize, Box.whole(box.size), target)
                elif common := piece.box.intersect(box):
                    part = target[common.within(box).slices]
                    yield Want(what, piece, itemsize, common.within(piece.box), part)

    def _pieces(self, group: str, name: str) -> Iterator[Want]:
        """Yield all pieces of a tensor, to verify them."""
        entry = self.manifest.entry(group, name)
        for piece in entry.boxes:
            if piece.nbytes:
                yield Want(f"{group}/{name}", piece, entry.torch_dtype.itemsize, Box.whole(piece.size), None)

    def _fetch(self, wants: Sequence[Want]) -> None:
        with _reading(self.path):
            fetched = fetch(self._storage, wants, _threads())
        self.bytes_read += fetched.nbytes
        raise_problems(self.path, fetched.problems)

    def _header_problem(self, name: str) -> CheckpointError | None:
        entry = self.manifest.files[name]
        hasher, room = xxhash.xxh3_64(), memoryview(bytearray(min(entry.header_nbytes, _HEADER)))
        with self._storage.ranges(name) as ranges:
            for at in range(0, entry.header_nbytes, _HEADER):
                some = room[: entry.header_nbytes - at]
                ranges.read_into(at, some)
                hasher.update(some)
        if hasher.intdigest() == entry.header_checksum:
            return None
        return CheckpointError(f"file {name}: the header is corrupt", key=f"{name}.header")


class _Counter:
    """Add up the bytes that several threads have read."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def __call__(self, more: int) -> None:
        with self._lock:
            self._done += more
            self._progress(self._done, self._total)


def _threads() -> int:
    return min(_THREADS, torch.get_num_threads())


@contextmanager
def _reading(path: Location) -> Iterator[None]:
    """Turn an OSError into CheckpointError for damage (file missing, torn, a link), else into StorageError."""
    try:
        yield
    except OSError as error:
        line = f"checkpoint {path}: file {error.filename or '?'}: {error.strerror or error}"
        key = split(str(error.filename or path))[1]
        damage = error.errno in (errno.ENOENT, errno.ENODATA, errno.ELOOP)
        raise (CheckpointError(line, key=key) if damage else StorageError(line, key=key)) from error


def _held(
    into: Mapping[str, Tensor], layouts: Mapping[str, Layout] | None, rank: int
) -> dict[str, tuple[list[Box], list[Tensor] | None]]:
    """Return the wanted boxes of each tensor, and the memory of each box; None if the tensor does not fit its boxes."""
    if layouts is None:
        return {name: ([Box.whole(target.shape)], [target]) for name, target in into.items()}
    here = {name for name in into if name in layouts and rank in layouts[name].mesh.ranks}
    boxes = {name: held(layouts[name], rank) for name in here}
    return {name: (boxes[name], views(into[name], boxes[name])) for name in here}


def _mismatches(
    group: str, manifest: Manifest, into: Mapping[str, Tensor], layouts: Mapping[str, Layout] | None, rank: int,
    parts: Mapping[str, tuple[list[Box], list[Tensor] | None]],
) -> Iterator[CheckpointError]:  # fmt: skip
    """Yield an error for each tensor that is not on both sides, or differs."""
    tensors = manifest.groups[group].keys()
    known = into.keys() if layouts is None else layouts.keys()
    here = known if layouts is None else {name for name, layout in layouts.items() if rank in layout.mesh.ranks}
    for name in sorted((into.keys() | here) - tensors):
        yield CheckpointError(f"tensor {group}/{name} is missing", key=f"{group}/{name}.missing")
    for name in sorted((tensors - known) | (here - into.keys())):
        yield CheckpointError(f"tensor {group}/{name} is extra: nothing takes it", key=f"{group}/{name}.extra")
    for name in sorted(into.keys() - here):
        yield CheckpointError(f"tensor {group}/{name} has no layout on rank {rank}", key=f"{group}/{name}.layout")
    for name in tensors & parts.keys():
        stored, target, key = manifest.entry(group, name), into[name], f"{group}/{name}"
        shape = tuple(target.shape) if layouts is None else layouts[name].shape
        if stored.shape != shape:
            yield CheckpointError(f"tensor {key} has shape {stored.shape}, expected {shape}", key=f"{key}.shape")
        elif stored.torch_dtype != target.dtype:
            yield CheckpointError(f"tensor {key} has dtype {stored.dtype}, expected {target.dtype}", key=f"{key}.dtype")
        elif parts[name][1] is None:
            message = f"tensor {key} of rank {rank} has shape {tuple(target.shape)}, its layout says {parts[name][0]}"
            yield CheckpointError(message, key=f"{key}.boxes")
