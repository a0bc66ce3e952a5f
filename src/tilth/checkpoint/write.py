"""Saving: data, manifest, synchronise, rename. A crash at any moment leaves the checkpoint before intact."""

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tilth.checkpoint.directory import commit, latest, remove_leftovers, step_name, sync_directory
from tilth.checkpoint.manifest import NAME, SAFETENSORS_NAMES, FileEntry, Manifest, Piece, TensorEntry
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Mesh

Groups = Mapping[str, Mapping[str, Tensor]]

_CHUNK = 1 << 24


def save(root: str | Path, step: int, groups: Groups, objects: Mapping[str, Any], layout: Mesh | None = None) -> Path:
    """Write ``root/step-000100`` with one safetensors file per group of tensors and ``manifest.json``; its path.

    Returns when everything is on disk. Leftovers of crashed saves under ``root`` are removed first, so one process at
    a time may write there. A checkpoint of the same step is replaced. ``layout`` is the mesh of the writers (default:
    one process). StorageError if writing fails (disk full, read-only, no permission): nothing of the attempt remains
    and what was there before is intact. CheckpointError, before anything is written, if something cannot be stored.
    """
    root, previous = Path(root), None
    _check(groups, objects)
    made = root / f"{step_name(step)}.tmp-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        previous = latest(root)
        remove_leftovers(root)
        made.mkdir()
        _write(made, step, groups, objects, layout or Mesh(("world",), (1,)))
        commit(made, root / step_name(step))
        remove_leftovers(root)
    except OSError as error:
        before = f"the checkpoint before it, {previous}, is intact" if previous else "there was none before it"
        place = error.filename or made
        raise StorageError(
            f"checkpoint of step {step}: cannot write {place}: {error.strerror or error}; {before}"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return root / step_name(step)


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


def _write(directory: Path, step: int, groups: Groups, objects: Mapping[str, Any], mesh: Mesh) -> None:
    files: dict[str, FileEntry] = {}
    entries: dict[str, dict[str, TensorEntry]] = {}
    for group, tensors in groups.items():
        name = f"{group}.safetensors"
        files[name], entries[group] = _write_safetensors(directory / name, tensors)
    manifest = Manifest(
        step=step,
        layout={"mesh": mesh.to_json()},
        files=files,
        groups=entries,
        objects=dict(objects),
        total_bytes=sum(file.nbytes for file in files.values()),
    )
    with open(directory / NAME, "xb") as file:
        file.write(manifest.dump())
        _sync(file)
    sync_directory(directory)


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """A file that the safetensors library reads; wide dtypes first, so that every tensor is aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = _header(names, tensors)
    entries = {}
    with open(path, "xb") as file:
        file.write(header)
        for name in names:
            tensor, start = tensors[name], file.tell()
            checksum = _write_tensor(file, tensor)
            shape, nbytes = tuple(tensor.shape), file.tell() - start
            piece = Piece(
                offset=(0,) * len(shape), size=shape, file=path.name, byte0=start, nbytes=nbytes, checksum=checksum
            )
            entries[name] = TensorEntry(shape=shape, dtype=str(tensor.dtype).removeprefix("torch."), boxes=(piece,))
        _sync(file)
    file_entry = FileEntry(nbytes=len(header) + end, header_nbytes=len(header), header_checksum=zlib.crc32(header))
    return file_entry, {name: entries[name] for name in tensors}


def _header(names: list[str], tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """The safetensors header, its length a multiple of 8, and the number of bytes of data behind it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end = start + math.prod(tensor.shape) * tensor.element_size()
        dtype = SAFETENSORS_NAMES[tensor.dtype]
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
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
