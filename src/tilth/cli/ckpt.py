"""The checkpoints of a run: which are there, whether their bytes are what was saved, which go."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from tilth.checkpoint import latest, open_checkpoint, read_best
from tilth.checkpoint.directory import (
    BEST,
    MISSING,
    FoundCheckpoint,
    bare,
    complete,
    discard,
    listing,
    step_of,
    superfluous,
)
from tilth.checkpoint.storage import Location, is_url, join, split, storage_of
from tilth.cli.tables import new_table
from tilth.cli.tables import show as show_tables
from tilth.core.errors import CheckpointError, DataError, StorageError, TilthError
from tilth.runs.files import Lock, to_json
from tilth.runs.model_refs import (
    find_checkpoint,
    foreign,
    is_checkpoint,
    is_run,
    lost,
    reaching,
    root_of,
    run_settings,
    split_spec,
)
from tilth.runs.readers import read_state
from tilth.ui import format

_DAMAGED_ANYWHERE = ("damaged", "replaced")
_DAMAGED = (*_DAMAGED_ANYWHERE, "unfinished")


class CheckpointFolder(NamedTuple):
    """A folder of checkpoints."""

    root: Location
    run: Path | None = None
    """The run that they are of."""
    only: Location | None = None
    """The one that was named."""
    problem: TilthError | None = None
    """Why the directory of the run's checkpoints is unknown."""

    @property
    def name(self) -> str:
        """For people."""
        return str(self.only or self.run or self.root)


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint, or what is left of one, as ``tilth ckpt ls --json`` says it."""

    run: str | None
    checkpoint: str
    step: int
    state: str
    """complete, damaged, unfinished (a save that is under way or was cut off), replaced (by one of the same step).

    In ``--json`` missing too: a run whose checkpoints are lost or cannot be listed; ``checkpoint`` is their folder
    then, and ``step`` null.
    """
    reason: str
    """Why it is damaged, or that another run made it."""
    newest: bool
    """A run would go on from it."""
    best: bool
    """By evaluation."""
    bytes: int
    saved: str | None = None
    """When, UTC, ISO 8601."""
    layout: dict[str, int] | None = None
    """Of the processes that wrote it: how many in each dimension."""
    tensors: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What ``tilth ckpt verify --json`` says of a checkpoint."""

    run: str | None
    checkpoint: str
    step: int | None
    intact: bool
    bytes: int
    """That were read and compared with their checksums."""
    seconds: float
    problems: list[str] = field(default_factory=list)
    """A line for each damaged file or tensor."""
    own: bool = True
    """Its run made it; else the run does not go on from it, and the last of the problems says so."""

    @property
    def good(self) -> bool:
        """The run can go on from it."""
        return self.intact and self.own


# ---- where ----


def places(where: str) -> list[CheckpointFolder]:
    """The folders of checkpoints that a text means: a run's, of all runs in a folder, a folder or URL itself.

    DataError if there is no such thing.
    """
    place, which = split_spec(where)
    if which:
        named = find_checkpoint(where)
        if named is not None:
            return [CheckpointFolder(split(named.path)[0], named.run, named.path)]
    with reaching(place):
        if is_run(place):
            return [CheckpointFolder(root_of(Path(place)), Path(place))]
        if is_checkpoint(place):
            named = find_checkpoint(where)
            return [CheckpointFolder(split(place)[0], named.run if named else None, place)]
        if listing(place):
            return [CheckpointFolder(place, _run_above(place))]
        found = list(_below(place)) or list(_alone(place))
    if not found:
        raise DataError(
            f"WHERE={where!r} is neither a run nor a checkpoint, nor a folder of those; runs lie in runs/ by default",
            key="WHERE",
        )
    return found


def _run_above(folder: Location) -> Path | None:
    """The run in whose folder it lies, by its name or by what that is a link to."""
    if is_url(folder):
        return None
    named, real = Path(os.path.abspath(folder)), Path(folder).resolve()
    return next((above for path in (named, real) for above in path.parents if is_run(above)), None)


def _alone(folder: Location) -> Iterator[CheckpointFolder]:
    """What was a checkpoint until its manifest went."""
    root = split(folder)[0]
    if any(_same(folder, path) for path in bare(root)):
        yield CheckpointFolder(root, _run_above(root), folder)


def _below(folder: Location) -> Iterator[CheckpointFolder]:
    """The runs in a folder, and the places in a store that ``run.checkpoints`` gave to several."""
    for name in storage_of(folder).names():
        inside = join(folder, name)
        if is_run(inside):
            yield _of_run(Path(inside))
        elif listing(inside):
            yield CheckpointFolder(inside)


def _of_run(run: Path) -> CheckpointFolder:
    """One of several: what is wrong with it is not to hide the others."""
    try:
        return CheckpointFolder(root_of(run), run)
    except TilthError as error:
        return CheckpointFolder(run / "checkpoints", run, problem=error)


def _known(where: str) -> list[CheckpointFolder]:
    """As ``places``. DataError if one of them is not known."""
    found = places(where)
    for problem in (place.problem for place in found if place.problem):
        raise DataError(str(problem), key=problem.key)
    return found


# ---- ls ----


def ls(where: str, *, as_json: bool) -> None:
    """Print what is there; no data is read. Exit code 1 where a run's checkpoints are lost or cannot be listed."""
    there = places(where)
    found = {place: _looked(place, alone=len(there) == 1) for place in there}
    wrong = any(problem for _, problem in found.values())
    if as_json:
        said = [[_wrong(place, problem)] if problem else map(asdict, some) for place, (some, problem) in found.items()]
        typer.echo(to_json([row for some in said for row in some]))
        raise typer.Exit(int(wrong))
    for i, (place, (some, problem)) in enumerate(found.items()):
        nothing = f"  {problem or 'no checkpoint yet (run.save_every)'}"
        show_tables(*([""] if i else []), place.name, _listed(some) if some else nothing)
    raise typer.Exit(int(wrong))


def _looked(place: CheckpointFolder, *, alone: bool) -> tuple[list[CheckpointRow], str]:
    """What is there; and, where that is nothing, what is wrong. An error is one of the command where it is all."""
    if place.problem:
        return [], str(place.problem)
    try:
        found = rows(place)
    except TilthError as error:
        if alone:
            raise
        return [], str(error)
    return found, "" if found else lost(place.run, place.root)


def _wrong(place: CheckpointFolder, problem: str) -> dict[str, Any]:
    """A run of which there is no checkpoint to be listed, in the place of a row."""
    row = CheckpointRow(str(place.run) if place.run else None, str(place.root), 0, "missing", problem, False, False, 0)
    return {**asdict(row), "step": None}


def rows(place: CheckpointFolder) -> list[CheckpointRow]:
    """All checkpoints and leftovers of a place, the oldest first."""
    with reaching(place.root):
        entries, newest, best = listing(place.root), latest(place.root), read_best(place.root)
        found = [
            _row(place, entry, newest=entry.path == newest, best=bool(best and best["step"] == entry.step))
            for entry in entries
            if place.only is None or _same(entry.path, place.only)
        ]
        there = {str(entry.path) for entry in listing(place.root)}  # meanwhile a run may have saved and removed some
        return [row for row in found if row.checkpoint in there]


def _same(a: Location, b: Location) -> bool:
    return a == b or (not is_url(a) and Path(a).resolve() == Path(b).resolve())


def _row(place: CheckpointFolder, entry: FoundCheckpoint, *, newest: bool, best: bool) -> CheckpointRow:
    who = str(place.run) if place.run else None
    best = best and entry.state == "complete"
    row = CheckpointRow(who, str(entry.path), entry.step, entry.state, entry.reason, newest, best, _nbytes(entry.path))
    row = _with(row, reason=_without_place(entry.reason, entry.path))
    if entry.state == "unfinished" or entry.reason == MISSING:
        return row
    try:
        manifest = open_checkpoint(entry.path).manifest
    except CheckpointError as error:
        state = "damaged" if entry.state == "complete" else entry.state
        return _with(row, state=state, reason=row.reason or _without_place(str(error), entry.path), best=False)
    tensors = sum(map(len, manifest.groups.values()))
    reason = row.reason or _foreign(place, manifest.objects)
    return _with(row, reason=reason, saved=manifest.saved, layout=sizes(manifest.layout), tensors=tensors)


def _foreign(place: CheckpointFolder, objects: Mapping[str, Any]) -> str:
    """That another run made it, if so. run.json of old runs does not say which checkpoints are theirs."""
    known = read_state(place.run).get("digests") if place.run is not None else None
    return foreign(objects, known) if known else ""


def _with(row: CheckpointRow, **changes: Any) -> CheckpointRow:
    return CheckpointRow(**{**asdict(row), **changes})


def sizes(layout: dict[str, Any]) -> dict[str, int]:
    """Dimensions of the mesh of the writers, with their sizes."""
    mesh = layout.get("mesh", {})
    return dict(zip(mesh.get("names", ()), mesh.get("sizes", ())))


def _nbytes(path: Location) -> int:
    """Of all files in a folder."""
    storage = storage_of(path)
    return sum(storage.size(name) or 0 for name in storage.names())


def _without_place(text: str, path: Location) -> str:
    """What is wrong, of a line that says of which checkpoint too, maybe as it was called before it was put aside."""
    root, name = split(path)
    roots = {str(root)} if is_url(root) else {str(root), str(Path(root).resolve())}
    for place in {f"{one}/{called}" for one in roots for called in (name, name.partition(".")[0])}:
        for start in (f"checkpoint {place}: ", f"{place} "):
            text = text.removeprefix(start)
        text = text.replace(f"{place}/", "")
    return text


def _listed(found: list[CheckpointRow]) -> Table:
    made = new_table("step", "saved (UTC)", "layout", "tensors", "size", "state", right=("step", "tensors", "size"))
    for row in found:
        state = ", ".join([row.state, *(["best"] if row.best else []), *(["newest"] if row.newest else [])])
        saved = "–" if row.saved is None else row.saved[:19].replace("T", " ")
        tensors = "–" if row.tensors is None else f"{row.tensors:,}"
        reason = f": {row.reason}" if row.reason else ""
        made.add_row(f"{row.step:,}", saved, mesh_text(row.layout), tensors, format.size(row.bytes), state + reason)
    return made


def mesh_text(layout: dict[str, int] | None) -> str:
    """``fsdp 2 x tp 2``; ``1 process``."""
    if layout is None:
        return "–"
    if list(layout) == ["world"] and layout["world"] > 1:
        return f"{layout['world']} processes"
    several = [f"{name} {size}" for name, size in layout.items() if size > 1]
    return " x ".join(several) or "1 process"


# ---- verify ----


def verify(where: str, *, everything: bool, as_json: bool) -> None:
    """Compare every byte with its checksum; exit code 1 if something is damaged, 2 if there is nothing to look at."""
    there = _known(where)
    found = [(place, path) for place in there for path in _chosen(place, everything)]
    verdicts = list[tuple[CheckpointFolder, Verdict]]()
    with bar() as progress:
        for place, path in found:
            verdict = examine(place, path, progress)
            if not verdict.intact and _gone(place, path):
                typer.echo(f"{path}: passed over, it was removed in the meantime", err=as_json)
                continue
            verdicts.append((place, verdict))
            if not as_json:
                typer.echo("\n".join(_said(verdict)))
    if not verdicts:
        missing = next(filter(None, (lost(place.run, place.root) for place in there)), "")
        raise CheckpointError(missing or f"there is no complete checkpoint in {where}", key="WHERE")
    if as_json:
        typer.echo(to_json([asdict(verdict) for _, verdict in verdicts]))
    elif not all(verdict.good for _, verdict in verdicts):
        typer.echo(_advice(verdicts))
    raise typer.Exit(0 if all(verdict.good for _, verdict in verdicts) else 1)


def _chosen(place: CheckpointFolder, everything: bool) -> list[Location]:
    if place.only is not None:
        return [place.only]
    with reaching(place.root):
        there: list[Location] = sorted([*complete(place.root), *bare(place.root)], key=lambda path: step_of(path) or 0)
    return there if everything else there[-1:]


def _gone(place: CheckpointFolder, path: Location) -> bool:
    """Whether a process that writes the run has removed or replaced it: then what could not be read is no damage."""
    with reaching(place.root):
        there = any(_same(path, one) for one in (*complete(place.root), *bare(place.root)))
        return not there and (place.only is None or not is_checkpoint(path))


Told = Callable[[str, int, int], None]
"""What is being read; bytes so far; bytes in all."""


def examine(place: CheckpointFolder, path: Location, told: Told) -> Verdict:
    """Read and check one checkpoint."""
    start, read, problems, foreign = time.monotonic(), 0, list[str](), ""
    try:
        with reaching(path):
            checkpoint = open_checkpoint(path)
            foreign = _foreign(place, checkpoint.objects)
            try:
                checkpoint.verify(lambda done, total: told(Path(str(path)).name, done, total))
            finally:
                read = checkpoint.bytes_read
    except CheckpointError as error:
        lost = any(_same(path, one) for one in bare(place.root))
        problems = [MISSING] if lost else _without_place(str(error), path).split("; ")
    run = str(place.run) if place.run else None
    seconds = round(time.monotonic() - start, 3)
    said = [*problems, *([foreign] if foreign else [])]
    return Verdict(run, str(path), step_of(path), not problems, read, seconds, said, not foreign)


@contextmanager
def bar() -> Iterator[Told]:
    """A bar on a terminal, nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        if not sys.stderr.isatty():
            yield lambda what, done, total: None
            return
        from rich.console import Console

        shown = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = shown.add_task("", total=None)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)


def _said(verdict: Verdict) -> list[str]:
    if verdict.intact:
        start = f"{verdict.checkpoint}: intact, {format.size(verdict.bytes)} read and compared"
        return [start, *(f"  {problem}" for problem in verdict.problems)]
    return [f"{verdict.checkpoint}: damaged", *(f"  {problem}" for problem in verdict.problems)]


def _advice(verdicts: list[tuple[CheckpointFolder, Verdict]]) -> str:
    good = {verdict.checkpoint for _, verdict in verdicts if verdict.good}
    bad = next(place for place, verdict in verdicts if not verdict.good)
    older = [path for path in complete(bad.root) if str(path) in good]
    if older:
        return f"the newest intact one is {older[-1]}; 'tilth run ... --fallback' goes on from there"
    where = bad.run or bad.root
    return f"'tilth ckpt verify {where} --all' finds one that is intact; 'tilth run ... --fallback' goes on from it"


# ---- prune ----


@dataclass(frozen=True)
class Removal:
    """A checkpoint that goes, as ``tilth ckpt prune --json`` says it."""

    run: str | None
    checkpoint: str
    step: int
    state: str
    bytes: int


def prune(where: str, *, keep: int | None, every: int | None, dry: bool, damaged: bool, as_json: bool) -> None:
    """Remove what need not be kept, or say what that is; never the last one, never the best."""
    removed, stay, left = list[Removal](), list[str](), 0
    for place in _known(where):
        _check_best(place)
        if place.only is not None:
            raise DataError(
                f"WHERE={where!r} is one checkpoint; name its run, or the folder that it is in", key="WHERE.checkpoint"
            )
        with ExitStack() as stack:
            if place.run is not None and not dry:
                stack.callback(_lock(place.run).release)
            gone = _superfluous(place, *_retention(place, keep, every), damaged=damaged)
            for row in gone if not dry else ():
                _discard(row)
            removed += gone
            left += sum(e.state == "unfinished" for e in listing(place.root)) if damaged and place.run is None else 0
            stay += [str(p) for p in complete(place.root) if str(p) not in {row.checkpoint for row in gone}]
    freed = sum(row.bytes for row in removed)
    if as_json:
        rows = [asdict(row) for row in removed]
        typer.echo(to_json({"dry_run": dry, "removed": rows, "bytes": freed, "kept": stay}))
        return
    for row in removed:
        typer.echo(f"{'would remove' if dry else 'removed'} {row.checkpoint} ({row.state}, {format.size(row.bytes)})")
    verb = "would be freed" if dry else "freed"
    typer.echo(f"{len(removed)} of {len(removed) + len(stay)}, {format.size(freed)} {verb}; {len(stay)} stay")
    if left:
        typer.echo(f"unfinished and left: {left}; only by its run's name is it known that no process is writing there")


def _check_best(place: CheckpointFolder) -> None:
    """The best may not go, so it must be known."""
    try:
        with reaching(place.root):
            read_best(place.root)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise
        file = join(place.root, BEST)
        raise CheckpointError(
            f"{error}; it names the checkpoint that prune must keep: remove {file}, then none is the best", key=BEST
        ) from error


def _lock(run: Path) -> Lock:
    """As a process has it that writes the run. StorageError while one does."""
    if not os.access(run, os.W_OK):
        raise StorageError(f"{run} is not writable, so nothing can be removed from it", key="RUN")
    return Lock(run / "run.lock")


def _retention(place: CheckpointFolder, keep: int | None, every: int | None) -> tuple[int, int]:
    """As asked, else as the run keeps them itself."""
    own = run_settings(place.run).get("run", {}) if place.run is not None else {}
    if keep is None and place.run is None:
        raise DataError(f"{place.name} is no run with a recipe's run.keep; name the number: --keep N", key="--keep")
    return own.get("keep", 2) if keep is None else keep, own.get("keep_every", 0) if every is None else every


def _superfluous(place: CheckpointFolder, keep: int, every: int, *, damaged: bool) -> list[Removal]:
    """What goes; those to keep are chosen of those that open and are the run's own. Without such the newest stays.

    Of a place whose run is not known nothing goes that is unfinished: a process may be at it, and no lock would tell.
    """
    found = rows(place)
    whole = [row for row in found if row.state == "complete"]
    good = [row for row in whole if not row.reason] or whole
    bad = {row.checkpoint for row in found if row not in good}
    with reaching(place.root):
        goes = {str(path) for path in superfluous(place.root, keep, every, bad)}
    too = _DAMAGED if place.run is not None else _DAMAGED_ANYWHERE
    goes |= {row.checkpoint for row in found if damaged and row.state in too}
    if not good:
        goes -= {row.checkpoint for row in found if row.newest}
    return [Removal(r.run, r.checkpoint, r.step, r.state, r.bytes) for r in found if r.checkpoint in goes]


def _discard(row: Removal) -> None:
    path: Location = row.checkpoint if is_url(row.checkpoint) else Path(row.checkpoint)
    discard(path)
