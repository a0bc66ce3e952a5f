"""Record of the costs that a run balances rows by, so that a resume places rows as the run did.

costs.jsonl   one line for each change: the first step that follows it, where the costs come from, and the costs
"""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tilth.core.errors import DataError
from tilth.core.lines import Lines, read_lines
from tilth.plan.costs import Costs, as_dict, parse_costs
from tilth.runs.files import to_json

COSTS = "costs.jsonl"


class CostFit(NamedTuple):
    """Costs that hold from a step on. source: where they come from, as in "this run"."""

    step: int
    source: str
    costs: Costs


def record_costs(run: Path, fit: CostFit) -> None:
    """Add costs durably, before a step follows them. StorageError."""
    line = {"step": fit.step, "source": fit.source, "costs": as_dict(fit.costs)}
    with closing(Lines(run / COSTS)) as file:
        file.append(to_json(line), sync=True)


def read_costs(run: Path) -> list[CostFit]:
    """Return the costs of a run, oldest first; none if it balances by none. DataError for a damaged record."""
    found = []
    for number, line in enumerate(read_lines(run / COSTS), 1):
        step, source = line.get("step"), line.get("source")
        if not isinstance(step, int) or not isinstance(source, str):
            message = f"{run / COSTS} line {number} has no step and source: without it no step can be placed again"
            raise DataError(message, key=f"{COSTS}.{number}")
        found.append(CostFit(step, source, parse_costs(line.get("costs"), run / COSTS, f".{number}")))
    return found
