"""A run's trace as a person asks for it: the attempt that says something, and what is missing of it, in words.

Parts of a rank are numbered without a gap, and the clocks' file and the recipe say which ranks there were: so files
that are lost are told, and not taken for time in which nothing was done.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tilth.analysis.events import Events, load, of_steps
from tilth.analysis.read import attempts, parts
from tilth.core.errors import DataError
from tilth.trace.clock_samples import events_folder, read_rounds

SHOWN = 3
"""Most numbers of parts that are named."""


@dataclass(frozen=True)
class Opened:
    """Events of one attempt, and what whoever reads their numbers must know: sentences, none of a whole trace."""

    events: Events
    notes: tuple[str, ...]


def open_run(path: str | Path, attempt: int | None = None, steps: range | None = None) -> Opened:
    """The events of an attempt; default: the newest in which a step has ended, with a word if a newer one has begun.

    steps: only events of these. DataError as in ``load``; and where the files of the controller, which has the steps,
    are gone.
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
        raise DataError(f"{path}: {lost[0]}; it has the steps, so nothing can be said of them")
    if steps is not None:
        try:
            events = of_steps(events, steps)
        except DataError as error:
            raise DataError(f"{path} has {error}{hint(path, events.attempt)}") from error
    return Opened(events, tuple(notes))


def hint(path: str | Path, attempt: int) -> str:
    """Where else steps may be: "" or the attempts beside this one."""
    others = [str(a) for a in attempts(path) if a != attempt]
    return f"; this is attempt {attempt}, and there is also --attempt {' or '.join(others)}" if others else ""


def gaps(path: str | Path, attempt: int) -> list[str]:
    """What is missing of an attempt: parts of a rank, a torn last part, whole ranks. Of a single file: nothing."""
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
        named = ", ".join(map(str, missing[:SHOWN])) + (f" and {len(missing) - SHOWN} more" * (len(missing) > SHOWN))
        are = f"parts {named} are" if len(missing) > 1 else f"part {named} is"
        found.append(f"of rank {rank} {are} missing: what it did then looks like waiting")
    try:
        pq.read_metadata(files[last])
    except (pa.ArrowInvalid, OSError):
        found.append(f"of rank {rank} the last part ({last}) is torn and left out")
    return found


def _ranks(folder: Path, attempt: int) -> tuple[int | None, set[int]]:
    """The controller's rank, where it is a process of its own, and all ranks: as the clocks' file says, or the recipe
    beside the folder; nothing where neither does."""
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
