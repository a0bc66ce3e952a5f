"""The manifest of a checkpoint: which bytes of which file are which box of which tensor. JSON, never code.

``manifest.json`` holds the fields of ``Manifest`` and ``checksum``, the CRC-32 of their canonical JSON. Every byte of
every file is under some checksum: the boxes cover the data, the file entries the safetensors headers.
"""

import json
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Shape

NAME = "manifest.json"

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(_Entry):
    """One box of a tensor: bytes ``byte0 .. byte0 + nbytes`` of a file, row-major, with their CRC-32."""

    offset: Shape
    size: Shape
    file: str
    byte0: int
    nbytes: int
    checksum: int

    @property
    def box(self) -> Box:
        """Where in the tensor it belongs."""
        return Box(self.offset, self.size)


class TensorEntry(_Entry):
    """A tensor: its global shape, its dtype by torch's name, and boxes that tile it."""

    shape: Shape
    dtype: str
    boxes: tuple[Piece, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]


class FileEntry(_Entry):
    """A data file: its size and, for the bytes before the tensors, their number and CRC-32."""

    nbytes: int
    header_nbytes: int
    header_checksum: int


class PartEntry(_Entry):
    """What one rank wrote of one group of tensors in one save: what a worker reports to the controller, as JSON."""

    folder: str
    """Name of the temporary folder, so that no part of another save is taken for one of this."""
    group: str
    rank: int
    ranks: tuple[tuple[int, int], ...]
    """All ranks that hold some of the group, as intervals [start, stop)."""
    files: dict[str, FileEntry]
    """The file, if there was something to write."""
    tensors: dict[str, TensorEntry]
    """Those with a box in the file; of the first rank of a mesh all, so that none can be forgotten."""


class Manifest(_Entry):
    """The whole table. ``layout`` holds the mesh that wrote it, ``objects`` whatever JSON the controller keeps."""

    format: Literal["tilth-checkpoint"] = "tilth-checkpoint"
    version: Literal[1] = 1
    step: int
    layout: dict[str, Any]
    files: dict[str, FileEntry]
    groups: dict[str, dict[str, TensorEntry]]
    objects: dict[str, Any]
    total_bytes: int

    def dump(self) -> bytes:
        """The contents of ``manifest.json``."""
        body = self.model_dump(mode="json", exclude={"objects"}) | {"objects": self.objects}  # as they are, bit for bit
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1).encode()


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def load_manifest(directory: Path) -> Manifest:
    """Read and check ``manifest.json``; CheckpointError names the directory and what is wrong with it."""
    path = directory / NAME
    try:
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict) or body.get("format") != "tilth-checkpoint":
            raise CheckpointError(f"{path} is not the manifest of a Tilth checkpoint")
        if body.get("version") != 1:
            raise CheckpointError(f"{path} has format version {body.get('version')}; this Tilth reads version 1")
        if body.pop("checksum", None) != _checksum(body):
            raise CheckpointError(f"{path} is corrupt: its checksum does not match its contents")
        return Manifest(**body)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise CheckpointError(f"{directory} is not a complete checkpoint: {NAME}: {reason}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is not a valid manifest: {where}: {first['msg']}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupt: not readable as JSON ({error})") from error
