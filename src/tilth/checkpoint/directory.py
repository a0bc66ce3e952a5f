"""The directories of checkpoints under a root: which are complete, which is the newest, which go.

A checkpoint is made as ``step-000100.tmp-<pid>`` and becomes ``step-000100`` by a rename. Where that step exists
already, the old one is ``step-000100.replaced`` between two renames, and counts until the new one is in place.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilth.checkpoint.manifest import NAME
from tilth.core.errors import CheckpointError, StorageError

BEST = "best.json"
"""Beside the checkpoints: which one did best by evaluation ({"step", "metric", "value"})."""

_PATTERN = re.compile(r"step-(\d{6,})(\.replaced)?")
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp-.*|replaced)")


def step_name(step: int) -> str:
    """The directory of a step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a directory's name promises, or None if it is not the name of a checkpoint."""
    match = _PATTERN.fullmatch(path.name)
    return int(match[1]) if match else None


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under a root, the oldest first."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        step = step_of(path)
        if step is not None and (path / NAME).is_file():
            found[step] = path  # step-000100 comes behind step-000100.replaced and has precedence
    return [found[step] for step in sorted(found)]


def latest(root: str | Path) -> Path | None:
    """The complete checkpoint of the greatest step under ``root``, or None. What a crashed save left is ignored.

    Whether its bytes are intact shows when it is read: a damaged newest checkpoint is never passed over in silence.
    """
    found = complete(Path(root))
    return found[-1] if found else None


def mark_best(root: str | Path, best: Mapping[str, Any] | None) -> None:
    """Write down which checkpoint did best, {"step", "metric", "value"}, as a whole and durably; None: none did."""
    file = Path(root) / BEST
    temporary = file.with_name(f"{BEST}.tmp")
    try:
        if best is None:
            file.unlink(missing_ok=True)
            return
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(best)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(file)
        sync_directory(file.parent)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}") from error


def read_best(root: str | Path) -> dict[str, Any] | None:
    """What ``mark_best`` wrote; None if nothing was marked. CheckpointError for a file that says something else."""
    file = Path(root) / BEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise CheckpointError(f"{file} does not name the step of a checkpoint")
    return found


def prune(root: str | Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest complete checkpoints and the best one; returns the removed paths.

    At least one stays. StorageError if one cannot be removed.
    """
    best = read_best(root)
    old = [p for p in complete(Path(root))[: -max(1, keep)] if best is None or step_of(p) != best["step"]]
    for path in old:
        doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise StorageError(f"old checkpoint {path} cannot be removed: {error.strerror}") from error
    return old


def commit(made: Path, final: Path) -> None:
    """Give a finished and synchronised directory its name, for good when this returns."""
    if final.exists():
        final.rename(final.with_name(f"{final.name}.replaced"))
    made.rename(final)
    sync_directory(final.parent)


def remove_leftovers(root: Path) -> None:
    """Remove what crashed saves left; a replaced checkpoint only where its successor is in place."""
    for path in root.iterdir():
        if _LEFTOVER.fullmatch(path.name) and not (path.suffix == ".replaced" and path in complete(root)):
            shutil.rmtree(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
