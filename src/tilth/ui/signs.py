"""Signs of life of a run and its ranks: what it writes, heartbeats, notes of what it does."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilth.data.cache import FileState
from tilth.runs.progress import PROGRESS

if TYPE_CHECKING:
    from tilth.ui.top import KeptFiles

SIGNS = ("run.json", "metrics.jsonl")
"""Files of a run that say when it last wrote its state or a step."""
LATE = 2.0  # seconds without a sign of life that are worth a colour
LIVING = ("running", "sleeping", "disk-sleep", "idle")  # states of a process that need no word


def age_of(run: Path, files: Sequence[FileState], state: Mapping[str, Any], kept: "KeptFiles | None" = None) -> float:
    """Return the seconds since a run wrote its last step or its state, or gave a newer sign of life: a heartbeat of a
    rank, or a note of what it does.

    files: states of ``SIGNS``; state: ``read_state``, or {} of a run that does not run; kept: files read before.
    """
    signs = [newest_write(files)]
    if state.get("state") == "running":
        signs.append(_newest_beat(state, kept))
        with suppress(OSError):
            signs.append((run / PROGRESS).stat().st_mtime)
    return max(time.time() - max(signs), 0.0)


def newest_write(files: Sequence[FileState]) -> float:
    """Return when the newest of some files was written, in seconds since 1970; 0: there are none."""
    return max((file[-1] for file in files if file), default=0) / 1e9


def living(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the health of each rank of a run at this moment; none if they do not run on this machine."""
    here = state["state"] == "running" and state.get("host") == os.uname().nodename
    if not (here and isinstance(state.get("session"), str)):
        return ()
    from tilth.guard.health import read_health  # which takes half a second to import

    found = read_health(state["session"])
    return found["ranks"] if found else ()


def sign_of(row: Mapping[str, Any]) -> tuple[bool, str]:
    """Return True if a rank gives no sign of life, and what it does, by its health."""
    beat, doing = row.get("heartbeat_age"), [str(row[name]) for name in ("call", "operation") if row.get(name)]
    late = row["state"] not in LIVING or (beat is not None and beat > LATE)
    return late, ": ".join(dict.fromkeys(doing)) or "between calls"


def _newest_beat(state: Mapping[str, Any], kept: "KeptFiles | None") -> float:
    """Return when a rank of a run gave its newest heartbeat, in seconds since 1970; 0: none can be read here."""
    if kept is not None and isinstance(state.get("session"), str):
        from tilth.cluster.backends.session_dir import SessionDir

        beat = kept.of(str(SessionDir(Path(state["session"])).health), lambda _: _read_beat(state))
        if not beat or time.time() - beat <= LATE:  # else: a controller that is stopped writes no health
            return beat
    return _read_beat(state)


def _read_beat(state: Mapping[str, Any]) -> float:
    ages = [row["heartbeat_age"] for row in living(state) if row.get("heartbeat_age") is not None]
    return time.time() - min(ages) if ages else 0.0
