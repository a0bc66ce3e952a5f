"""``tilth guard locate``, ``check`` and ``inject``: who holds up a job; a test of this machine; a drill."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import typer

from tilth.cli.main import GuardCheckCommand, GuardInjectCommand, GuardLocateCommand
from tilth.core.errors import DataError
from tilth.guard.flight_recorder import read_dumps
from tilth.guard.inject import inject, named, session_of
from tilth.guard.localise import localise
from tilth.guard.node_check import check_node
from tilth.runs.readers import read_state, supervised


def locate(options: GuardLocateCommand) -> None:
    """Print the verdict on a folder of dumps; members of groups that have none there are silent."""
    dumps = read_dumps(options.folder)
    members = {rank for dump in dumps.values() for group in dump.groups.values() for rank in group.ranks}
    silent = sorted(members - set(dumps))
    found = localise(dumps, silent)
    if options.as_json:
        plain = {"dumps": sorted(dumps), "silent": silent, "verdict": asdict(found) if found else None}
        print(json.dumps(plain, indent=1))
        return
    print(f"{len(dumps)} dumps" + (f", none of rank {', '.join(map(str, silent))}" if silent else ""))
    if found is None:
        print("no rank waits for another one")
        return
    print(f"{found.kind}: {'rank ' + ', '.join(map(str, found.ranks)) if found.ranks else 'no rank can be named'}")
    for part in found.evidence.split("; "):
        print(f"  {part}")


def check(options: GuardCheckCommand) -> None:
    """Print what the tests found; exit code 1 if something is wrong for certain."""
    found = check_node()
    print(json.dumps(found.as_dict()) if options.as_json else f"{found.sentence()} ({found.seconds:.1f} s)")
    if not found.sound:
        raise typer.Exit(1)


def drill(options: GuardInjectCommand) -> None:
    """Let a fault happen to a worker of an active run of this machine. DataError if the run is none."""
    run, kind, rank = options.run, options.kind, options.rank
    named(kind)
    _controller(run)
    time.sleep(options.after)
    pid = inject(session_of(_controller(run)), kind, rank, options.at)
    found = {"kind": kind, "rank": rank, "pid": pid, "time": time.time()}
    print(json.dumps(found) if options.as_json else f"{kind}: rank {rank}, process {pid}")


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
