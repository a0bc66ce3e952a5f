"""Readers of a run's directory, also while the run goes on and after it was killed."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from tilth.core.errors import DataError
from tilth.data.trajectories import read_trajectories, steps_of
from tilth.runs.files import read_lines

__all__ = [
    "checkpoints_of", "curve", "phases", "rate", "read_metrics", "read_state", "read_trajectories", "steps_of",
    "summarise", "told_by",
]  # fmt: skip

Record = dict[str, Any]


def read_metrics(run: str | Path) -> list[Record]:
    """Records of the committed steps in order: step, attempt, phase, seconds, metrics. A torn last line is no step."""
    path = Path(run) / "metrics.jsonl"
    latest: dict[int, Record] = {}
    for number, record in enumerate(read_lines(path), 1):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise DataError(f"{path} line {number} is not the record of a step", key=f"{path.name}.{number}.step")
        latest[record["step"]] = record  # a later attempt's record of the same step replaces the earlier one
    return [latest[step] for step in sorted(latest)]


def read_state(run: str | Path) -> Record:
    """run.json. A run that says it is running, but whose process is gone, is "interrupted". DataError: not a run."""
    path = Path(run) / "run.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{run} is not a run: it has no run.json", key="run.json") from error
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}", key="run.json.content") from error
    if not isinstance(state, dict) or not {"state", "digest"} <= set(state):
        raise DataError(f"{path} is not the state of a run: it has no state or digest", key="run.json.digest")
    if state["state"] == "running" and _gone(state):
        state["state"] = "interrupted"
    return state


def checkpoints_of(run: str | Path) -> str:
    """Where the checkpoints of a run are: a folder of its own, or what ``run.checkpoints`` said: a folder, or a URL."""
    elsewhere: str = read_state(run).get("checkpoints", "")
    return elsewhere or str((Path(run) / "checkpoints").resolve())


def _gone(state: Record) -> bool:
    """Whether the process that wrote the state does not live any more; unknown, so no, for another machine's."""
    if state.get("host") != os.uname().nodename:
        return False
    try:
        process = psutil.Process(state["pid"])
        same = abs(process.create_time() - state["pid_started"]) < 2
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def curve(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """(step, value) where the metric was measured."""
    return [(r["step"], float(r[name])) for r in records if r.get(name) is not None]


ACCURACY, REWARD = "accuracy/heldout", "reward/heldout"


def told_by(records: Sequence[Mapping[str, Any]]) -> str:
    """The metric that tells how good the answers are: accuracy, but for a reward that was neither 0 nor 1 once."""
    graded = any(r.get(REWARD) is not None and r.get(ACCURACY) is None for r in records)
    return REWARD if graded else ACCURACY


def phases(records: Sequence[Record]) -> list[Record]:
    """Each phase of the policy that was evaluated, in order: phase, steps, seconds, metric (see ``told_by``), and that
    where it began (``first``; None where it was not measured) and at its end (``last``)."""
    metric, begin, found = told_by(records), _start(records), list[Record]()
    since, before = 0.0, 0
    for name in dict.fromkeys(r.get("phase", "") for r in records):
        mine = [r for r in records if r.get("phase", "") == name]
        last = next((r[metric] for r in reversed(mine) if r.get(metric) is not None), None)
        until, at = float(mine[-1].get("seconds") or since), mine[-1]["step"]
        if name != "values" and last is not None:
            took = {"phase": name, "steps": at - before, "seconds": until - since}
            found, begin = [*found, {**took, "metric": metric, "first": begin, "last": last}], last
        since, before = until, at
    return found


def summarise(run: str | Path) -> Record:
    """What a run came to, as flat JSON. What was never measured is None.

    accuracy_first is the held-out accuracy where the main phase began (after a warm-up); accuracy_start that before the
    first step of all, which a warm-up does not measure: its first evaluation is after steps of its own. Where an answer
    is not just right or wrong there is no accuracy, and the same of the mean reward. phases: see there.
    Tokens/s are tokens over time, all steps together. best: step, metric and value of the best evaluation.
    """
    state, records = read_state(run), read_metrics(run)
    last = records[-1] if records else {}
    return {
        "run": str(run),
        "recipe": state.get("recipe"),
        "state": state["state"],
        "error": state.get("error"),
        "warnings": state.get("warnings", []),
        "attempts": state.get("attempt"),
        "steps": last.get("step", 0),
        "phase": last.get("phase"),
        "seconds": _seconds(state, last),
        "phases": phases(records),
        **_ends(records, "accuracy", ACCURACY if told_by(records) == ACCURACY else None),
        **_ends(records, "reward_heldout", REWARD),
        "loss_heldout_first": _first([v for _, v in curve(records, "loss/heldout")]),
        "loss_heldout_last": _first([v for _, v in curve(records[::-1], "loss/heldout")]),
        "pairs_heldout_last": _first([v for _, v in curve(records[::-1], "accuracy/pairs")]),
        "bits_per_byte": _first([v for _, v in curve(records[::-1], "bits_per_byte/heldout")]),
        "parts_heldout": _parts(records),
        "best": state.get("best"),
        "reward_last": next((r["reward/mean"] for r in reversed(records) if r.get("reward/mean") is not None), None),
        "tokens_per_second_generate": rate(records, "tokens_per_second/generate", "time/generate"),
        "tokens_per_second_train": rate(records, "tokens_per_second/train", "time/update"),
        "mismatch_max": max((v for _, v in curve(records, "mismatch/max")), default=None),
        "mismatch_mean": max((v for _, v in curve(records, "mismatch/mean")), default=None),
        "rewards_missing": int(sum(v for _, v in curve(records, "reward/missing"))),
        "rewards_missing_heldout": int(sum(v for _, v in curve(records, "reward/heldout/missing"))),
        "rewards_timed_out": int(sum(v for _, v in curve(records, "reward/timeout"))),
        "tokens_generated": int(sum(v for _, v in curve(records, "tokens/generated"))),
        "tokens_trained": int(sum(v for _, v in curve(records, "tokens/trained"))),
        "saves_failed": int(sum(v for _, v in curve(records, "save/failed"))),
        "steps_skipped": int(sum(v for _, v in curve(records, "steps/skipped"))),
        "memory_predicted": (state.get("memory") or {}).get("predicted"),
        "memory_peak": (state.get("memory") or {}).get("peak") or last.get("memory/peak"),
    }


def _parts(records: Sequence[Record]) -> dict[str, float]:
    """Named parts of the reward at the last evaluation that had each."""
    family = "reward/heldout/part/"
    names = dict.fromkeys(n for r in records for n in r if n.startswith(family) and r[n] is not None)
    return {n.removeprefix(family): curve(records, n)[-1][1] for n in names}


def _ends(records: Sequence[Record], name: str, metric: str | None) -> Record:
    """The metric at the ends of the run and of its main phase, and its greatest value. metric: None: not measured."""
    found = [(r.get("phase", ""), r[metric]) for r in records if metric and r.get(metric) is not None]
    before = [value for phase, value in found if phase == "warmup"]
    values = [value for _, value in found]
    return {
        f"{name}_start": _start(records, metric) if metric else None,
        f"{name}_first": before[-1] if before and len(before) < len(values) else _first(values),
        f"{name}_last": values[-1] if values else None,
        f"{name}_best": max(values, default=None),
    }


def _start(records: Sequence[Record], metric: str | None = None) -> float | None:
    """The metric before the first step: in its record, unless the step's own evaluation took the place."""
    metric = metric or told_by(records)
    if not records or records[0]["step"] != 1 or records[0].get("phase") == "warmup":
        return None
    every_step = records[0].get("phase_steps") == 1 or any(metric in r for r in records[1:2])
    return None if every_step else records[0].get(metric)


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def rate(records: Sequence[Record], name: str, time: str) -> float | None:
    """A rate (tokens per second, flops of the peak) over all steps: each step's weighs by its time."""
    pairs = [(r[name], r.get(time) or 0.0) for r in records if r.get(name) is not None]
    spent = sum(t for _, t in pairs)
    return sum(v * t for v, t in pairs) / spent if spent else None


def _seconds(state: Record, last: Record) -> float:
    """Run time: as the end recorded it, else until the last committed step, or until now while it runs."""
    if state["state"] == "running" and state.get("attempts"):
        attempt = state["attempts"][-1]
        since = datetime.now(UTC) - datetime.fromisoformat(attempt["started"])
        return attempt.get("from_seconds", 0.0) + since.total_seconds()
    return float(state.get("seconds") or last.get("seconds", 0.0))
