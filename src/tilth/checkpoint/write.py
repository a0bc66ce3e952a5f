"""Saving: data, manifest, synchronise, rename. A crash at any moment leaves the checkpoint before intact.

Several processes write one checkpoint: the controller begins it, each rank writes its part of each group, and the
controller commits what they report. One process does the same by itself (``save``).
"""

import json
import math
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from tilth.checkpoint.directory import commit, latest, remove_leftovers, step_name, step_of, sync_directory
from tilth.checkpoint.manifest import NAME, SAFETENSORS_NAMES, FileEntry, Manifest, PartEntry, Piece, TensorEntry
from tilth.checkpoint.read import damaged_files, raise_problems
from tilth.checkpoint.shards import Item, held, names_to_write, tiling_problem, views
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Box, Layout, Mesh

Groups = Mapping[str, Mapping[str, Tensor]]

_CHUNK = 1 << 24
_METADATA = "__metadata__"
_WORD = r"[A-Za-z0-9_-]+"


def save(root: str | Path, step: int, groups: Groups, objects: Mapping[str, Any], layout: Mesh | None = None) -> Path:
    """Write ``root/step-000100`` with one safetensors file per group of tensors and ``manifest.json``; its path.

    Returns when everything is on disk. Leftovers of crashed saves under ``root`` are removed first, so one process at
    a time may write there. A checkpoint of the same step is replaced. ``layout`` is the mesh of the writers (default:
    one process). StorageError if writing fails (disk full, read-only, no permission): nothing of the attempt remains
    and what was there before is intact. CheckpointError, before anything is written, if something cannot be stored.
    """
    for group, tensors in groups.items():
        _check_group(group, tensors)
    _check_json(objects, "objects")
    folder = begin_save(root, step)
    try:
        parts = []
        for group, tensors in groups.items():
            layouts = {name: Layout.single(tensor.shape) for name, tensor in tensors.items()}
            parts.append(write_part(folder, group, "", tensors, layouts, 0))
        return commit_save(folder, root, step, parts, objects, layout)
    finally:
        abandon_save(folder)


def begin_save(root: str | Path, step: int) -> Path:
    """The controller's first act: an empty temporary folder under ``root`` for the parts; its path.

    Removes what crashed saves left there, so one save at a time may be under way. StorageError if it cannot be made.
    """
    root = Path(root)
    folder = root / f"{step_name(step)}.tmp-{os.getpid()}"
    with _storing(folder, step):
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        folder.mkdir()
    return folder


def write_part(
    folder: str | Path,
    group: str,
    part: str,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    rank: int,
) -> dict[str, Any]:
    """Write what one rank has to write of a group, synchronised; what ``commit_save`` wants to know of it, as JSON.

    folder: of ``begin_save``, on storage that the controller sees. part: a name for this rank's file of the group
    (``GROUP.PART.safetensors``; empty: ``GROUP.safetensors``). layouts: of all tensors of the group, the same on every
    rank. tensors: this rank's share of each tensor whose mesh it is in, in the shape of its box, or 1-D with its boxes
    one after another. Of what several ranks hold each writes some, without asking (``shards.names_to_write``); with
    nothing to write there is no file, but a report all the same. CheckpointError for a tensor that cannot be stored or
    does not fit its layout; StorageError if writing fails.
    """
    folder = Path(folder)
    _check_group(group, tensors)
    if part and not re.fullmatch(_WORD, part):
        raise CheckpointError(f"part {part!r} of group {group}: a name of letters, digits, '-' and '_' is needed")
    raise_problems(folder, _misfits(group, tensors, layouts, rank))
    mine, entries = _own_boxes(tensors, layouts, rank)
    file = f"{group}.{part}.safetensors" if part else f"{group}.safetensors"
    files = {}
    if mine:
        with _storing(folder, _step(folder)):
            files[file], pieces = _write_safetensors(folder / file, mine)
        for share, piece in zip(mine, pieces, strict=True):
            entry = entries[share.name]
            entries[share.name] = entry.model_copy(update={"boxes": (*entry.boxes, piece)})
    ranks = {rank for mesh in {layout.mesh for layout in layouts.values()} for rank in mesh.ranks}
    written = PartEntry(
        folder=folder.name, group=group, rank=rank, ranks=_intervals(ranks or {rank}), files=files, tensors=entries
    )
    return written.model_dump(mode="json")


def commit_save(
    folder: str | Path,
    root: str | Path,
    step: int,
    parts: Iterable[Mapping[str, Any]],
    objects: Mapping[str, Any],
    layout: Mesh | None = None,
) -> Path:
    """The controller's last act: check the ranks' reports, write the manifest, give the folder its name; its path.

    parts: what ``write_part`` returned, in any order. layout: the mesh of the writers, to be kept (default: the ranks
    of the parts as they are). CheckpointError if the parts do not hold every tensor exactly once: it names the tensor
    and the box that is missing or written twice, the rank of which there is no part or two, the file that is not there,
    or the part of another save. StorageError if writing fails. After either nothing of the attempt remains and what was
    there before is intact.
    """
    folder, root = Path(folder), Path(root)
    try:
        _check_json(objects, "objects")
        manifest = _manifest(folder, step, [_part(entry) for entry in parts], objects, layout)
        with _storing(folder, step):
            raise_problems(folder, damaged_files(folder, manifest))
            with open(folder / NAME, "xb") as file:
                file.write(manifest.dump())
                _sync(file)
            sync_directory(folder)
            commit(folder, root / step_name(step))
            remove_leftovers(root)
    finally:
        abandon_save(folder)
    return root / step_name(step)


def abandon_save(folder: str | Path) -> None:
    """Remove the temporary folder of a save that will not be committed; nothing happens where it is gone."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _storing(folder: Path, step: int) -> Iterator[None]:
    """Make one line of a failing disk: what could not be written, and what is intact."""
    previous = None
    try:
        previous = latest(folder.parent)
        yield
    except OSError as error:
        before = f"the checkpoint before it, {previous}, is intact" if previous else "there was none before it"
        place = error.filename or folder
        raise StorageError(
            f"checkpoint of step {step}: cannot write {place}: {error.strerror or error}; {before}"
        ) from error


# ---- what may be written ----


def _check_group(group: str, tensors: Mapping[str, Tensor]) -> None:
    if not re.fullmatch(_WORD, group):
        raise CheckpointError(f"group {group!r}: a name of letters, digits, '-' and '_' is needed")
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_NAMES or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise CheckpointError(f"tensor {group}/{name} ({kind}) cannot be stored in safetensors")
        if name == _METADATA:
            raise CheckpointError(f"tensor {group}/{name}: safetensors keeps this name for itself")


def _check(groups: Groups, objects: Mapping[str, Any]) -> None:
    for group, tensors in groups.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", group):
            raise CheckpointError(f"group {group!r}: a name of letters, digits, '-' and '_' is needed")
        for name, tensor in tensors.items():
            if tensor.dtype not in SAFETENSORS_NAMES or tensor.layout != torch.strided or tensor.is_meta:
                kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
                raise CheckpointError(f"tensor {group}/{name} ({kind}) cannot be stored in safetensors")
    _check_json(objects, "objects")


def _check_json(value: Any, place: str) -> None:
    """JSON would turn other keys into text and has no other types: what is read must be what was saved."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{place}: key {key!r} is a {type(key).__name__}; JSON has only text keys")
            _check_json(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{place}[{i}]")
    elif not (value is None or type(value) in (bool, int, float, str)):
        raise CheckpointError(f"{place}: a {type(value).__name__} cannot be stored as JSON")


# ---- one rank's part ----


class _Share(NamedTuple):
    """A box that this rank writes."""

    name: str
    key: str
    """Its name in the safetensors file: the tensor's, with the box where it is not the whole."""
    box: Box
    values: Tensor


def _misfits(group: str, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int) -> Iterator[str]:
    for name, layout in layouts.items():
        here = rank in layout.mesh.ranks
        if here and name not in tensors:
            yield f"tensor {group}/{name} is not among those of rank {rank}, which is in its mesh"
        elif name in tensors and not here:
            yield f"tensor {group}/{name} is not rank {rank}'s: its mesh has ranks {layout.mesh.ranks}"
        elif here and views(tensors[name], boxes := held(layout, rank)) is None:
            shape = tuple(tensors[name].shape)
            yield f"tensor {group}/{name} of rank {rank} has shape {shape}, its layout says {boxes}"
    for name in tensors.keys() - layouts.keys():
        yield f"tensor {group}/{name} has no layout"


def _own_boxes(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int
) -> tuple[list[_Share], dict[str, TensorEntry]]:
    """The boxes that this rank writes, and entries, still without boxes, of the tensors that it has to tell of."""
    meshes: dict[Mesh, list[Item]] = {}
    for name, tensor in tensors.items():
        meshes.setdefault(layouts[name].mesh, []).append(Item(name, layouts[name], tensor.element_size()))
    mine = frozenset[str]().union(*(names_to_write(tuple(items), rank) for items in meshes.values()))
    shares, entries = [], {}
    for name, tensor in tensors.items():
        layout = layouts[name]
        if name in mine or rank == min(layout.mesh.ranks):
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(shape=layout.shape, dtype=dtype, boxes=())
        if name in mine:
            boxes = held(layout, rank)
            named = [(name, _key(name, box, layout), box) for box in boxes]
            shares += [_Share(*n, values) for n, values in zip(named, views(tensor, boxes) or (), strict=True)]
    return shares, entries


def _key(name: str, box: Box, layout: Layout) -> str:
    if box == Box.whole(layout.shape):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in zip(box.offset, box.stop))}]"


def _intervals(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as the fewest intervals [start, stop)."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        start = found.pop()[0] if found and found[-1][1] == rank else rank
        found.append((start, rank + 1))
    return tuple(found)


def _write_safetensors(path: Path, shares: Sequence[_Share]) -> tuple[FileEntry, list[Piece]]:
    """A file that the safetensors library reads, and where each share lies in it.

    Wide dtypes come first, so that every tensor is aligned.
    """
    ordered = sorted(shares, key=lambda share: (-share.values.element_size(), share.name, share.box))
    header, end = _header(ordered)
    pieces = {}
    with open(path, "xb") as file:
        file.write(header)
        for share in ordered:
            start = file.tell()
            checksum = _write_tensor(file, share.values)
            place = {"file": path.name, "byte0": start, "nbytes": file.tell() - start, "checksum": checksum}
            pieces[share.key] = Piece(offset=share.box.offset, size=share.box.size, **place)
        _sync(file)
    entry = FileEntry(nbytes=len(header) + end, header_nbytes=len(header), header_checksum=zlib.crc32(header))
    return entry, [pieces[share.key] for share in shares]


def _header(shares: Sequence[_Share]) -> tuple[bytes, int]:
    """The safetensors header, its length a multiple of 8, and the number of bytes of data behind it."""
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for share in shares:
        if share.key in table:
            raise CheckpointError(f"tensor {share.name}: another one has the name {share.key!r}, which its part needs")
        start, shape = end, share.box.size
        end = start + math.prod(shape) * share.values.element_size()
        dtype = SAFETENSORS_NAMES[share.values.dtype]
        table[share.key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write_tensor(file: BinaryIO, tensor: Tensor) -> int:
    """Write the values, row-major; the CRC-32 of the bytes."""
    checksum = 0
    for chunk in _chunks(tensor):
        file.write(chunk)
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().data
    return (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


# ---- all parts together ----


def _part(entry: Mapping[str, Any]) -> PartEntry:
    try:
        return PartEntry(**entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"a part is not what write_part returns: {where}: {first['msg']}") from error


def _manifest(
    folder: Path, step: int, parts: Sequence[PartEntry], objects: Mapping[str, Any], layout: Mesh | None
) -> Manifest:
    """The table of what all ranks wrote; CheckpointError unless that is every element of every tensor once."""
    if _step(folder) != step:
        raise CheckpointError(f"{folder} was begun for step {_step(folder)}, not for step {step}")
    raise_problems(folder, _foreign(folder, parts))
    groups: dict[str, list[PartEntry]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    for group, members in groups.items():
        members.sort(key=lambda part: part.rank)
        raise_problems(folder, _wrong_ranks(group, members))
        raise_problems(folder, _contradictions(group, members))
    tensors = {group: _merged(members) for group, members in groups.items()}
    raise_problems(folder, _not_tiled(tensors))
    files = {name: file for members in groups.values() for part in members for name, file in part.files.items()}
    return Manifest(
        step=step,
        layout={"mesh": (layout or _world(parts)).to_json()},
        files=files,
        groups=tensors,
        objects=dict(objects),
        total_bytes=sum(file.nbytes for file in files.values()),
    )


def _world(parts: Sequence[PartEntry]) -> Mesh:
    ranks = tuple(sorted({part.rank for part in parts})) or (0,)
    return Mesh(("world",), (len(ranks),), ranks)


def _step(folder: Path) -> int:
    """The step that a folder of ``begin_save`` is for."""
    step = step_of(folder.with_suffix(""))
    if step is None or not folder.suffix.startswith(".tmp-"):
        raise CheckpointError(f"{folder} is no folder of begin_save: its name is not that of a step under way")
    return step


def _foreign(folder: Path, parts: Sequence[PartEntry]) -> Iterator[str]:
    for part in parts:
        if part.folder != folder.name:
            yield f"the part of rank {part.rank} of group {part.group} was written for {part.folder}"


def _wrong_ranks(group: str, parts: Sequence[PartEntry]) -> Iterator[str]:
    there = Counter(part.rank for part in parts)
    intervals = {interval for part in parts for interval in part.ranks}
    for rank in sorted({rank for interval in intervals for rank in range(*interval)} - there.keys()):
        yield f"group {group} has no part of rank {rank}"
    for rank, count in there.items():
        if count > 1:
            yield f"group {group} has {count} parts of rank {rank}"


def _contradictions(group: str, parts: Sequence[PartEntry]) -> Iterator[str]:
    first: dict[str, tuple[int, TensorEntry]] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            rank, known = first.setdefault(name, (part.rank, entry))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                ours, theirs = f"{entry.dtype} {entry.shape}", f"{known.dtype} {known.shape}"
                yield f"tensor {group}/{name} is {theirs} on rank {rank}, {ours} on rank {part.rank}"


def _merged(parts: Sequence[PartEntry]) -> dict[str, TensorEntry]:
    """Every tensor with all its boxes, in the order of the rank that tells of all."""
    boxes: dict[str, list[Piece]] = {}
    entries: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            entries.setdefault(name, entry)
            boxes.setdefault(name, []).extend(entry.boxes)
    return {name: entry.model_copy(update={"boxes": tuple(boxes[name])}) for name, entry in entries.items()}


def _not_tiled(groups: Mapping[str, Mapping[str, TensorEntry]]) -> Iterator[str]:
    for group, tensors in groups.items():
        for name, entry in tensors.items():
            problem = tiling_problem(entry.shape, [piece.box for piece in entry.boxes])
            if problem:
                files = sorted({piece.file for piece in entry.boxes})
                yield f"tensor {group}/{name}: {problem}; its boxes are in {', '.join(files) or 'no file'}"
