"""``tilth guard locate``: who holds up a job, by the dumps of its flight recorders."""

import json
from dataclasses import asdict
from pathlib import Path

from tilth.guard.flight_recorder import read_dumps
from tilth.guard.localise import localise


def locate(folder: Path, *, as_json: bool = False) -> None:
    """Print the verdict on a folder of dumps; members of groups that have none there are silent."""
    dumps = read_dumps(folder)
    members = {rank for dump in dumps.values() for group in dump.groups.values() for rank in group.ranks}
    silent = sorted(members - set(dumps))
    found = localise(dumps, silent)
    if as_json:
        print(
            json.dumps(
                {"dumps": sorted(dumps), "silent": silent, "verdict": asdict(found) if found else None}, indent=1
            )
        )
        return
    print(f"{len(dumps)} dumps" + (f", none of rank {', '.join(map(str, silent))}" if silent else ""))
    if found is None:
        print("no rank waits for another one")
        return
    print(f"{found.kind}: {'rank ' + ', '.join(map(str, found.ranks)) if found.ranks else 'no rank can be named'}")
    for part in found.evidence.split("; "):
        print(f"  {part}")
