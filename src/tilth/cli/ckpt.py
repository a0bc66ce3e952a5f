"""``tilth ckpt``: list checkpoints, show and compare what is in them, check their bytes, remove old ones."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from tilth.checkpoint.directory import complete
from tilth.cli.main import CkptDiffCommand, CkptLsCommand, CkptPruneCommand, CkptShowCommand, CkptVerifyCommand
from tilth.cli.tables import new_table
from tilth.cli.tables import show as show_tables
from tilth.config.load import flattened
from tilth.core.errors import CheckpointError, DataError
from tilth.runs import checkpoints
from tilth.runs.checkpoints import CheckpointFolder, CheckpointRow, Examined, Report, examine, sizes, usable
from tilth.runs.files import to_json
from tilth.runs.model_refs import lost
from tilth.runs.tensors import Comparison, Difference, TensorSource, compare, open_source
from tilth.ui import format


def ls(options: CkptLsCommand) -> None:
    """Print the checkpoints without reading data. Exit code 1: a run's checkpoints are lost or cannot be listed."""
    there = checkpoints.places(options.where)
    found = [(place, *checkpoints.look(place, alone=len(there) == 1)) for place in there]
    if options.as_json:
        plain = [[_missing(place, problem)] if problem else map(asdict, some) for place, some, problem in found]
        typer.echo(to_json([row for some in plain for row in some]))
    else:
        parts: list[Table | str] = []
        for place, some, problem in found:
            nothing = f"  {problem or 'no checkpoint yet (run.save_every)'}"
            parts += ["", place.name, _table(some) if some else nothing]
        show_tables(*parts[1:])
    raise typer.Exit(int(any(problem for _, _, problem in found)))


def _missing(place: CheckpointFolder, problem: str) -> dict[str, Any]:
    row = CheckpointRow(place.owner, str(place.root), 0, "missing", problem, False, False, 0)
    return {**asdict(row), "step": None}


def _table(found: list[CheckpointRow]) -> Table:
    made = new_table("step", "saved (UTC)", "layout", "tensors", "size", "state", right=("step", "tensors", "size"))
    for row in found:
        state = ", ".join([row.state, *(["best"] if row.best else []), *(["newest"] if row.newest else [])])
        saved = "–" if row.saved is None else row.saved[:19].replace("T", " ")
        tensors = "–" if row.tensors is None else f"{row.tensors:,}"
        reason = f": {row.reason}" if row.reason else ""
        made.add_row(f"{row.step:,}", saved, mesh_text(row.layout), tensors, format.size(row.bytes), state + reason)
    return made


def mesh_text(layout: dict[str, int] | None) -> str:
    """Return a mesh as ``fsdp 2 x tp 2`` or ``1 process``."""
    if layout is None:
        return "–"
    if list(layout) == ["world"] and layout["world"] > 1:
        return f"{layout['world']} processes"
    return " x ".join(f"{name} {size}" for name, size in layout.items() if size > 1) or "1 process"


def verify(options: CkptVerifyCommand) -> None:
    """Compare every byte with its checksum. Exit code 1: something is damaged; 2: there is nothing to check."""
    there = usable(options.where)
    verdicts = list[tuple[CheckpointFolder, Examined]]()
    paths = [(folder, path) for folder in there for path in checkpoints.chosen(folder, options.everything)]
    with bar() as progress:
        for place, path in paths:
            verdict = examine(place, path, progress)
            if not verdict.intact and checkpoints.is_gone(place, path):
                typer.echo(f"{path}: passed over, it was removed in the meantime", err=options.as_json)
                continue
            verdicts.append((place, verdict))
            if not options.as_json:
                read = f"intact, {format.size(verdict.bytes)} read and compared" if verdict.intact else "damaged"
                typer.echo("\n  ".join([f"{verdict.checkpoint}: {read}", *verdict.problems]))
    if not verdicts:
        missing = next(filter(None, (lost(place.run, place.root) for place in there)), "")
        raise CheckpointError(missing or f"there is no complete checkpoint in {options.where}", key="WHERE")
    bad = next((place for place, verdict in verdicts if not verdict.good), None)
    if options.as_json:
        typer.echo(to_json([asdict(verdict) for _, verdict in verdicts]))
    elif bad is not None:
        typer.echo(_advice(bad, {verdict.checkpoint for _, verdict in verdicts if verdict.good}))
    raise typer.Exit(int(bad is not None))


@contextmanager
def bar() -> Iterator[Report]:
    """Show a progress bar on a terminal, nothing elsewhere."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not sys.stderr.isatty()
    ) as shown:
        task = shown.add_task("", total=None)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)


def _advice(bad: CheckpointFolder, good: set[str]) -> str:
    older = [path for path in complete(bad.root) if str(path) in good]
    if older:
        return f"the newest intact one is {older[-1]}; 'tilth run ... --fallback' resumes from there"
    where = bad.run or bad.root
    return f"'tilth ckpt verify {where} --all' finds one that is intact; 'tilth run ... --fallback' resumes from it"


def remove(options: CkptPruneCommand) -> None:
    """Remove prunable checkpoints, or list them, and print which."""
    found = checkpoints.prune(options.where, options.keep, options.every, dry=options.dry, damaged=options.damaged)
    freed = sum(row.bytes for row in found.removed)
    if options.as_json:
        names = ("run", "checkpoint", "step", "state", "bytes")
        plain = [{name: getattr(row, name) for name in names} for row in found.removed]
        typer.echo(to_json({"dry_run": options.dry, "removed": plain, "bytes": freed, "kept": found.kept}))
        return
    verb, would = ("would remove", "would be freed") if options.dry else ("removed", "freed")
    lines = [f"{verb} {row.checkpoint} ({row.state}, {format.size(row.bytes)})" for row in found.removed]
    count, stay = len(found.removed), len(found.kept)
    lines.append(f"{count} of {count + stay}, {format.size(freed)} {would}; {stay} stay")
    if found.left:
        why = "a process may still write them, only its run's name would show"
        lines.append(f"unfinished and left: {found.left}; {why}")
    typer.echo("\n".join(lines))


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
