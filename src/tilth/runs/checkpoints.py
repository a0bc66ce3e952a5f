"""Checkpoints of runs and folders: found by a text, listed, verified, pruned."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tilth.checkpoint import latest, open_checkpoint, read_best
from tilth.checkpoint.directory import (
    BEST,
    MISSING,
    FoundCheckpoint,
    bare,
    complete,
    discard,
    listing,
    prunable,
    step_of,
)
from tilth.checkpoint.storage import Location, is_url, join, split, storage_of
from tilth.core.errors import CheckpointError, DataError, StorageError, TilthError
from tilth.runs.files import Lock
from tilth.runs.model_refs import (
    find_checkpoint,
    foreign,
    is_checkpoint,
    is_run,
    lost,
    reaching,
    root_of,
    split_spec,
)
from tilth.runs.readers import nowhere, read_state, run_settings

_DAMAGED_ANYWHERE = ("damaged", "replaced")
_DAMAGED = (*_DAMAGED_ANYWHERE, "unfinished")
Report = Callable[[str, int, int], None]  # called with the name of what is read, the bytes so far and the bytes in all


class CheckpointFolder(NamedTuple):
    """A folder of checkpoints: of ``run``, if known; ``only``: the one of them that the user named.

    problem: why the folder of the run's checkpoints is unknown.
    """

    root: Location
    run: Path | None = None
    only: Location | None = None
    problem: TilthError | None = None

    @property
    def name(self) -> str:
        """Return the path to print."""
        return str(self.only or self.run or self.root)

    @property
    def owner(self) -> str | None:
        """Return the run's path as JSON has it."""
        return str(self.run) if self.run else None


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint, or its remains: one row of ``tilth ckpt ls --json``.

    state: complete, damaged, unfinished (a save in progress, or cut off), replaced (by one of the same step). In JSON
    also missing, with a null step: a run's checkpoints are lost or cannot be listed; ``checkpoint`` is their folder.
    reason: of the damage, or that another run made it. newest: a run would resume from it. best: by evaluation.
    saved: UTC, ISO 8601. layout: size of each dimension of the mesh that wrote it.
    """

    run: str | None
    checkpoint: str
    step: int
    state: str
    reason: str
    newest: bool
    best: bool
    bytes: int
    saved: str | None = None
    layout: dict[str, int] | None = None
    tensors: int | None = None


@dataclass(frozen=True)
class Examined:
    """Result of verifying a checkpoint: one row of ``tilth ckpt verify --json``.

    bytes: read and compared. problems: a line for each damaged file or tensor; last, if not ``own``, that another run
    made it, so that this run does not resume from it.
    """

    run: str | None
    checkpoint: str
    step: int | None
    intact: bool
    bytes: int
    seconds: float
    problems: list[str] = field(default_factory=list)
    own: bool = True

    @property
    def good(self) -> bool:
        """True if the run can resume from it."""
        return self.intact and self.own


def places(where: str) -> list[CheckpointFolder]:
    """Find the folders of checkpoints that a text names: a run's, those of all runs in a folder, a folder or URL.

    DataError if there are none.
    """
    place, which = split_spec(where)
    named = find_checkpoint(where) if which else None
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
        found = list(_below(place))
        root = split(place)[0]
        if not found and any(_same(place, path) for path in bare(root)):  # a checkpoint whose manifest is gone
            found = [CheckpointFolder(root, _run_above(root), place)]
    if not found:
        raise nowhere(where)
    return found


def _run_above(folder: Location) -> Path | None:
    """Find the run whose folder holds this one, by its path or by the target of its links."""
    if is_url(folder):
        return None
    named, real = Path(os.path.abspath(folder)), Path(folder).resolve()
    return next((above for path in (named, real) for above in path.parents if is_run(above)), None)


def _below(folder: Location) -> Iterator[CheckpointFolder]:
    """Yield the runs in a folder, and the folders in a store that ``run.checkpoints`` gave to several runs."""
    for name in storage_of(folder).names():
        inside = join(folder, name)
        if is_run(inside):
            run = Path(inside)
            try:
                yield CheckpointFolder(root_of(run), run)
            except TilthError as error:  # one bad run must not hide the others
                yield CheckpointFolder(run / "checkpoints", run, problem=error)
        elif listing(inside):
            yield CheckpointFolder(inside)


def usable(where: str) -> list[CheckpointFolder]:
    """Find the folders like ``places``. DataError if one of them is unknown."""
    found = places(where)
    for problem in (place.problem for place in found if place.problem):
        raise DataError(str(problem), key=problem.key)
    return found


def _same(a: Location, b: Location) -> bool:
    return a == b or (not is_url(a) and Path(a).resolve() == Path(b).resolve())


def look(place: CheckpointFolder, *, alone: bool) -> tuple[list[CheckpointRow], str]:
    """List a folder; if it is empty, also the problem. An error of the only folder is raised."""
    if place.problem:
        return [], str(place.problem)
    try:
        found = rows(place)
    except TilthError as error:
        if alone:
            raise
        return [], str(error)
    return found, "" if found else lost(place.run, place.root)


def rows(place: CheckpointFolder) -> list[CheckpointRow]:
    """List all checkpoints and leftovers of a folder, the oldest first."""
    with reaching(place.root):
        entries, newest, best = listing(place.root), latest(place.root), read_best(place.root)
        found = [
            _row(place, entry, newest=entry.path == newest, best=bool(best and best["step"] == entry.step))
            for entry in entries
            if place.only is None or _same(entry.path, place.only)
        ]
        there = {str(entry.path) for entry in listing(place.root)}  # meanwhile a run may have saved and removed some
        return [row for row in found if row.checkpoint in there]


def _row(place: CheckpointFolder, entry: FoundCheckpoint, *, newest: bool, best: bool) -> CheckpointRow:
    storage = storage_of(entry.path)
    nbytes = sum(storage.size(name) or 0 for name in storage.names())
    reason = _without_place(entry.reason, entry.path)
    best = best and entry.state == "complete"
    row = CheckpointRow(place.owner, str(entry.path), entry.step, entry.state, reason, newest, best, nbytes)
    if entry.state == "unfinished" or entry.reason == MISSING:
        return row
    try:
        manifest = open_checkpoint(entry.path).manifest
    except CheckpointError as error:
        state = "damaged" if entry.state == "complete" else entry.state
        return replace(row, state=state, reason=reason or _without_place(str(error), entry.path), best=False)
    tensors = sum(map(len, manifest.groups.values()))
    reason = reason or _foreign(place, manifest.objects)
    return replace(row, reason=reason, saved=manifest.saved, layout=sizes(manifest.layout), tensors=tensors)


def _foreign(place: CheckpointFolder, objects: Mapping[str, Any]) -> str:
    """Return the reason if another run made it. run.json of old runs does not list the digests of their work."""
    known = read_state(place.run).get("digests") if place.run is not None else None
    return foreign(objects, known) if known else ""


def sizes(layout: dict[str, Any]) -> dict[str, int]:
    """Return the size of each dimension of the writers' mesh."""
    mesh = layout.get("mesh", {})
    return dict(zip(mesh.get("names", ()), mesh.get("sizes", ())))


def _without_place(text: str, path: Location) -> str:
    """Strip the checkpoint's path from a message, also the path that it had before it was put aside."""
    root, name = split(path)
    roots = {str(root)} if is_url(root) else {str(root), str(Path(root).resolve())}
    for place in {f"{one}/{called}" for one in roots for called in (name, name.partition(".")[0])}:
        text = text.removeprefix(f"checkpoint {place}: ").removeprefix(f"{place} ").replace(f"{place}/", "")
    return text


def chosen(place: CheckpointFolder, everything: bool) -> list[Location]:
    if place.only is not None:
        return [place.only]
    there = sorted(_present(place), key=lambda path: step_of(path) or 0)
    return there if everything else there[-1:]


def _present(place: CheckpointFolder) -> list[Location]:
    with reaching(place.root):
        return [*complete(place.root), *bare(place.root)]


def is_gone(place: CheckpointFolder, path: Location) -> bool:
    """True if a process that writes the run has removed or replaced it, so that a failed read is no damage."""
    there = any(_same(path, one) for one in _present(place))
    with reaching(place.root):
        return not there and (place.only is None or not is_checkpoint(path))


def examine(place: CheckpointFolder, path: Location, report: Report) -> Examined:
    """Read and check one checkpoint."""
    start, read, problems, other = time.monotonic(), 0, list[str](), ""
    try:
        with reaching(path):
            checkpoint = open_checkpoint(path)
            other = _foreign(place, checkpoint.objects)
            try:
                checkpoint.verify(lambda done, total: report(Path(str(path)).name, done, total))
            finally:
                read = checkpoint.bytes_read
    except CheckpointError as error:
        without_manifest = any(_same(path, one) for one in bare(place.root))
        problems = [MISSING] if without_manifest else _without_place(str(error), path).split("; ")
    seconds = round(time.monotonic() - start, 3)
    found = [*problems, *([other] if other else [])]
    return Examined(place.owner, str(path), step_of(path), not problems, read, seconds, found, not other)


class Pruned(NamedTuple):
    """Checkpoints that were removed, or would be. kept: paths of the others; left: unfinished ones of unknown runs."""

    removed: list[CheckpointRow]
    kept: list[str]
    left: int


def prune(where: str, keep: int | None, every: int | None, *, dry: bool, damaged: bool) -> Pruned:
    """Remove prunable checkpoints, or only list them (dry); never the newest, never the best.

    keep: newest ones that stay; every: steps that stay are its multiples; None: as the run's recipe has it. damaged:
    remove damaged, unfinished and replaced ones too.
    """
    removed, stay, left = list[CheckpointRow](), list[str](), 0
    for place in usable(where):
        _check_best(place)
        if place.only is not None:
            raise DataError(
                f"WHERE={where!r} is one checkpoint; name its run, or the folder that it is in", key="WHERE.checkpoint"
            )
        with ExitStack() as stack:
            if place.run is not None and not dry:
                if not os.access(place.run, os.W_OK):
                    raise StorageError(f"{place.run} is not writable, so nothing can be removed from it", key="RUN")
                stack.callback(Lock(place.run / "run.lock").release)  # StorageError while a process writes the run
            gone = _superfluous(place, *_retention(place, keep, every), damaged=damaged)
            for row in gone if not dry else ():
                discard(row.checkpoint if is_url(row.checkpoint) else Path(row.checkpoint))
            removed += gone
            left += sum(e.state == "unfinished" for e in listing(place.root)) if damaged and place.run is None else 0
            stay += [str(p) for p in complete(place.root) if str(p) not in {row.checkpoint for row in gone}]
    return Pruned(removed, stay, left)


def _check_best(place: CheckpointFolder) -> None:
    """Raise CheckpointError if the file that names the best one, which must stay, is damaged."""
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


def _retention(place: CheckpointFolder, keep: int | None, every: int | None) -> tuple[int, int]:
    """Return the given numbers, by default those of the run's recipe."""
    own = run_settings(place.run).get("run", {}) if place.run is not None else {}
    if keep is None and place.run is None:
        raise DataError(f"{place.name} is no run with a recipe's run.keep; name the number: --keep N", key="--keep")
    return own.get("keep", 2) if keep is None else keep, own.get("keep_every", 0) if every is None else every


def _superfluous(place: CheckpointFolder, keep: int, every: int, *, damaged: bool) -> list[CheckpointRow]:
    """Choose what goes. Those to keep are chosen among the run's own that open; without any the newest stays.

    Unfinished ones stay if the run is unknown: a process may be writing them, and no lock would show that.
    """
    found = rows(place)
    whole = [row for row in found if row.state == "complete"]
    good = [row for row in whole if not row.reason] or whole
    bad = {row.checkpoint for row in found if row not in good}
    with reaching(place.root):
        goes = {str(path) for path in prunable(place.root, keep, every, bad)}
    states = _DAMAGED if place.run is not None else _DAMAGED_ANYWHERE
    goes |= {row.checkpoint for row in found if damaged and row.state in states}
    if not good:
        goes -= {row.checkpoint for row in found if row.newest}
    return [row for row in found if row.checkpoint in goes]
