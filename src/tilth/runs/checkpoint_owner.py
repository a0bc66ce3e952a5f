"""Checkpoints outside a run's folder belong to one run: a mark in their place says in which folder that is.

The name of a place is random, and ``run.json`` holds it. So of two folders that hold the same one, that which the mark
does not name is a copy. Where the marked folder is gone, or has another place now, the run was moved or renamed.
"""

import json
from pathlib import Path

from tilth.checkpoint.directory import latest
from tilth.checkpoint.storage import is_url, join, storage_of
from tilth.core.errors import CheckpointError, DataError, StorageError
from tilth.core.target import make_folder
from tilth.runs.readers import read_state

MARK = "owner.json"
"""In the place: {"folder": the run's, as a whole path}."""


def original(run: Path, place: str) -> Path | None:
    """The run whose checkpoints are in this place, where the one in the folder ``run`` is a copy of it. OSError."""
    owner = _owner(place)
    if owner is None or not (owner / "run.json").is_file() or owner.samefile(run):
        return None
    try:
        theirs = read_state(owner).get("checkpoints")
    except DataError:  # no run any more
        return None
    return owner if theirs == place else None


def take(run: Path, place: str, *, fresh: bool) -> None:
    """Make the place this run's, if it is new or another's no more. fresh: the run has just been given it.

    CheckpointError for a copy of a run, which would write into the place of that one; StorageError.
    """
    try:
        owner = original(run, place)
        if owner is not None:
            raise CheckpointError(_refusal(run, owner, place), key=f"{MARK}.folder")
        there = fresh or bool(storage_of(place).names())  # a disk that is not mounted is not written to
        if there and _owner(place) != run.resolve():
            _mark(run, place)
    except OSError as error:
        raise StorageError(f"{join(place, MARK)}: {error.strerror or error}", key=MARK) from error


def holds_some(place: str) -> bool:
    """Whether there is a checkpoint in a place. StorageError: nobody knows."""
    try:
        return latest(place) is not None
    except OSError as error:
        raise StorageError(
            f"the checkpoints of this run may be in {place}, which cannot be read: {error}", key="checkpoints"
        ) from error


def _refusal(run: Path, owner: Path, place: str) -> str:
    return (
        f"{run} is a copy of {owner}, and the checkpoints in {place} belong to {owner}: go on with that one; or begin "
        f"another with its weights (run.name=NAME model.path={owner}); or, to go on with the copy, copy that place "
        f'too and put the new one for "checkpoints" in {run / "run.json"}'
    )


def _owner(place: str) -> Path | None:
    """The folder that the mark names; None without one."""
    try:
        said = json.loads(storage_of(place).read(MARK))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return Path(said["folder"]) if isinstance(said, dict) and isinstance(said.get("folder"), str) else None


def _mark(run: Path, place: str) -> None:
    if not is_url(place):
        make_folder(Path(place))
    storage_of(place).put(MARK, (json.dumps({"folder": str(run.resolve())}) + "\n").encode())
