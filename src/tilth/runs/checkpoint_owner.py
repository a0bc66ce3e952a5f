"""Ownership of checkpoint directories outside a run's folder: a marker in each names the folder of its run.

The name of a directory is random, and ``run.json`` holds it. If two run folders claim the same directory, the one the
marker does not name is a copy. If the named folder is gone, or claims another directory, the run was moved.
"""

import json
from pathlib import Path

from tilth.checkpoint.directory import latest
from tilth.checkpoint.storage import is_url, join, storage_of
from tilth.core.errors import CheckpointError, DataError, StorageError
from tilth.core.files import make_folder
from tilth.runs.readers import read_state

MARK = "owner.json"
"""File in the checkpoint directory: {"folder": absolute path of the run}."""


def original(run: Path, place: str) -> Path | None:
    """Return the run that owns the checkpoints in ``place`` if the folder ``run`` is a copy of it. Raises OSError."""
    owner = _owner(place)
    if owner is None or not (owner / "run.json").is_file() or owner.samefile(run):
        return None
    try:
        theirs = read_state(owner).get("checkpoints")
    except DataError:  # no longer a run
        return None
    return owner if theirs == place else None


def take(run: Path, place: str, *, fresh: bool) -> None:
    """Make this run the owner of ``place`` if it is new or its former owner is gone. fresh: the place is new.

    CheckpointError if this run is a copy, which would write among the checkpoints of the original; StorageError.
    """
    try:
        owner = original(run, place)
        if owner is not None:
            raise CheckpointError(
                f"{run} is a copy of {owner}, and the checkpoints in {place} belong to {owner}: resume that one; or "
                f"begin a new run with its weights (run.name=NAME model.path={owner}); or, to resume the copy, copy "
                f'{place} too and write the new path to "checkpoints" in {run / "run.json"}',
                key=f"{MARK}.folder",
            )
        there = fresh or bool(storage_of(place).names())  # a disk that is not mounted is not written to
        if there and _owner(place) != run.resolve():
            _mark(run, place)
    except OSError as error:
        raise StorageError(f"{join(place, MARK)}: {error.strerror or error}", key=MARK) from error


def holds_some(place: str) -> bool:
    """True if there is a checkpoint in ``place``; StorageError if it cannot be read."""
    try:
        return latest(place) is not None
    except OSError as error:
        message = f"the checkpoints of this run may be in {place}, which cannot be read: {error}"
        raise StorageError(message, key="checkpoints") from error


def _owner(place: str) -> Path | None:
    """Return the folder that the marker names; None without a valid marker."""
    try:
        return Path(json.loads(storage_of(place).read(MARK))["folder"])
    except (FileNotFoundError, ValueError, RecursionError, TypeError, KeyError):
        return None


def _mark(run: Path, place: str) -> None:
    if not is_url(place):
        make_folder(Path(place))
    storage_of(place).put(MARK, (json.dumps({"folder": str(run.resolve())}) + "\n").encode())
