"""Record of the plans of source loaders, so that a resume begins with the one that the run has found.

loaders.jsonl   one line for each change: the first step that follows it, most processes, shares of sources in each
"""

from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from tilth.core.errors import DataError
from tilth.core.lines import read_lines
from tilth.runs.files import append_line

LOADERS = "loaders.jsonl"


class LoaderPlan(NamedTuple):
    """Plan that holds from a step on, made for at most this many processes. shares: of sources, by process
    (``plan.loaders.place_loaders``)."""

    step: int
    most: int
    shares: list[dict[str, float]]


def record_plan(run: Path, plan: LoaderPlan) -> None:
    """Add a plan durably, before loaders follow it. StorageError."""
    append_line(run / LOADERS, plan._asdict(), sync=True)


def read_plans(run: Path) -> list[LoaderPlan]:
    """Return the plans of a run, oldest first; none if it has no loaders. DataError for a damaged record."""
    found = []
    for number, line in enumerate(read_lines(run / LOADERS), 1):
        step, most, shares = line.get("step"), line.get("most"), line.get("shares")
        if not isinstance(step, int) or not isinstance(most, int) or not _is_plan(shares):
            message = f"{run / LOADERS} line {number} has no step, number of processes and shares of sources for each"
            raise DataError(f"{message}; without the file, the run begins with a new plan", key=f"{LOADERS}.{number}")
        found.append(LoaderPlan(step, most, shares))
    return found


def _is_plan(found: Any) -> TypeGuard[list[dict[str, float]]]:
    if not isinstance(found, list) or not all(isinstance(shares, dict) for shares in found):
        return False
    return all(isinstance(share, (int, float)) and 0 < share <= 1 for shares in found for share in shares.values())
