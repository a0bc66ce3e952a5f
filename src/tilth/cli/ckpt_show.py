"""``tilth ckpt show`` and ``diff``: the contents of checkpoints and Hugging Face directories, and their differences."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import typer
from rich.table import Table

from tilth.cli.ckpt import bar, mesh_text
from tilth.cli.main import CkptDiffCommand, CkptShowCommand
from tilth.cli.tables import new_table
from tilth.cli.tables import show as show_tables
from tilth.core.errors import DataError
from tilth.runs.checkpoints import sizes
from tilth.runs.files import flattened, to_json
from tilth.runs.tensors import Comparison, Difference, TensorSource, compare, open_source
from tilth.ui import format

_SHOWN, _WIDTH = 40, 48  # most files and values in a table, and characters of a value; ``--json`` has all
_DIFFERENT = 20  # most tensors and values in a table of differences; ``--json`` has all


def show(options: CkptShowCommand) -> None:
    """Print the contents without reading data."""
    source, pattern, boxes = open_source(options.spec), options.pattern, options.boxes
    listed = list(_matching(source, "*" if pattern is None and boxes else pattern, boxes=boxes))
    if pattern is not None and not listed:
        raise DataError(
            f"--tensors {pattern}: no tensor of {source.name} has such a name; as in 'model/*norm*'", key="--tensors"
        )
    head = summary(source)
    if options.as_json:
        typer.echo(to_json(head | ({"tensors": listed} if pattern is not None or boxes else {})))
    else:
        show_tables(*_head(head), *(["", _tensor_table(listed)] if listed else []))


def _matching(source: TensorSource, pattern: str | None, *, boxes: bool) -> Iterator[dict[str, Any]]:
    """Yield the tensors whose name, with or without its group, matches the pattern, as plain data."""
    for group, tensors in source.groups.items() if pattern is not None else ():
        for name, one in tensors.items():
            if fnmatchcase(name, pattern or "") or fnmatchcase(f"{group}/{name}", pattern or ""):
                pieces = one.pieces
                files = [one.file] if one.file else list(dict.fromkeys(piece.file for piece in pieces))
                parts = [
                    dict(offset=list(p.offset), size=list(p.size), file=p.file, byte0=p.byte0, bytes=p.nbytes)
                    for p in (pieces if boxes else ())
                ]
                yield {
                    "group": group, "name": name, "shape": list(one.shape), "dtype": one.dtype_name,
                    "bytes": one.nbytes, "files": files, "boxes": parts,
                }  # fmt: skip


def summary(source: TensorSource) -> dict[str, Any]:
    """Return everything but single tensors as plain data."""
    groups: list[dict[str, Any]] = [
        {
            "group": group, "tensors": len(tensors), "elements": sum(math.prod(one.shape) for one in tensors.values()),
            "bytes": sum(one.nbytes for one in tensors.values()),
            "dtypes": sorted({one.dtype_name for one in tensors.values()}),
        }
        for group, tensors in source.groups.items()
    ]  # fmt: skip
    manifest = source.manifest
    if manifest is None:
        nbytes = sum(group["bytes"] for group in groups)
        return {"path": source.name, "kind": "huggingface", "bytes": nbytes, "groups": groups}
    return {
        "path": source.name, "kind": "checkpoint", "step": manifest.step, "saved": manifest.saved,
        "layout": sizes(manifest.layout), "bytes": manifest.total_bytes, "groups": groups,
        "files": [{"name": n, "group": f.group, "bytes": f.nbytes} for n, f in manifest.files.items()],
        "objects": manifest.objects,
    }  # fmt: skip


# ---- printing ----


def _head(head: dict[str, Any]) -> Iterator[Any]:
    yield head["path"]
    if "step" in head:
        when, nbytes = head["saved"][:19].replace("T", " "), format.size(head["bytes"])
        count = format.count(len(head["files"]), "file")
        yield f"step {head['step']:,}, saved {when} UTC, by {mesh_text(head['layout'])}, {nbytes} in {count}"
    else:
        yield f"a directory of Hugging Face, {format.size(head['bytes'])}"
    groups = [
        (g["group"], f"{g['tensors']:,}", f"{g['elements']:,}", format.size(g["bytes"]), ", ".join(g["dtypes"]))
        for g in head["groups"]
    ]
    numbers = ("tensors", "elements", "size")
    yield from ("", new_table("group", *numbers, "dtype", right=numbers, rows=groups))
    if "step" in head:
        files = [(one["name"], one["group"], format.size(one["bytes"])) for one in head["files"]]
        yield from ("", new_table("file", "group", "size", right=("size",), rows=files[:_SHOWN]), *more(files, _SHOWN))
        values = flattened(head["objects"]) if head["objects"] else {}
        rows = [(key, abridged(value)) for key, value in values.items()]
        if rows:
            yield from ("", new_table("object", "value", rows=rows[:_SHOWN]), *more(rows, _SHOWN))


def more(found: list[Any], shown: int) -> list[str]:
    """Return a line that counts what a table leaves out, if anything."""
    return [f"and {len(found) - shown} more; --json has all"] if len(found) > shown else []


def _tensor_table(listed: list[dict[str, Any]]) -> Any:
    made = new_table("tensor", "shape", "dtype", "size", "files", right=("size",))
    for one in listed:
        files = one["files"]
        which = ", ".join(files[:1]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        made.add_row(f"{one['group']}/{one['name']}", str(one["shape"]), one["dtype"], format.size(one["bytes"]), which)
        for part in one["boxes"]:
            where = ", ".join(f"{start}:{start + size}" for start, size in zip(part["offset"], part["size"]))
            at = f"{part['file']} @{part['byte0']:,}"
            made.add_row(f"  [{where}]", str(part["size"]), "", format.size(part["bytes"]), at)
    return made


def abridged(value: Any) -> str:
    """Return JSON, cut to a few words."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and len(text) > _WIDTH:
        return f"{text[: _WIDTH // 2]}... {len(value):,} values"
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}... {len(text):,} characters"


# ---- differences ----


def diff(options: CkptDiffCommand) -> None:
    """Print the differences; exit code 1 if there are any."""
    tolerance = options.tolerance
    if tolerance is not None and not tolerance >= 0:
        raise DataError(f"--tolerance {tolerance}: it must be a number of at least 0", key="--tolerance")
    with bar() as report:
        found = compare(open_source(options.a), open_source(options.b), tolerance, report)
    if options.as_json:
        typer.echo(to_json({"equal": found.equal, **asdict(found)}))
    else:
        show_tables(*_lines(found))
    raise typer.Exit(0 if found.equal else 1)


def _lines(found: Comparison) -> list[Any]:
    parts: list[Any] = [f"a: {found.a}", f"b: {found.b}"]
    if found.left_out:
        parts.append(f"not compared, since a Hugging Face directory has weights only: {', '.join(found.left_out)}")
    same = [one for one in found.tensors if one.kind == "dtype" and not one.count]
    apart = [one for one in found.tensors if one.kind != "dtype" or one.count]
    if apart:
        parts += ["", _difference_table(apart[:_DIFFERENT]), *more(apart, _DIFFERENT)]
    if same:
        limit = f"values within the tolerance (at most {_number(_most(same))} apart)"
        values = limit if found.tolerance else "the same values"
        parts += ["", f"{len(same)} tensors have another dtype and {values}, as {same[0].name}: {_what(same[0])}"]
    if found.objects:
        rows = [(c.key, *(abridged(v) if c.there in ("both", s) else "–" for v, s in ((c.a, "a"), (c.b, "b"))))
                for c in found.objects[:_DIFFERENT]]  # fmt: skip
        parts += ["", new_table("object", "a", "b", rows=rows), *more(found.objects, _DIFFERENT)]
    parts.append("")
    for group, count in found.groups.items():
        if some := [one for one in found.tensors if one.group == group and one.count]:
            parts.append(f"{group}: {len(some)} of {count} tensors differ, at most by {_number(_most(some))}")
    count = len(found.objects)
    others = f"; {count} {'value beside them differs' if count == 1 else 'values beside them differ'}" if count else ""
    what = f"{found.compared} tensors compared ({format.size(found.bytes)} read), {_alike(found, len(same))}"
    return [*parts, what + others + (": no difference" if found.equal else "")]


def _alike(found: Comparison, other_dtype: int) -> str:
    """Count the tensors whose values do not differ, of which ``other_dtype`` have another dtype."""
    same = found.compared - sum(one.count > 0 for one in found.tensors)
    if found.tolerance:
        return f"{same} are within the tolerance" + (f" (at most {_number(found.within)} apart)" if same else "")
    return f"{same - other_dtype} are the same" + (f", {other_dtype} but for their dtype" if other_dtype else "")


def _most(differences: Sequence[Difference]) -> float | None:
    found = [one.max_abs for one in differences]
    return None if None in found else max(value or 0.0 for value in found)


def _difference_table(differences: Sequence[Difference]) -> Table:
    numbers = ("elements", "share", "max |a-b|", "relative")
    made = new_table("tensor", "what", *numbers, "first", right=numbers)
    for one in differences:
        cells = [f"{one.count:,}", f"{100 * one.share:.3g} %", _number(one.max_abs), _number(one.max_rel)]
        first = str(one.first) if one.first is not None else ""
        compared = one.kind in ("values", "dtype")
        made.add_row(f"{one.group}/{one.name}", _what(one), *(cells if compared else [""] * 4), first)
    return made


def _what(one: Difference) -> str:
    if one.kind == "dtype":
        return " / ".join(str(side).split()[0] for side in (one.a, one.b))
    return one.kind if one.kind != "shape" else f"{one.a} / {one.b}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
