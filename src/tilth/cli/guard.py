"""``tilth guard locate`` and ``check``: who holds up a job; a test of this machine."""

import json
from dataclasses import asdict

import typer

from tilth.cli.main import GuardCheckCommand, GuardLocateCommand
from tilth.guard.flight_recorder import read_dumps
from tilth.guard.localise import localise
from tilth.guard.node_check import check_node


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
