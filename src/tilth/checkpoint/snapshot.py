"""Snapshots: the image, in host memory, of the file that one rank writes of a group.

Training waits for nothing but the snapshot. So everything that does not depend on values is prepared once and kept: the
plan, the header, and for every piece its place in the image.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from tilth.checkpoint.manifest import FileEntry, raise_problems
from tilth.checkpoint.planning import DTYPES, METADATA, SAFETENSORS_NAMES, GroupPlan, Planned, Spec, plan_group
from tilth.checkpoint.storage import BLOCK, PART
from tilth.checkpoint.tile_reader import tile_checksums
from tilth.config.open_sets import OPTIMIZERS
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout, Mesh, Replicate

REPLICATED = ("step",)
"""Kinds with one number for the parameter, equal on every rank."""


def held(layout: Layout, rank: int) -> list[Box]:
    """Return the boxes of a rank; every rank holds the whole of a tensor without elements."""
    return layout.boxes(rank) if math.prod(layout.shape) else [Box.whole(layout.shape)]


def views(local: Tensor, boxes: Sequence[Box]) -> list[Tensor] | None:
    """Return a view of ``local`` for each box, or None if it is not the storage of these boxes.

    The storage has the shape of the only box, or is 1-D with the boxes one after another, each row-major.
    """
    if len(boxes) == 1 and tuple(local.shape) == boxes[0].size:
        return [local]
    sizes = [box.numel for box in boxes]
    if local.numel() != sum(sizes) or (local.ndim != 1 and local.numel()):
        return None
    return [part.view(box.size) for part, box in zip(local.reshape(-1).split(sizes), boxes)] if boxes else []


def state_layouts(layouts: Mapping[str, Layout], tensors: Iterable[str]) -> dict[str, Layout]:
    """Return the layouts of optimizer state, named ``<kind>.<parameter>``, from those of the parameters.

    A moment has the layout of its parameter; a step count is replicated. CheckpointError for another kind, and for a
    parameter without a layout.
    """
    found, kinds = {}, dict.fromkeys([*(kind for spec in OPTIMIZERS.values() for kind in spec.state), *REPLICATED])
    for name in tensors:
        kind, _, parameter = name.partition(".")
        if parameter not in layouts:
            message = f"optimizer state {name}: there is no layout of a parameter {parameter!r}"
            raise CheckpointError(message, key=f"{name}.layout")
        if kind not in kinds:
            known = ", ".join(kinds)
            message = f"optimizer state {name}: no layout is known for the kind {kind!r}; known are {known}"
            raise CheckpointError(message, key=f"{name}.kind")
        found[name] = _everywhere(layouts[parameter].mesh) if kind in REPLICATED else layouts[parameter]
    return found


@cache
def _everywhere(mesh: Mesh) -> Layout:
    """Return the layout of a number that all ranks hold."""
    return Layout(mesh, (Replicate(),) * len(mesh.sizes), ())


_SPARE = 4  # a buffer more than this many times too large is freed


class Group(NamedTuple):
    """This rank's share of a group of tensors, and the layouts of the whole group."""

    tensors: Mapping[str, Tensor]
    """Shares of the tensors whose mesh contains this rank: in the shape of their box, or 1-D with several boxes."""
    layouts: Mapping[str, Layout]
    """Layouts of all tensors of the group, equal on every rank."""
    dtypes: Mapping[str, torch.dtype] = {}
    """Dtypes of tensors whose mesh does not contain this rank."""


class RankPart:
    """The part of a group that one rank writes, while names, layouts and dtypes stay the same."""

    def __init__(self, group: str, specs: tuple[Spec, ...], rank: int) -> None:
        self.group, self.specs, self.rank = group, specs, rank
        self.plan: GroupPlan = plan_group(specs)
        self.pieces: tuple[Planned, ...] = self.plan.pieces(rank) if rank in self.plan.ranks else ()
        self.header = self.plan.header(rank) if self.pieces else b""
        self.nbytes = len(self.header) + (self.plan.data_nbytes(rank) if self.pieces else 0)
        self._held = {spec.name: held(spec.layout, rank) for spec in specs if rank in spec.layout.mesh.ranks}
        self._parts = [_part(self._held[piece.name], piece.box) for piece in self.pieces]

    def sources(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return a view of the values of every piece. CheckpointError for a tensor that does not fit its layout."""
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


class RankParts:
    """Parts of the groups that one process saves, kept while names, layouts, dtypes and rank stay."""

    def __init__(self) -> None:
        self._kept: dict[str, RankPart] = {}

    def of(self, name: str, group: Group, rank: int) -> RankPart:
        """Return the part of the save before if nothing changed, else a new one. CheckpointError as ``specs_of``."""
        specs, known = specs_of(name, group, rank), self._kept.get(name)
        if known is None or known.specs != specs or known.rank != rank:
            known = self._kept[name] = RankPart(name, specs, rank)
        return known


def _absent(group: str, name: str, rank: int) -> CheckpointError:
    message = f"tensor {group}/{name} is not among those of rank {rank}, which is in its mesh"
    return CheckpointError(message, key=f"{group}/{name}.missing")


def _part(boxes: Sequence[Box], piece: Box) -> tuple[int, tuple[slice, ...]]:
    """Return the index of the rank's box that contains the piece, and the piece's place in it."""
    number = next(i for i, box in enumerate(boxes) if box.contains(piece))
    return number, piece.within(boxes[number]).slices


def specs_of(name: str, group: Group, rank: int) -> tuple[Spec, ...]:
    """Return the specs of a group. CheckpointError for a tensor that cannot be stored or has no layout."""
    strangers = sorted(group.tensors.keys() - group.layouts.keys(), key=str)
    problems = (CheckpointError(f"tensor {name}/{t} has no layout", key=f"{name}/{t}.layout") for t in strangers)
    raise_problems(name, problems)
    return tuple(Spec(n, layout, _dtype(name, n, group, rank)) for n, layout in group.layouts.items())


def check_tensor(group: str, name: str, values: Any) -> None:
    """Refuse names that are not UTF-8 text, and values that are no tensor of one shape.

    A save calls it for each tensor while training waits, so each check takes about 100 ns at most.
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
        raise CheckpointError(f"tensor {name}/{tensor}: safetensors reserves this name", key=f"{name}/{tensor}.name")
    return str(dtype).removeprefix("torch.")


class HostBuffer:
    """Host memory for the images of a save, aligned to blocks and kept from save to save.

    New memory costs about as much as the copy into it. For values from a CUDA device it is pinned.
    """

    def __init__(self) -> None:
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._images: list[FileImage] = []
        self._for: list[int] = []
        self._streams: dict[torch.device, Any] = {}

    def images(self, parts: Sequence[RankPart], pinned: bool) -> "list[FileImage]":
        """Return an image for each part, those of the last call for the same parts. OSError or MemoryError."""
        if self._for == list(map(id, parts)) and (self._memory.is_pinned() or not pinned):
            return self._images
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + -(-part.nbytes // BLOCK) * BLOCK)
        self._images = []  # they hold memory that may be freed
        if not starts[-1] <= len(self._memory) <= _SPARE * starts[-1] or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = _allocate(starts[-1], pinned)
        self._images = [FileImage(part, self._memory[at : at + part.nbytes]) for part, at in zip(parts, starts)]
        self._for = list(map(id, parts))
        return self._images

    def copy(self, sources: "Iterable[tuple[FileImage, Sequence[Tensor]]]") -> list[Any]:
        """Copy the values; return events to wait for before the images are read.

        A stream of its own copies from a CUDA device, behind the work queued so far. Work queued afterwards waits for
        the copy on the device, since it may change the tensors in place.
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
    """Allocate bytes aligned to a block."""
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
        """Yield all bytes in chunks aligned to blocks."""
        return (self.data[at : at + PART] for at in range(0, len(self.data), PART))

    def entry(self) -> FileEntry:
        """Compute the checksums; return the entry of the file in the manifest."""
        sums = [
            tile_checksums(data.numpy().data, piece.box.size, DTYPES[piece.dtype].itemsize)
            for piece, data in zip(self.part.pieces, self._bytes)
        ]
        return FileEntry(
            group=self.part.group,
            nbytes=len(self.data),
            header_nbytes=len(self.part.header),
            header_checksum=xxhash.xxh3_64_intdigest(self.part.header),
            checksums=[one for piece in sums for one in piece],
        )
