"""What one rank writes of a group, as memory: the image of its file, made by a snapshot of its tensors.

The snapshot is the only thing that training waits for. So all that does not depend on values is prepared once and kept:
who writes what, the header, and for every piece the place in the image.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from tilth.checkpoint.manifest import FileEntry, raise_problems
from tilth.checkpoint.planning import DTYPES, METADATA, SAFETENSORS_NAMES, GroupPlan, Planned, Spec, plan_group, tiles
from tilth.checkpoint.shards import held, views
from tilth.checkpoint.storage import BLOCK, PART
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout

_STEP = 1 << 19  # bytes that are rearranged at once to be hashed: they and their copy stay in a core's cache
_SPARE = 4  # a buffer so many times too large is given back


class Group(NamedTuple):
    """A group of tensors of a checkpoint: what this rank holds of it, and where that belongs."""

    tensors: Mapping[str, Tensor]
    """This rank's share of each tensor whose mesh it is in: in the shape of its box, or 1-D with its boxes one after
    another."""
    layouts: Mapping[str, Layout]
    """Of all tensors of the group, the same on every rank."""
    dtypes: Mapping[str, torch.dtype] = {}
    """Of tensors that this rank is not in the mesh of; without such tensors not needed."""


# ---- what does not depend on values ----


class RankPart:
    """What one rank has to write of one group, as long as names, layouts and dtypes stay the same."""

    def __init__(self, group: str, specs: tuple[Spec, ...], rank: int) -> None:
        self.group, self.specs, self.rank = group, specs, rank
        self.plan: GroupPlan = plan_group(specs)
        self.pieces: tuple[Planned, ...] = self.plan.pieces(rank) if rank in self.plan.ranks else ()
        self.header = self.plan.header(rank) if self.pieces else b""
        self.nbytes = len(self.header) + (self.plan.data_nbytes(rank) if self.pieces else 0)
        self._held = {spec.name: held(spec.layout, rank) for spec in specs if rank in spec.layout.mesh.ranks}
        self._parts = [_part(self._held[piece.name], piece.box) for piece in self.pieces]

    def sources(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The values of every piece, views of the tensors. CheckpointError for one that is not what its layout says."""
        raise_problems(self.group, self._misfits(tensors))
        found: dict[str, Sequence[Tensor]] = {}
        for piece in self.pieces:
            if piece.name not in found:
                found[piece.name] = views(tensors[piece.name].detach(), self._held[piece.name]) or ()
        return [found[piece.name][number][part] for piece, (number, part) in zip(self.pieces, self._parts)]

    def _misfits(self, tensors: Mapping[str, Tensor]) -> Iterator[CheckpointError]:
        for name, tensor in tensors.items():
            boxes, key = self._held.get(name), f"{self.group}/{name}"
            if boxes is None:
                ranks = next(spec.layout.mesh.ranks for spec in self.specs if spec.name == name)
                yield CheckpointError(
                    f"tensor {key} is not rank {self.rank}'s: its mesh has ranks {ranks}", key=f"{key}.rank"
                )
            elif not (len(boxes) == 1 and tuple(tensor.shape) == boxes[0].size) and views(tensor, boxes) is None:
                shape = tuple(tensor.shape)
                message = f"tensor {key} of rank {self.rank} has shape {shape}, its layout says {boxes}"
                yield CheckpointError(message, key=f"{key}.shape")
        for name in self._held.keys() - tensors.keys():
            yield _absent(self.group, name, self.rank)


def _absent(group: str, name: str, rank: int) -> CheckpointError:
    message = f"tensor {group}/{name} is not among those of rank {rank}, which is in its mesh"
    return CheckpointError(message, key=f"{group}/{name}.missing")


def _part(boxes: Sequence[Box], piece: Box) -> tuple[int, tuple[slice, ...]]:
    """In which of the boxes that a rank holds the piece lies, and where."""
    number = next(i for i, box in enumerate(boxes) if box.contains(piece))
    return number, piece.within(boxes[number]).slices


def specs_of(name: str, group: Group, rank: int) -> tuple[Spec, ...]:
    """The group as it is planned. CheckpointError for a tensor that cannot be stored or has no layout."""
    strangers = sorted(group.tensors.keys() - group.layouts.keys(), key=str)
    problems = (CheckpointError(f"tensor {name}/{t} has no layout", key=f"{name}/{t}.layout") for t in strangers)
    raise_problems(name, problems)
    return tuple(Spec(n, layout, _dtype(name, n, group, rank)) for n, layout in group.layouts.items())


def check_tensor(group: str, name: str, values: Any) -> None:
    """CheckpointError for a name that is not text that files can hold, and for what is no tensor, or has no one shape.

    A save calls it for each tensor while training waits, so it asks for nothing that takes more than some 100 ns.
    """
    if not isinstance(name, str):
        message = f"tensor {group}/{name!r}: its name is a {type(name).__name__}; it must be text"
        raise CheckpointError(message, key=f"{group}/{name!r}.name")
    if not name.isascii() and not _encodes(name):
        message = f"tensor {group}/{name!a}: its name has half a surrogate pair, which UTF-8 cannot hold"
        raise CheckpointError(message, key=f"{group}/{name!a}.name")
    if not isinstance(values, Tensor):
        message = f"tensor {group}/{name} is a {type(values).__name__}; it must be a torch.Tensor"
        raise CheckpointError(message, key=f"{group}/{name}.type")
    if values.is_nested:
        message = f"tensor {group}/{name} is nested; safetensors stores tensors of one shape"
        raise CheckpointError(message, key=f"{group}/{name}.nested")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dtype(name: str, tensor: str, group: Group, rank: int) -> str:
    values = group.tensors.get(tensor)
    if values is not None or tensor in group.tensors:
        check_tensor(name, tensor, values)
    dtype = group.dtypes.get(tensor) if values is None else values.dtype
    if dtype is None and rank in group.layouts[tensor].mesh.ranks:
        raise _absent(name, tensor, rank)
    if dtype is None:
        message = f"tensor {name}/{tensor}: rank {rank}, which has nothing of it, must know its dtype"
        raise CheckpointError(message, key=f"{name}/{tensor}.dtypes")
    if dtype not in SAFETENSORS_NAMES or (values is not None and (values.layout != torch.strided or values.is_meta)):
        kind = f"{dtype}" if values is None else f"{dtype}, {values.layout}, {values.device}"
        message = f"tensor {name}/{tensor} ({kind}) cannot be stored in safetensors"
        raise CheckpointError(message, key=f"{name}/{tensor}.dtype")
    if tensor == METADATA:
        message = f"tensor {name}/{tensor}: safetensors reserves this name"
        raise CheckpointError(message, key=f"{name}/{tensor}.name")
    return str(dtype).removeprefix("torch.")


# ---- memory ----


class HostBuffer:
    """Host memory for the images of a save, one behind the other, each from a block on; kept from save to save.

    Memory that is new costs about as much as the copy into it, so it is touched once. Where values come from a CUDA
    device it is pinned, so that they are copied without the processor.
    """

    def __init__(self) -> None:
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._images: list[FileImage] = []
        self._for: list[int] = []
        self._streams: dict[torch.device, Any] = {}

    def images(self, parts: Sequence[RankPart], pinned: bool) -> "list[FileImage]":
        """An image for each part; the same as before for the same parts. OSError or MemoryError without memory."""
        if self._for == list(map(id, parts)) and (self._memory.is_pinned() or not pinned):
            return self._images
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + -(-part.nbytes // BLOCK) * BLOCK)
        self._images = []  # of the memory that may go
        if not starts[-1] <= len(self._memory) <= _SPARE * starts[-1] or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = _allocate(starts[-1], pinned)
        self._images = [FileImage(part, self._memory[at : at + part.nbytes]) for part, at in zip(parts, starts)]
        self._for = list(map(id, parts))
        return self._images

    def copy(self, sources: "Iterable[tuple[FileImage, Sequence[Tensor]]]") -> list[Any]:
        """The snapshot. Returns events to wait for before the images are read.

        On CUDA devices a stream of its own copies, behind what was asked for so far; what is asked for afterwards waits
        for it there, since it may change the tensors in place, while this thread goes on.
        """
        used: dict[torch.device, Any] = {}
        with torch.no_grad():
            for image, values in sources:
                for target, source in zip(image.targets, values, strict=True):
                    if source.device.type != "cuda":
                        target.copy_(source)
                        continue
                    with torch.cuda.stream(used.setdefault(source.device, self._stream(source.device, used))):
                        target.copy_(source, non_blocking=True)
        return [_recorded(device, stream) for device, stream in used.items()]

    def _stream(self, device: torch.device, used: Mapping[torch.device, Any]) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        if device not in used:
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


def _recorded(device: torch.device, stream: Any) -> Any:
    event = stream.record_event()
    torch.cuda.current_stream(device).wait_event(event)
    return event


def _allocate(nbytes: int, pinned: bool) -> Tensor:
    """Bytes from a block on."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if pinned:
        whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8, pin_memory=True)
        skip = -whole.data_ptr() % BLOCK
        return whole[skip : skip + nbytes]
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class FileImage:
    """The file of a part: its header, then its pieces."""

    def __init__(self, part: RankPart, memory: Tensor) -> None:
        self.part = part
        self.data: memoryview = memory.numpy().data
        self.data[: len(part.header)] = part.header
        values = memory[len(part.header) :]
        self._bytes = [values[p.byte0 : p.byte0 + p.nbytes] for p in part.pieces]
        self.targets = [b.view(DTYPES[p.dtype]).view(p.box.size) for b, p in zip(self._bytes, part.pieces)]

    def chunks(self) -> Iterator[memoryview]:
        """All of it, each chunk from a block on."""
        return (self.data[at : at + PART] for at in range(0, len(self.data), PART))

    def entry(self) -> FileEntry:
        """What the manifest says of the file: computes the checksums."""
        sums: list[int] = []
        for piece, data in zip(self.part.pieces, self._bytes):
            sums += tile_checksums(data.numpy(), piece.box.size, DTYPES[piece.dtype].itemsize)
        return FileEntry(
            group=self.part.group,
            nbytes=len(self.data),
            header_nbytes=len(self.part.header),
            header_checksum=xxhash.xxh3_64_intdigest(self.part.header),
            checksums=sums,
        )


def tile_checksums(data: np.ndarray, size: Sequence[int], itemsize: int) -> list[int]:
    """xxh3_64 of the tiles of a piece, in their order; data: uint8 [bytes of the piece], row-major."""
    cut = tiles(tuple(size), itemsize)
    if not len(data):
        return []
    rows, bands = cut.rows[-1], len(cut.columns) - 1
    if bands == 1 or rows == 1:
        cuts, unit = (cut.rows, len(data) // rows) if bands == 1 else (cut.columns, itemsize)
        view = data.data
        return [xxhash.xxh3_64_intdigest(view[a * unit : b * unit]) for a, b in pairwise(cuts)]
    table = data.reshape(rows, bands, -1)
    return [checksum for a, b in pairwise(cut.rows) for checksum in _columns(table[a:b])]


def _columns(table: np.ndarray) -> list[int]:
    """The checksum of each column band; table: uint8 [rows, bands, bytes].

    Some rows at a time come into the cache in the order in which they lie, and are put apart there: to read the bands
    one after another from memory takes twice as long.
    """
    count, bands, nbytes = table.shape
    height = min(count, max(1, _STEP // (bands * nbytes)))
    near = np.empty((height, bands), f"V{nbytes}")
    apart = np.empty((bands, height), f"V{nbytes}")
    hashers = [xxhash.xxh3_64() for _ in range(bands)]
    for at in range(0, count, height):
        rows = min(height, count - at)
        np.copyto(near[:rows], table[at : at + rows].view(near.dtype)[..., 0])
        np.copyto(apart[:, :rows], near[:rows].T)
        for hasher, band in zip(hashers, apart):
            hasher.update(band[:rows])
    return [hasher.intdigest() for hasher in hashers]
