"""Record of the costs that a run balances rows by, so that a resume places rows as the run did.

costs.jsonl   one line for each change: the first step that follows it, where the costs come from, and the costs
offload.json  rates by which train.offload = auto decides on how many ranks a row is
"""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tilth.core.errors import DataError
from tilth.core.files import atomic_write
from tilth.core.lines import read_lines
from tilth.data.cache import CACHE
from tilth.models.config import DecoderConfig
from tilth.plan.costs import Costs, as_dict, parse_costs
from tilth.plan.offload import HostRates
from tilth.runs.environment import environment
from tilth.runs.files import append_line, to_json

COSTS = "costs.jsonl"
OFFLOAD = "offload.json"
MACHINE = ("cpu", "cores", "accelerator", "packages")
"""Of the environment, what figures of speed depend on."""


def measured_file(runs: str, name: str, config: DecoderConfig, **how: Any) -> Path:
    """Return the file in the folder of runs of what was measured of a model on this machine, whichever run did.

    how: all else that a figure holds for, as JSON has it; other values have another file.
    """
    machine = environment()
    known = {"model": asdict(config), **how, "machine": [machine[of] for of in MACHINE]}
    digest = hashlib.blake2b(to_json(known).encode(), digest_size=8).hexdigest()
    return Path(runs) / CACHE / f"{name}-{digest}.json"


class CostFit(NamedTuple):
    """Costs that hold from a step on. source: where they come from, as in "this run"."""

    step: int
    source: str
    costs: Costs


def record_costs(run: Path, fit: CostFit) -> None:
    """Add costs durably, before a step follows them. StorageError."""
    line = {"step": fit.step, "source": fit.source, "costs": as_dict(fit.costs)}
    append_line(run / COSTS, line, sync=True)


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


def record_rates(run: Path, rates: HostRates) -> None:
    """Write the rates of a run, before a step follows them. StorageError."""
    with atomic_write(run / OFFLOAD) as temporary:
        temporary.write_text(to_json(rates._asdict()))


def read_rates(run: Path) -> HostRates | None:
    """Return the rates of a run; None before they are recorded. DataError for a damaged record."""
    path = run / OFFLOAD
    if not path.exists():
        return None
    try:
        return TypeAdapter(HostRates).validate_json(path.read_bytes())
    except ValidationError as error:
        message = f"{path} is damaged: {error.errors()[0]['msg']}; without it no step can be placed again"
        raise DataError(message, key=OFFLOAD) from error
