"""Readers of a run's directory, also while the run is active and after it was killed."""

import itertools
import json
import math
import os
import statistics
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from tilth.core.errors import DataError, ModelError, parsing
from tilth.core.lines import iterate_lines, read_lines
from tilth.core.write_queue import settle
from tilth.data.trajectories import read_trajectories, steps_of  # noqa: F401  (readers of a run too)
from tilth.runs.metrics import GENERATION, METRICS
from tilth.runs.updates import Update, read_updates

Record = dict[str, Any]


RECOVERIES = "recoveries.jsonl"
"""File of a run with a line for each recovery from a failure, also one that has failed."""
WARNINGS = "warnings.jsonl"
"""File of a run with a line for each warning of a watch."""
_NEEDED: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    RECOVERIES: {"time": str, "step": int, "kind": str, "evidence": str, "lost": (int, float), "seconds": (int, float)},
    WARNINGS: {"time": str, "step": int, "kind": str, "evidence": str},
}
"""File -> what each of its lines has."""
_BRIEF = ("step", "kind", "ranks", "action", "replaced", "lost", "seconds")
BALANCE = ("balance/spread", "balance/idle", "padding")
"""Metrics whose means over all steps are in a summary."""
_SOURCE = "mixture/"
_AGES = "staleness/tokens/"
"""Family of metrics with the tokens that were so many versions behind."""
_FATES = ("finished", "consumed", "dropped")
"""What becomes of a sample under ``rollout.staleness``, as metrics name it."""
HOUR = 3600.0
_LONG_AGO = "1970-01-01T00:00:00Z"


def read_metrics(run: str | Path) -> list[Record]:
    """Return the records of committed steps in order: step, attempt, phase, seconds, metrics."""
    path = Path(run) / "metrics.jsonl"
    latest: dict[int, Record] = {}
    for number, record in enumerate(read_lines(path), 1):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise DataError(f"{path} line {number} is not the record of a step", key=f"{path.name}.{number}.step")
        latest[record["step"]] = record  # a later attempt replaces the earlier one
    return [latest[step] for step in sorted(latest)]


def read_state(run: str | Path) -> Record:
    """Return run.json; its state is "interrupted" if it is "running" without a process. DataError: not a run."""
    return present(run, stored_state(run))


def stored_state(run: str | Path) -> Record:
    """Return run.json as it was written. DataError: not a run."""
    path = Path(run) / "run.json"
    settle(path)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{run} is not a run: it has no run.json", key="run.json") from error
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}", key="run.json.content") from error
    if not isinstance(state, dict) or not {"state", "digest"} <= set(state):
        raise DataError(f"{path} is not the state of a run: it needs the keys state and digest", key="run.json.digest")
    return state


def nowhere(where: str) -> DataError:
    """Return the error for a text that names no place with checkpoints."""
    message = f"WHERE={where!r} is neither a run nor a checkpoint, nor a folder of those"
    return DataError(f"{message}; runs lie in runs/ by default", key="WHERE")


def present(run: str | Path, stored: Record) -> Record:
    """Return the stored state of a run at this moment: see ``read_state``."""
    with parsing(Path(run) / "run.json"):
        gone = stored["state"] == "running" and _gone(stored)
    return stored | {"state": "interrupted"} if gone else stored.copy()


def read_recoveries(run: str | Path) -> list[Record]:
    """Return the failures of a run and its recoveries, in order: time, step, kind, ranks, evidence, who was replaced.

    lost: seconds of work that was done again; seconds: until the workers were ready to go on. action: "stop" if the run
    did not go on.
    """
    return _read(run, RECOVERIES)[0]


def read_warnings(run: str | Path) -> list[Record]:
    """Return what the watches of a run have warned of, in order: time, step, kind, ranks, evidence, details."""
    return _read(run, WARNINGS)[0]


def _read(run: str | Path, name: str) -> tuple[list[Record], list[str]]:
    """Return the records of a file that is beside the run, and which lines are none: they do not hide the run."""
    path, found, left_out = Path(run) / name, list[Record](), list[str]()
    settle(path)
    for number, record in enumerate(iterate_lines(path, lenient=True), 1):
        needed = _NEEDED[name].items()
        if isinstance(record, dict) and all(isinstance(record.get(key), kind) for key, kind in needed):
            found.append(record)
        else:
            left_out.append(f"line {number} of {name} cannot be read, and is left out")
    return found, left_out


def ettr(
    state: Mapping[str, Any], recoveries: Sequence[Mapping[str, Any]], now: datetime, window: float = math.inf
) -> float | None:
    """Return the effective training time ratio: the share of the wall time that neither failures nor changes of the
    controller did cost.

    Over the last ``window`` seconds (ByteRobust, arXiv 2509.16293: cumulative, or sliding over an hour); None before a
    second has passed. The pauses between two commands do not count.
    """
    begin = now - timedelta(seconds=min(window, 1e9))
    wall, cost = 0.0, 0.0
    for before, attempt in itertools.pairwise([{}, *state.get("attempts", [])]):
        since = before["ended"] if before.get("state") == "left" else attempt["started"]
        started = max(datetime.fromisoformat(since), begin)
        ended = datetime.fromisoformat(attempt["ended"]) if attempt.get("ended") else now
        wall += max((ended - started).total_seconds(), 0.0)
    for one in (*recoveries, *handovers(state)):
        if datetime.fromisoformat(one["time"]) >= begin:
            cost += one["lost"] + one["seconds"]
    return max(1.0 - cost / wall, 0.0) if wall >= 1.0 else None


def handovers(state: Mapping[str, Any]) -> list[Record]:
    """Return what it cost that controllers left the run to the next ones, with the time, step, lost and seconds of
    recoveries."""
    found = list[Record]()
    for before, after in itertools.pairwise(state.get("attempts", [])):
        if before.get("state") == "left":
            at = after.get("resumed") or after["started"]
            seconds = (datetime.fromisoformat(at) - datetime.fromisoformat(before["ended"])).total_seconds()
            found.append({"time": at, "step": after.get("from_step", 0), "lost": 0.0, "seconds": seconds})
    return found


def ettr_curve(records: Sequence[Record], recoveries: Sequence[Record]) -> list[Record]:
    """Return the records with ``ettr/whole`` and ``ettr/hour``: the share of the wall time until their step, and of the
    hour before it, that failures did not cost. Without a recovery they are returned as they are.

    recoveries: with ``handovers``.
    """
    found, left, past = list[Record](), sorted(recoveries, key=lambda one: one["step"]), list[tuple[float, float]]()
    spent = 0.0
    for record in records:
        while left and left[0]["step"] < record["step"]:
            one = left.pop(0)
            cost = one["lost"] + one["seconds"]
            spent += cost
            past.append((record["seconds"] + spent, cost))
        wall = record["seconds"] + spent
        late = sum(cost for at, cost in past if at > wall - HOUR)
        shares = {"ettr/whole": 1 - spent / wall, "ettr/hour": max(1 - late / min(wall, HOUR), 0.0)} if wall > 0 else {}
        found.append(record | shares if recoveries else record)
    return found


def run_settings(run: Path) -> dict[str, Any]:
    """Return the run's recipe as plain data, also one with keys that this version does not have."""
    file = run / "recipe.toml"
    try:
        return tomllib.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}", key=file.name) from None


def checkpoints_of(run: str | Path) -> str:
    """Return the absolute path, or the URL, of a run's checkpoints: in its folder, or under ``run.checkpoints``."""
    elsewhere: str = read_state(run).get("checkpoints", "")
    return elsewhere or str((Path(run) / "checkpoints").resolve())


def _gone(state: Record) -> bool:
    """True if the process that wrote the state has ended; False if it ran on another machine."""
    if state.get("host") != os.uname().nodename:
        return False
    return not _lives(state["pid"], state["pid_started"])


def supervised(state: Record) -> bool:
    """True if the supervisor of a run is alive on this machine: where the controller has ended, another one follows."""
    owner = state.get("supervisor")
    here = state.get("host") == os.uname().nodename
    return owner is not None and here and _lives(owner["pid"], owner["started"])


def _lives(pid: int, started: float) -> bool:
    """True if a process is alive, and is the one that started then."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def curve(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of each step that measured the metric."""
    return [(r["step"], float(r[name])) for r in records if r.get(name) is not None]


ACCURACY, REWARD = "accuracy/heldout", "reward/heldout"


def main_metric(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the main metric: accuracy, or the mean reward if some outcome was neither 0 nor 1."""
    graded = any(r.get(REWARD) is not None and r.get(ACCURACY) is None for r in records)
    return REWARD if graded else ACCURACY


def phases(records: Sequence[Record]) -> list[Record]:
    """Return each evaluated phase of the policy in order: phase, steps, seconds, metric (``main_metric``), first, last.

    first, last: the metric at its beginning (None if not measured) and at its end; range_first, range: their 95 %
    intervals; prompts: those of the end; change: interval of the change in the phase. None: not known.
    """
    metric, begin, found = main_metric(records), _began(records), list[Record]()
    since, before = 0.0, 0
    for name in dict.fromkeys(r.get("phase", "") for r in records):
        mine = [r for r in records if r.get("phase", "") == name]
        last = next((r for r in reversed(mine) if r.get(metric) is not None), None)
        until, at = float(mine[-1].get("seconds") or since), mine[-1]["step"]
        if name != "values" and last is not None:
            took = {"phase": name, "steps": at - before, "seconds": until - since, "metric": metric}
            ends = {"first": begin and begin[metric], "range_first": begin and spread(begin, metric)}
            told = {"last": last[metric], "range": spread(last, metric), "prompts": last.get(f"{REWARD}/prompts")}
            found, begin = [*found, took | ends | told | {"change": _change(begin, last, metric)}], last
        since, before = until, at
    return found


def spread(record: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """Return the 95 % interval of a held-out metric in the record of a step; None if it has none."""
    at = REWARD if metric == ACCURACY else metric
    low, high = record.get(f"{at}/low"), record.get(f"{at}/high")
    return None if low is None or high is None else (low, high)


def _change(begin: Record | None, last: Record, metric: str) -> tuple[float, float] | None:
    """Return the interval of the change between two evaluations: paired if their prompts were the same."""
    low, high = (last.get(f"{REWARD}/change_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        return low, high
    first, now = begin and spread(begin, metric), spread(last, metric)
    if begin is None or first is None or now is None:
        return None
    return unpaired_change((begin[metric], *first), (last[metric], *now))


def unpaired_change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the difference of two means over different prompts (Newcombe 1998). before, after: each
    mean and its interval."""
    (a, a_low, a_high), (b, b_low, b_high) = before, after
    return b - a - math.hypot(b - b_low, a_high - a), b - a + math.hypot(b_high - b, a - a_low)


@dataclass(frozen=True)
class StepRecords:
    """Committed steps as ``summarise`` reads them. key: at least the first two, the last of each phase, and those with
    an evaluation, in order; pairs: of two metrics, in each step that measured the first one; names: of all metrics."""

    key: Sequence[Record]
    pairs: Callable[[str, str], Sequence[tuple[float, float | None]]]
    names: Callable[[], Collection[str]]

    def values(self, name: str) -> list[float]:
        """Return the values of a metric in the order of steps."""
        return [value for value, _ in self.pairs(name, name)]


def summarise(run: str | Path, steps: StepRecords | None = None) -> Record:
    """Return the results of a run as flat JSON; None for what was never measured. steps: default: ``read_metrics``.

    accuracy_first: held-out accuracy where the main phase began, after a warm-up; accuracy_start: before the very first
    step, not measured in a warm-up. reward_heldout_*: the mean reward likewise; there is no accuracy if an outcome was
    neither right nor wrong. heldout_range: 95 % interval of its last value. tokens_per_second_*: over the time of all
    steps. steps_planned: ``planned_steps``. balance_spread, balance_idle, padding: means over steps. best: step,
    metric, value and its range. behind: of samples under ``rollout.staleness``. generation: metric -> its value, of
    those in ``metrics.GENERATION``: of a sum the sum over steps, of a max the greatest, of others the mean. sources: of
    ``data.mixture`` -> samples drawn.
    """
    state, survived = read_state(run), read_recoveries(run)
    steps = steps or _all_steps(read_metrics(run))
    records, values = steps.key, steps.values
    last = records[-1] if records else {}
    unread = [{"step": last.get("step", 0), "text": text} for name in _NEEDED for text in _read(run, name)[1]]
    end = datetime.now(UTC) if state["state"] == "running" else datetime.fromisoformat(state.get("ended") or _LONG_AGO)
    return {
        "run": str(run),
        "recipe": state.get("recipe"),
        "state": state["state"],
        "error": state.get("error"),
        "warnings": [*state.get("warnings", []), *unread],
        "attempts": state.get("attempt"),
        "recoveries": [{name: one[name] for name in _BRIEF if name in one} for one in survived],
        "ettr": ettr(state, survived, end),
        "updates": [_brief(one) for one in read_updates(run)],
        "steps": last.get("step", 0),
        "steps_planned": planned_steps(state, last),
        "phase": last.get("phase"),
        "seconds": _seconds(state, last),
        "phases": phases(records),
        **_ends(records, "accuracy", ACCURACY if main_metric(records) == ACCURACY else None),
        **_ends(records, "reward_heldout", REWARD),
        "heldout_range": _newest_range(records, main_metric(records)),
        "loss_heldout_first": _first([v for _, v in curve(records, "loss/heldout")]),
        "loss_heldout_last": _first([v for _, v in curve(records[::-1], "loss/heldout")]),
        "pairs_heldout_last": _first([v for _, v in curve(records[::-1], "accuracy/pairs")]),
        "pairs_heldout_range": _newest_range(records, "accuracy/pairs"),
        "bits_per_byte": _first([v for _, v in curve(records[::-1], "bits_per_byte/heldout")]),
        "parts_heldout": _parts(records),
        "best": _best(state.get("best"), records),
        "reward_last": _first(values("reward/mean")[-1:]),
        "tokens_per_second_generate": _weighted(steps.pairs("tokens_per_second/generate", "time/generate")),
        "tokens_per_second_train": _weighted(steps.pairs("tokens_per_second/train", "time/update")),
        **{name.replace("/", "_"): _mean(values(name)) for name in BALANCE},
        "behind": _behind(Path(run), steps),
        "generation": _generation(steps),
        "sources": _drawn(steps),
        "mismatch_max": max(values("mismatch/max"), default=None),
        "mismatch_mean": max(values("mismatch/mean"), default=None),
        "rewards_missing": int(sum(values("reward/missing"))),
        "rewards_missing_heldout": int(sum(values("reward/heldout/missing"))),
        "rewards_timed_out": int(sum(values("reward/timeout"))),
        "tokens_generated": int(sum(values("tokens/generated"))),
        "tokens_trained": int(sum(values("tokens/trained"))),
        "saves_failed": int(sum(values("save/failed"))),
        "steps_skipped": int(sum(values("steps/skipped"))),
        "memory_predicted": (state.get("memory") or {}).get("predicted"),
        "memory_peak": (state.get("memory") or {}).get("peak") or last.get("memory/peak"),
    }


def planned_steps(state: Mapping[str, Any], last: Mapping[str, Any]) -> int | None:
    """Return the number of a run's last step, as far as it is known now; None without a plan. last: record of its
    newest step. Phases that have ended count the steps that they took, as a warm-up may end before its plan does, and
    a run that was stopped by its loop or a callback is whole."""
    plan = state.get("plan") or {}
    supervised, values, steps = (plan.get(name) or 0 for name in ("supervised_steps", "value_steps", "steps"))
    if not (last.get("phase_steps") and last.get("phase_step")):
        return supervised + values + steps or None
    later: int = {"warmup": values + steps, "values": steps}.get(last.get("phase", ""), 0)
    whole = int(last["step"] - last["phase_step"] + last["phase_steps"] + later)
    return last["step"] if state.get("state") == "finished" else whole


def _all_steps(records: Sequence[Record]) -> StepRecords:
    def pairs(name: str, beside: str) -> list[tuple[float, float | None]]:
        return [(float(r[name]), r.get(beside)) for r in records if r.get(name) is not None]

    return StepRecords(records, pairs, lambda: {name for record in records for name in record})


def _behind(run: Path, steps: StepRecords) -> Record | None:
    """Return how far samples were behind the policy, and what became of them; None without ``rollout.staleness``.

    mean, max: versions; tokens: versions behind -> number; samples, lengths: of those that ended, were learned from and
    were dropped: number, and mean tokens of their completions; dropped: reason -> number. Drops are those of the log of
    events, since metrics of a step lack what is dropped behind the last one.
    """
    from tilth.runs.events import committed_drops  # reads with this module

    if not (behind := steps.values("staleness/max")):
        return None
    ages = sorted(int(age) for name in steps.names() if (age := name.removeprefix(_AGES)) != name and age.isdecimal())
    counts = {name: int(sum(steps.values(f"samples/{name}"))) for name in _FATES}
    lengths = {name: _weighted(steps.pairs(f"length/{name}", f"samples/{name}")) for name in _FATES}
    drops = committed_drops(run)
    lengths["dropped"] = None  # the metric's mean is over such as had ended, whose number it lacks
    if drops is not None:
        counts["dropped"] = sum(one.samples for one in drops.values())
        if ended := sum(one.ended for one in drops.values()):
            lengths["dropped"] = sum(one.tokens for one in drops.values()) / ended
    dropped = {reason: one.samples for reason, one in (drops or {}).items()}
    tokens = {str(age): int(sum(steps.values(f"{_AGES}{age}"))) for age in ages}
    mean = _weighted(steps.pairs("staleness/mean", "samples"))
    found = {"mean": mean, "max": max(behind), "tokens": tokens, "samples": counts, "lengths": lengths}
    return {**found, "dropped": dropped}


def _generation(steps: StepRecords) -> Record:
    measured = {name: values for name in GENERATION if (values := steps.values(name))}
    how: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max}
    return {name: how.get(METRICS[name].reduction, statistics.fmean)(some) for name, some in measured.items()}


def _drawn(steps: StepRecords) -> dict[str, int]:
    names = sorted(name for name in steps.names() if name.startswith(_SOURCE))
    return {name.removeprefix(_SOURCE): int(sum(steps.values(name))) for name in names}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _brief(update: Update) -> Record:
    """Return an update as flat JSON. step: after which it was taken."""
    names = ("number", "state", "step", "by", "time", "why")
    return {**{name: getattr(update, name) for name in names}, "changes": dict(update.changes)}


def _parts(records: Sequence[Record]) -> dict[str, float]:
    """Return each named part of the reward at the last evaluation that measured it."""
    family = "reward/heldout/part/"
    names = dict.fromkeys(n for r in records for n in r if n.startswith(family) and r[n] is not None)
    return {n.removeprefix(family): curve(records, n)[-1][1] for n in names}


def _ends(records: Sequence[Record], name: str, metric: str | None) -> Record:
    """Return the metric at both ends of the run and of its main phase, and its maximum; metric: None if unmeasured."""
    found = [(r.get("phase", ""), r[metric]) for r in records if metric and r.get(metric) is not None]
    before = [value for phase, value in found if phase == "warmup"]
    values = [value for _, value in found]
    return {
        f"{name}_start": _start(records, metric) if metric else None,
        f"{name}_first": before[-1] if before and len(before) < len(values) else _first(values),
        f"{name}_last": values[-1] if values else None,
        f"{name}_best": max(values, default=None),
    }


def _best(found: Record | None, records: Sequence[Record]) -> Record | None:
    """Return the best evaluation with its interval as ``range``, if that is known."""
    at = next((r for r in records if found is not None and r["step"] == found["step"]), {})
    ends = None if found is None else spread(at, found.get("metric", ACCURACY))
    return found if found is None or ends is None else {**found, "range": ends}


def _newest_range(records: Sequence[Record], metric: str) -> tuple[float, float] | None:
    newest = next((r for r in reversed(records) if r.get(metric) is not None), {})
    return spread(newest, metric)


def _start(records: Sequence[Record], metric: str) -> float | None:
    """Return the metric before the first step."""
    begin = _began(records, metric)
    return None if begin is None else float(begin[metric])


def _began(records: Sequence[Record], metric: str | None = None) -> Record | None:
    """Return the record with the evaluation before the first step: the first one, unless its step was evaluated too."""
    metric = metric or main_metric(records)
    if not records or records[0]["step"] != 1 or records[0].get("phase") == "warmup":
        return None
    every_step = records[0].get("phase_steps") == 1 or any(r.get(metric) is not None for r in records[1:2])
    return None if every_step or records[0].get(metric) is None else records[0]


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def rate(records: Sequence[Record], name: str, time: str) -> float | None:
    """Return a rate (tokens per second, utilisation) over all steps, weighted by their time."""
    return _weighted(_all_steps(records).pairs(name, time))


def _weighted(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the mean of the first numbers weighted by the second ones."""
    spent = sum(t or 0.0 for _, t in pairs)
    return sum(v * (t or 0.0) for v, t in pairs) / spent if spent else None


def _seconds(state: Record, last: Record) -> float:
    """Return the run time in seconds: as recorded at the end, until now while it runs, else until the last step."""
    if state["state"] == "running" and state.get("attempts"):
        attempt = state["attempts"][-1]
        since = datetime.now(UTC) - datetime.fromisoformat(attempt["started"])
        return attempt.get("from_seconds", 0.0) + since.total_seconds()
    return float(state.get("seconds") or last.get("seconds", 0.0))
