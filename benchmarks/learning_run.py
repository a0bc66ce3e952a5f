"""One run of the learning curves, in a process of its own, until it has generated as many tokens as it may.

    python benchmarks/learning_run.py KEYS.json RESULT.json BUDGET

KEYS: keys of a recipe. It stops at the first evaluation at which the tokens of its main phase reach BUDGET (0: at the
recipe's end), as Ctrl-C would stop it. RESULT: the keys, the points of the curve and what the run took, all of it read
from the run's own files.
"""

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tilth

ACCURACY = "accuracy/heldout"
VALUES = "values"
"""The phase of value pre-training."""
COUNTED = ("tokens/generated", "tokens/baseline")
"""Samples, thrown away or not, and ReMax's greedy answers. Evaluations and probes are not training."""

Record = Mapping[str, Any]


def tokens_of(record: Record) -> float:
    """What a step generated for training."""
    return sum(float(record.get(name) or 0.0) for name in COUNTED)


class Budget(tilth.Callback):
    """Ask the run to stop when enough was generated and the accuracy there is known."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.spent = 0.0

    def on_step_end(self, run: Any, step: int, record: dict[str, Any]) -> None:
        """Count; value pre-training is before the main phase."""
        self.spent += tokens_of(record) if record["phase"] != VALUES else 0.0
        at_end = ACCURACY in record and record.get("phase_step", 0) > 1
        if self.budget and self.spent >= self.budget and at_end:
            signal.raise_signal(signal.SIGINT)

    def on_message(self, text: str) -> None:
        """For the log."""
        print(text, flush=True)


def points(records: Sequence[Record]) -> list[tuple[float, float, float]]:
    """(tokens generated before, those of value pre-training among them, held-out accuracy) of each evaluation.

    A phase's first record holds the accuracy where the phase began: one at the end of a first step would replace it, so
    runs evaluate every second step at most.
    """
    found, spent, values = list[tuple[float, float, float]](), 0.0, 0.0
    for record in records:
        first = record["phase_step"] == 1
        before = (spent, values)
        spent += tokens_of(record)
        values += tokens_of(record) if record["phase"] == VALUES else 0.0
        if record.get(ACCURACY) is not None:
            found.append((*(before if first else (spent, values)), float(record[ACCURACY])))
    return found


def mean_of(records: Sequence[Record], name: str) -> float:
    """Over the steps that have it; 0 where none has."""
    found = [float(record[name]) for record in records if record.get(name) is not None]
    return sum(found) / len(found) if found else 0.0


def totals(records: Sequence[Record]) -> dict[str, float]:
    """Steps, tokens and what the samples were like."""
    main = [r for r in records if r["phase"] != VALUES]
    samples = sum(float(r.get("samples") or 0) for r in main)
    trained = sum(float(r.get("samples/trained") or 0) for r in main)
    tokens = sum(map(tokens_of, records))
    return {
        "steps": len(main),
        "value_steps": len(records) - len(main),
        "tokens": tokens,
        "value_tokens": tokens - sum(map(tokens_of, main)),
        "greedy_tokens": sum(float(r.get("tokens/baseline") or 0) for r in main),
        "samples": samples,
        "dropped": 1 - trained / samples if samples else 0.0,
        "clipped": mean_of(main, "clip_low") + mean_of(main, "clip_high"),
        "step_seconds": sum(float(r.get("time/step") or 0) for r in records),
        "reward_first": float(main[0].get("reward/mean", 0.0)) if main else 0.0,
        "reward_last": float(main[-1].get("reward/mean", 0.0)) if main else 0.0,
        "length_first": float(main[0].get("length/mean", 0.0)) if main else 0.0,
        "length_last": float(main[-1].get("length/mean", 0.0)) if main else 0.0,
        "cut_first": float(main[0].get("length/cut", 0.0)) if main else 0.0,
        "cut_last": float(main[-1].get("length/cut", 0.0)) if main else 0.0,
    }


def train(keys: dict[str, Any], budget: float) -> Path:
    """Run the recipe until the budget is spent. Returns the run's directory."""
    from tilth.api import run_recipe
    from tilth.config.load import from_dict
    from tilth.runs.signals import Interrupted

    nested: dict[str, Any] = {}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        if key:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    recipe = from_dict(nested)
    try:
        run_recipe(recipe, name="learning", callbacks=[Budget(budget)])
    except Interrupted:
        if not budget:
            raise
    return Path(recipe.run.dir) / recipe.run.name


def main() -> None:
    began = time.monotonic()
    given, result, budget = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    keys = json.loads(given.read_text())
    directory = train(keys, budget)

    from tilth.runs.readers import read_metrics

    records = read_metrics(directory)
    found = {
        "keys": keys,
        "budget": budget,
        "points": points(records),
        **totals(records),
        "wall_seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time(),
    }
    result.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
