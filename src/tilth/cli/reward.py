"""``tilth reward try``: score right, wrong and empty answers of a few records, and judge the reward by that."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import typer
from pydantic import ValidationError

from tilth.cli.main import RewardTryCommand
from tilth.config.plugins import task_names
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError, RecipeError
from tilth.launch.rewards import EMPTY, GIVEN, OTHER, RIGHT, Trial, Tried, examine, verdict
from tilth.rewards.process_pool import Outcome
from tilth.ui import format

LABELS = {RIGHT: "own answer", OTHER: "another's answer", EMPTY: "empty", GIVEN: "--completion"}
MOST_ROWS = 20
SHOWN = 48  # most characters of a prompt in a table


def try_reward(options: RewardTryCommand) -> None:
    """Print the findings. Exit code 1: the reward is broken."""
    data = _data(options.source, columns_of(options.columns or ()), options.digits)
    with own_option():
        trial = examine(options.reward, data, options.n, options.completion, options.timeout)
    typer.echo(json.dumps(as_object(trial)) if options.as_json else "\n".join(lines(trial)))
    if verdict(trial)[0] == "broken":
        raise typer.Exit(1)


@contextmanager
def own_option() -> Iterator[None]:
    """Name ``--columns`` instead of a recipe's key in the error of records that cannot be read."""
    try:
        yield
    except DataError as error:
        message = str(error)
        option = message.replace("try data.columns.", "try --columns ")
        raise DataError(option, key=error.key if option == message else "--columns") from error


_COMMA = re.compile(r",(?=\s*\w+=)")  # one that a further NAME=COLUMN follows


def columns_of(words: Sequence[str]) -> dict[str, str]:
    """Parse ``prompt=question``, also several with commas in one word unless one is part of a pattern. RecipeError."""
    found = {}
    for pair in (part for word in words for part in _COMMA.split(word)):
        name, equals, column = pair.partition("=")
        if not (name and equals and column):
            raise RecipeError(
                f"--columns {pair!r} is not of the form prompt=NAME (also answer, messages, text)", key="--columns"
            )
        found[name.strip()] = column.strip()
    return found


def _data(source: str, columns: dict[str, str], digits: int) -> DataConfig:
    try:
        return DataConfig(source=source, columns=columns, digits=digits)  # type: ignore[arg-type]
    except ValidationError:
        wrong = ", ".join(sorted(set(columns) - {"prompt", "answer", "messages", "text"}))
        raise RecipeError(
            f"--columns {wrong}: there is prompt, answer, messages, text", key=f"--columns.{wrong}"
        ) from None


# ---- printing ----


def lines(trial: Trial) -> list[str]:
    word, sentences = verdict(trial)
    kind = "prompts" if trial.data in task_names() else "records"
    head = [
        f"reward   {trial.reward}",
        f"data     {Path(trial.data).name}: {len(trial.tried)} of {trial.records:,} {kind}, spread evenly",
    ]
    mark = f"verdict  {word}"
    indented = [f"         {sentence}" for sentence in sentences]
    found = [*head, "", *_table(_cases(trial)), "", *_table(_rows(trial)), *_failures(trial), "", mark, *indented]
    return [format.plain(line) for line in found]


def _cases(trial: Trial) -> list[list[str]]:
    """Return a row for each kind of completion: values, parts, time."""
    parts = trial.parts
    rows = [["completion", "calls", "missing", "mean", "least", "most", *parts, "ms a call", "slowest"]]
    for case, label in LABELS.items():
        found = trial.outcomes(case)
        if not found:
            continue
        values = [o.value for o in found if o.value is not None]
        ends = [fmean(values), min(values), max(values)] if values else [None] * 3
        means = [_mean([o.parts[p] for o in found if p in o.parts]) for p in parts]
        times = [f"{1000 * f([o.seconds for o in found]):,.3f}" for f in (median, max)]
        missing = sum(o.value is None for o in found)
        rows.append([label, str(len(found)), str(missing), *map(format.number, [*ends, *means]), *times])
    return rows


def _mean(values: list[float]) -> float | None:
    return float(np.nanmean(values)) if values and not np.isnan(values).all() else None


def _rows(trial: Trial) -> list[list[str]]:
    """Return a row for each record, doubtful ones first."""
    cases = [c for c in trial.cases if c in LABELS]
    rows = [["record", *(LABELS[c] for c in cases), "prompt"]]
    for tried in sorted(trial.tried, key=lambda t: not t.doubtful)[:MOST_ROWS]:
        found = [tried.outcomes.get(case) for case in cases]
        values = ["" if o is None else o.status if o.value is None else format.number(o.value) for o in found]
        text = json.dumps(tried.prompt.text, ensure_ascii=False)
        short = text if len(text) <= SHOWN else text[: SHOWN - 4] + '..."'
        rows.append([f"{tried.prompt.index + 1:,}", *values, short])
    return rows


def _failures(trial: Trial) -> list[str]:
    """Return each reason once, with its count and the first record and completion."""
    reasons: dict[str, list[str]] = {}
    for tried in trial.tried:
        for case, outcome in tried.outcomes.items():
            if outcome.value is None:
                first = f"record {tried.prompt.index + 1:,}, {LABELS.get(case, LABELS[RIGHT])}"
                reasons.setdefault(outcome.reason, []).append(first)
    if not reasons:
        return []
    found = [f"{len(places):>7}  {reason} (first: {places[0]})" for reason, places in reasons.items()]
    return ["", " failed", *found[:MOST_ROWS]]


def _table(rows: list[list[str]]) -> list[str]:
    """Align the columns: the first and a prompt to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    sides = ["<", *(">" for _ in widths[1:-1]), "<" if rows[0][-1] == "prompt" else ">"]
    return [" ".join(f" {c:{side}{w}}" for c, side, w in zip(row, sides, widths)).rstrip() for row in rows]


# ---- JSON ----


def as_object(trial: Trial) -> dict[str, Any]:
    """Return the findings as plain data; a missing value is null, with its reason."""
    word, sentences = verdict(trial)
    return {
        "reward": trial.reward, "data": trial.data, "records": trial.records, "verdict": word, "sentences": sentences,
        "tried": [_record(tried) for tried in trial.tried],
    }  # fmt: skip


def _record(tried: Tried) -> dict[str, Any]:
    completions = {case: _plain(outcome) for case, outcome in tried.outcomes.items()}
    return {"record": tried.prompt.index + 1, "prompt": tried.prompt.text, "completions": completions}


def _plain(outcome: Outcome) -> dict[str, Any]:
    parts = {name: None if np.isnan(value) else value for name, value in outcome.parts.items()}
    plain = {name: getattr(outcome, name) for name in ("status", "reason", "seconds")}
    return {"value": outcome.value, "parts": parts, **plain}
