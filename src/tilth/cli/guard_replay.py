"""``tilth guard replay``: a step of a stored run again, on groups of its workers."""

import json
from dataclasses import asdict

from tilth.analysis.events import parse_ranks
from tilth.api import run_recipe
from tilth.cli.main import GuardReplayCommand
from tilth.launch.replay import Replay
from tilth.launch.replay import replay as run_again


def replay(options: GuardReplayCommand) -> None:
    """Print the verdict."""
    found = run_again(options.run, options.step, run_recipe, parse_ranks(options.ranks) if options.ranks else ())
    if options.as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    print("\n".join(_lines(found)))


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
