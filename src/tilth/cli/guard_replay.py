"""``tilth guard replay``: a step of a stored run again, on groups of its workers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tilth.api import run_recipe
from tilth.core.errors import DataError
from tilth.flows.replay import Replay
from tilth.flows.replay import replay as run_again


def replay(run: Path, *, step: int, ranks: str = "", as_json: bool = False) -> None:
    """Print the verdict."""
    found = run_again(run, step, run_recipe, _numbers(ranks))
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    print("\n".join(_lines(found)))


def _numbers(ranks: str) -> Sequence[int]:
    """Read 0,1,3. DataError for anything else."""
    try:
        return [int(word) for word in ranks.split(",") if word]
    except ValueError:
        raise DataError(f"--ranks {ranks!r}: use numbers of workers, as 0,1,3", key="--ranks") from None


def _lines(found: Replay) -> list[str]:
    kinds = list(dict.fromkeys(outcome.bits for outcome in found.outcomes.values()))
    lines = [f"step {found.step}, from the checkpoint of step {found.checkpoint}"]
    for title, outcome in found.outcomes.items():
        lines.append(f"  {title}: result {kinds.index(outcome.bits) + 1}{'' if outcome.finite else ', not finite'}")
    if found.recorded is not None:
        lines.append(f"the metrics of the run came {'back' if found.recorded else 'not back'}")
    if found.verdict is None:
        return [*lines, "all groups compute the same finite numbers: nothing is wrong"]
    return [*lines, f"{found.verdict.details['cause']}: {found.verdict.evidence}"]
