"""``tilth ckpt ls``, ``verify`` and ``prune``: list the checkpoints of runs, check their bytes, remove old ones."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from tilth.checkpoint.directory import complete
from tilth.cli.main import CkptLsCommand, CkptPruneCommand, CkptVerifyCommand
from tilth.cli.tables import new_table, show
from tilth.core.errors import CheckpointError
from tilth.runs import checkpoints
from tilth.runs.checkpoints import CheckpointFolder, CheckpointRow, Examined, Report, examine, usable
from tilth.runs.files import to_json
from tilth.runs.model_refs import lost
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
        show(*parts[1:])
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
