"""``tilth guard inject``: a fault happens to a worker of an active run."""

import json
import os
import time
from pathlib import Path

from tilth.core.errors import DataError
from tilth.guard.inject import inject, named, session_of
from tilth.runs.readers import read_state, supervised


def drill(run: Path, kind: str, *, rank: int, after: float, at: str = "", as_json: bool = False) -> None:
    """Let a fault happen to a worker of an active run of this machine. DataError if the run is none."""
    named(kind)
    _controller(run)
    time.sleep(after)
    pid = inject(session_of(_controller(run)), kind, rank, at)
    found = {"kind": kind, "rank": rank, "pid": pid, "time": time.time()}
    print(json.dumps(found) if as_json else f"{kind}: rank {rank}, process {pid}")


def _controller(run: Path) -> int:
    """Return the process of a run that is active on this machine. DataError for any other."""
    state = read_state(run)
    if state["state"] != "running":
        again = "; its next controller begins: ask again in some seconds" if supervised(state) else ""
        message = f"{run} is {state['state']}: a fault can only happen to an active run{again}"
        raise DataError(message, key="run.json.state")
    if state.get("host") != os.uname().nodename:
        message = f"{run} is active on {state.get('host')!r}; a drill happens on the run's own machine"
        raise DataError(message, key="run.json.host")
    return int(state["pid"])
