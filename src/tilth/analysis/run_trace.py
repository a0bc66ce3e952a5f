"""Open a run's trace for a person: the newest attempt with a complete step, and notes on missing files.

Parts of a rank are numbered without a gap, and the clocks' file and the recipe name the ranks, so lost files are
reported and not counted as idle time.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tilth.analysis.events import Events, load, of_steps
from tilth.analysis.read import attempts, parts
from tilth.config.errors import listed
from tilth.core.errors import DataError
from tilth.trace.clock_samples import events_folder, read_rounds

SHOWN = 3
"""Most numbers of parts to list."""


@dataclass(frozen=True)
class Opened:
    """Events of one attempt, and notes on what is missing; none for a complete trace."""

    events: Events
    notes: tuple[str, ...]


def open_run(path: str | Path, attempt: int | None = None, steps: range | None = None) -> Opened:
    """Open an attempt; default: the newest in which a step has ended, with a note if a newer one has begun.

    steps: only events of these. Raises the errors of ``load``, and DataError if the files of the controller, which has
    the steps, are lost.
    """
    events, notes = load(path, attempt), []
    earlier = [a for a in attempts(path) if a < events.attempt]
    if attempt is None and not events.steps:
        for before in reversed(earlier):
            older = load(path, before)
            if older.steps:
                notes.append(f"no step of attempt {events.attempt} has ended yet: this is attempt {before}")
                events = older
                break
    notes += gaps(path, events.attempt)
    if not events.steps and (lost := [note for note in notes if "controller" in note]):
        raise DataError(f"{path}: {lost[0]}; it has the steps, so nothing can be said of them", key="controller")
    if steps is not None:
        try:
            events = of_steps(events, steps)
        except DataError as error:
            raise DataError(f"{path} has {error}{hint(path, events.attempt)}", key=error.key) from error
    return Opened(events, tuple(notes))


def hint(path: str | Path, attempt: int) -> str:
    """Suggest the other attempts, which may have the steps; "" if there are none."""
    others = [str(a) for a in attempts(path) if a != attempt]
    return f"; this is attempt {attempt}, and there is also --attempt {' or '.join(others)}" if others else ""


def gaps(path: str | Path, attempt: int) -> list[str]:
    """List what is missing of an attempt: parts of a rank, a truncated last part, whole ranks. A file has no gaps."""
    if not Path(path).is_dir():
        return []
    folder = events_folder(path)
    written = {rank: files for (its, rank), files in parts(folder).items() if its == attempt}
    controller, ranks = _ranks(folder, attempt)
    found = []
    for rank in sorted(ranks - set(written)):
        who = f"the controller (rank {rank})" if rank == controller else f"rank {rank} of {max(len(ranks) - 1, 1)}"
        found.append(f"there are no events of {who}: no file of it is there")
    for rank, files in written.items():
        found += _of_rank(rank, files)
    return found


def _of_rank(rank: int, files: dict[int, Path]) -> list[str]:
    last = max(files)
    missing = sorted(set(range(1, last)) - set(files))
    found = []
    if missing:
        are = f"parts {listed(missing, SHOWN)} are" if len(missing) > 1 else f"part {missing[0]} is"
        found.append(f"of rank {rank} {are} missing: what it did then looks like waiting")
    try:
        pq.read_metadata(files[last])
    except (pa.ArrowInvalid, OSError):
        found.append(f"of rank {rank} the last part ({last}) is torn and left out")
    return found


def _ranks(folder: Path, attempt: int) -> tuple[int | None, set[int]]:
    """(the controller's rank if it is a separate process, all ranks), from the clocks' file or the recipe."""
    known = set(read_rounds(folder, attempt))
    if known:
        return max(known), known
    try:
        recipe = tomllib.loads((folder.parent / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, set()
    cluster = recipe.get("cluster", {})
    workers = cluster.get("workers")
    if cluster.get("backend", "inline") == "inline" or not isinstance(workers, int):
        return None, {0}
    return workers, set(range(workers + 1))
