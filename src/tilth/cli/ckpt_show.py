"""What is in a checkpoint, or in a directory of Hugging Face: groups, files, tensors, what was saved beside them."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import typer
from rich.table import Table

from tilth.cli.ckpt import mesh_text, sizes
from tilth.cli.ckpt_diff import abridged
from tilth.cli.ckpt_source import DirectorySource, StoredSource, TensorSource, dtype_name, flattened, open_source
from tilth.cli.tables import new_table
from tilth.cli.tables import show as show_tables
from tilth.core.errors import DataError
from tilth.runs.files import to_json
from tilth.ui import format

_SHOWN = 40
"""Files and values in the tables; ``--json`` has all."""


@dataclass(frozen=True)
class ShownBox:
    """A box of a tensor and where it lies."""

    offset: list[int]
    size: list[int]
    file: str
    byte0: int
    """From the start of the file."""
    bytes: int


@dataclass(frozen=True)
class ShownTensor:
    """A tensor."""

    group: str
    name: str
    shape: list[int]
    dtype: str
    bytes: int
    files: list[str]
    boxes: list[ShownBox] = field(default_factory=list)
    """With ``--boxes``."""


def show(spec: str, *, pattern: str | None, boxes: bool, as_json: bool) -> None:
    """Print what is in it; no data is read. pattern: of tensors to list, as in ``model/*norm*``."""
    source = open_source(spec)
    listed = list(tensors(source, "*" if pattern is None and boxes else pattern, boxes=boxes))
    if pattern is not None and not listed:
        raise DataError(
            f"--tensors {pattern}: no tensor of {source.name} has such a name; as in 'model/*norm*'", key="--tensors"
        )
    head = summary(source)
    if as_json:
        more = {"tensors": [asdict(one) for one in listed]} if pattern is not None or boxes else {}
        typer.echo(to_json(head | more))
        return
    show_tables(*_head(head))
    if listed:
        show_tables("", _tensors(listed, boxes=boxes))


def tensors(source: TensorSource, pattern: str | None, *, boxes: bool) -> Iterator[ShownTensor]:
    """Those whose name, with or without its group, is like the pattern."""
    for group in source.groups() if pattern is not None else ():
        for name in source.names(group):
            if fnmatchcase(name, pattern or "") or fnmatchcase(f"{group}/{name}", pattern or ""):
                yield _shown(source, group, name, boxes=boxes)


def _shown(source: TensorSource, group: str, name: str, *, boxes: bool) -> ShownTensor:
    shape, dtype = source.kind(group, name)
    parts: list[ShownBox] = []
    if isinstance(source, StoredSource):
        pieces = source.checkpoint.entry(group, name).boxes
        files = list(dict.fromkeys(piece.file for piece in pieces))
        if boxes:
            parts = [ShownBox(list(p.offset), list(p.size), p.file, p.byte0, p.nbytes) for p in pieces]
    else:
        files = [source.tensors.files[name]] if isinstance(source, DirectorySource) else []
    nbytes = math.prod(shape) * dtype.itemsize
    return ShownTensor(group, name, list(shape), dtype_name(dtype), nbytes, files, parts)


def summary(source: TensorSource) -> dict[str, Any]:
    """All but single tensors, as plain data."""
    groups = [_group(source, group) for group in source.groups()]
    if not isinstance(source, StoredSource):
        nbytes = sum(group["bytes"] for group in groups)
        return {"path": source.name, "kind": "huggingface", "bytes": nbytes, "groups": groups}
    manifest = source.checkpoint.manifest
    return {
        "path": source.name,
        "kind": "checkpoint",
        "step": manifest.step,
        "saved": manifest.saved,
        "layout": sizes(manifest.layout),
        "bytes": manifest.total_bytes,
        "groups": groups,
        "files": [{"name": n, "group": f.group, "bytes": f.nbytes} for n, f in manifest.files.items()],
        "objects": manifest.objects,
    }


def _group(source: TensorSource, group: str) -> dict[str, Any]:
    kinds = [source.kind(group, name) for name in source.names(group)]
    return {
        "group": group,
        "tensors": len(kinds),
        "elements": sum(math.prod(shape) for shape, _ in kinds),
        "bytes": sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds),
        "dtypes": sorted({dtype_name(dtype) for _, dtype in kinds}),
    }


# ---- for people ----


def _head(head: dict[str, Any]) -> Iterator[Any]:
    yield head["path"]
    if "step" in head:
        when, nbytes = head["saved"][:19].replace("T", " "), format.size(head["bytes"])
        files = f"{len(head['files'])} file{'s' if len(head['files']) != 1 else ''}"
        yield f"step {head['step']:,}, saved {when} UTC, by {mesh_text(head['layout'])}, {nbytes} in {files}"
    else:
        yield f"a directory of Hugging Face, {format.size(head['bytes'])}"
    yield ""
    yield _groups(head["groups"])
    if "step" in head:
        yield from ("", _files(head["files"]))
        if len(head["files"]) > _SHOWN:
            yield f"and {len(head['files']) - _SHOWN} more; --json has all"
        yield from _objects(flattened(head["objects"]) if head["objects"] else {})


def _groups(groups: list[dict[str, Any]]) -> Table:
    made = new_table("group", "tensors", "elements", "size", "dtype", right=("tensors", "elements", "size"))
    for one in groups:
        size = format.size(one["bytes"])
        made.add_row(one["group"], f"{one['tensors']:,}", f"{one['elements']:,}", size, ", ".join(one["dtypes"]))
    return made


def _files(files: list[dict[str, Any]]) -> Table:
    made = new_table("file", "group", "size", right=("size",))
    for one in files[:_SHOWN]:
        made.add_row(one["name"], one["group"], format.size(one["bytes"]))
    return made


def _objects(values: dict[str, Any]) -> Iterator[Any]:
    if not values:
        return
    made = new_table("object", "value")
    for key, value in list(values.items())[:_SHOWN]:
        made.add_row(key, abridged(value))
    yield from ("", made)
    if len(values) > _SHOWN:
        yield f"and {len(values) - _SHOWN} more; --json has all"


def _tensors(listed: list[ShownTensor], *, boxes: bool) -> Table:
    made = new_table("tensor", "shape", "dtype", "size", "files", right=("size",))
    for one in listed:
        what = f"{one.group}/{one.name}"
        made.add_row(what, str(one.shape), one.dtype, format.size(one.bytes), _some(one.files))
        for part in one.boxes if boxes else ():
            where = ", ".join(f"{start}:{start + size}" for start, size in zip(part.offset, part.size))
            made.add_row(f"  [{where}]", str(part.size), "", format.size(part.bytes), f"{part.file} @{part.byte0:,}")
    return made


def _some(files: list[str]) -> str:
    return ", ".join(files[:1]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
