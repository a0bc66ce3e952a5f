"""Reading: tensors by name and box straight from the mapped files, checked against the manifest."""

import mmap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilth.checkpoint.directory import step_of
from tilth.checkpoint.manifest import Manifest, Piece, TensorEntry, load_manifest
from tilth.checkpoint.shards import held, views
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout

_SHOWN = 20


def open_checkpoint(path: str | Path) -> "Checkpoint":
    """Open a checkpoint directory. Reads the manifest only; CheckpointError if it or a file is missing or torn."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint: no such directory")
    manifest = load_manifest(path)
    promised = step_of(path)
    if promised is not None and promised != manifest.step:
        raise CheckpointError(f"{path} holds the manifest of step {manifest.step}, not of step {promised}")
    raise_problems(path, damaged_files(path, manifest))
    return Checkpoint(path, manifest)


def damaged_files(path: Path, manifest: Manifest) -> Iterator[str]:
    """A line for each data file that is missing or not of the size that the manifest says."""
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            yield f"file {name} is missing"
        elif file.stat().st_size != entry.nbytes:
            yield f"file {name} has {file.stat().st_size} bytes, expected {entry.nbytes}"


def raise_problems(path: Path, problems: Iterator[str]) -> None:
    """CheckpointError if there are any. One line that names every problem, up to a number that a person reads."""
    found = list(problems)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(f"checkpoint {path}: {'; '.join(found[:_SHOWN])}{more}")


class Checkpoint:
    """An open checkpoint; tensors are read when they are asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._maps: dict[str, memoryview] = {}

    @property
    def step(self) -> int:
        """The step whose end it holds."""
        return self.manifest.step

    @property
    def objects(self) -> dict[str, Any]:
        """The JSON objects that were saved."""
        return self.manifest.objects

    @property
    def groups(self) -> list[str]:
        """The names of the groups of tensors."""
        return list(self.manifest.groups)

    def names(self, group: str) -> list[str]:
        """The tensors of a group, in the order in which they were saved."""
        return list(self._group(group))

    def entry(self, group: str, name: str) -> TensorEntry:
        """Shape, dtype and boxes of a tensor."""
        tensors = self._group(group)
        if name not in tensors:
            raise CheckpointError(f"checkpoint {self.path}: no tensor {name} in group {group}")
        return tensors[name]

    def read(self, group: str, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or one box of it, as a new CPU tensor of the stored dtype.

        A whole tensor is checked (CheckpointError if it is corrupt). For a box only its pages are read from the file,
        so its bytes are not: ``verify`` checks them all.
        """
        entry = self.entry(group, name)
        if box is None:
            raise_problems(self.path, self._corrupt(group, name))
        wanted = box or Box.whole(entry.shape)
        if len(wanted.size) != len(entry.shape) or not Box.whole(entry.shape).contains(wanted):
            raise CheckpointError(f"checkpoint {self.path}: {wanted} is not in {group}/{name} of shape {entry.shape}")
        out = torch.empty(wanted.size, dtype=entry.torch_dtype)
        self._fill(out, entry, wanted)
        return out

    def restore(
        self,
        group: str,
        into: Mapping[str, Tensor],
        layouts: Mapping[str, Layout] | None = None,
        rank: int = 0,
    ) -> None:
        """Copy a group into these tensors, in place, on any device; nothing is copied unless all of it fits.

        layouts: of every tensor of the group; ``into`` then holds what ``rank`` has of them (as in ``write_part``) and
        gets that out of whatever boxes were saved. Without layouts each target is a whole tensor.

        Strict: names, shapes and dtypes must be the same. CheckpointError names every tensor that is missing in the
        checkpoint, not expected by ``into``, of another shape or dtype, or corrupt. The checksum of a stored box is
        over all of it, so whoever wants some of a box reads all of it: N ranks that each want a part of a tensor that
        one process saved read it N times in all (from the page cache where they share a machine).
        """
        tensors = self._group(group)
        whole = {name: Layout.single(target.shape) for name, target in into.items()} if layouts is None else layouts
        raise_problems(self.path, _mismatches(group, tensors, into, whole, rank))
        wanted = {name: held(whole[name], rank) for name in into}
        raise_problems(self.path, (p for name, boxes in wanted.items() for p in self._corrupt(group, name, boxes)))
        with torch.no_grad():
            for name, boxes in wanted.items():
                for box, part in zip(boxes, views(into[name], boxes) or (), strict=True):
                    self._fill(part, tensors[name], box)

    def verify(self) -> None:
        """Check every byte of every file; CheckpointError names each damaged file and tensor."""
        raise_problems(self.path, damaged_files(self.path, self.manifest))
        raise_problems(self.path, self._damage())

    def _damage(self) -> Iterator[str]:
        for name, entry in self.manifest.files.items():
            header = self._bytes(name)[: entry.header_nbytes]
            if zlib.crc32(header) != entry.header_checksum:
                yield f"file {name}: the header is corrupt"
        for group, tensors in self.manifest.groups.items():
            for name in tensors:
                yield from self._corrupt(group, name)

    def _group(self, group: str) -> dict[str, TensorEntry]:
        if group not in self.manifest.groups:
            raise CheckpointError(
                f"checkpoint {self.path}: no group {group}; it has {', '.join(self.groups) or 'none'}"
            )
        return self.manifest.groups[group]

    def _corrupt(self, group: str, name: str, boxes: Sequence[Box] | None = None) -> Iterator[str]:
        """A line for each stored piece that is not what was saved; of those only that meet ``boxes``."""
        for piece in self.entry(group, name).boxes:
            if boxes is not None and not any(map(piece.box.intersect, boxes)):
                continue
            data = self._bytes(piece.file)[piece.byte0 : piece.byte0 + piece.nbytes]
            if len(data) != piece.nbytes or zlib.crc32(data) != piece.checksum:
                yield f"tensor {group}/{name} is corrupt in file {piece.file}"

    def _bytes(self, file: str) -> memoryview:
        """A file mapped copy-on-write: torch wants writable memory, the file stays as it is."""
        if file not in self._maps:
            try:
                with open(self.path / file, "rb") as opened:
                    self._maps[file] = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
            except OSError as error:
                raise CheckpointError(f"checkpoint {self.path}: file {file}: {error.strerror}") from error
        return self._maps[file]

    def _fill(self, out: Tensor, entry: TensorEntry, box: Box) -> None:
        """Copy what every stored piece has of ``box`` to its place in ``out``, a tensor of the box's size."""
        for piece in entry.boxes:
            common = piece.box.intersect(box)
            if common is not None:
                stored = self._stored(piece, entry.torch_dtype)
                out[common.within(box).slices].copy_(stored[common.within(piece.box).slices])

    def _stored(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """A piece as a view of the mapped file: pages are read when they are touched."""
        count = piece.nbytes // dtype.itemsize
        return torch.frombuffer(self._bytes(piece.file), dtype=dtype, count=count, offset=piece.byte0).view(piece.size)


def _mismatches(
    group: str, tensors: Mapping[str, TensorEntry], into: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int
) -> Iterator[str]:
    here = {name for name, layout in layouts.items() if rank in layout.mesh.ranks}
    for name in sorted((into.keys() | here) - tensors.keys()):
        yield f"tensor {group}/{name} is missing"
    for name in sorted((tensors.keys() - layouts.keys()) | (here - into.keys())):
        yield f"tensor {group}/{name} is extra: nothing takes it"
    for name in sorted(into.keys() - here):
        yield f"tensor {group}/{name} has no layout on rank {rank}"
    for name in sorted(tensors.keys() & into.keys() & here):
        stored, target, layout = tensors[name], into[name], layouts[name]
        if stored.shape != layout.shape:
            yield f"tensor {group}/{name} has shape {stored.shape}, expected {layout.shape}"
        elif stored.torch_dtype != target.dtype:
            yield f"tensor {group}/{name} has dtype {stored.dtype}, expected {target.dtype}"
        elif views(target, boxes := held(layout, rank)) is None:
            yield f"tensor {group}/{name} of rank {rank} has shape {tuple(target.shape)}, its layout says {boxes}"
