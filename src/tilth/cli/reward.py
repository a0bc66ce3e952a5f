"""Try a reward on a few records before a run is spent on it: right, wrong and no answers, failures, time."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from pydantic import ValidationError

from tilth.config.plugins import task_names
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError, RecipeError
from tilth.rewards.functions import check_answers
from tilth.rewards.process_pool import Outcome, RewardPool
from tilth.rewards.verifiers import Gsm8k, builtin, said_number
from tilth.ui import format

if TYPE_CHECKING:
    from tilth.data.prompts import Prompt, PromptSet

RIGHT, AGAIN, OTHER, EMPTY, GIVEN = "right", "again", "other", "empty", "given"
LABELS = {RIGHT: "own answer", OTHER: "another's answer", EMPTY: "empty", GIVEN: "--completion"}
"""Kinds of completions for people; the second call of ``again`` is for the verdict only."""
STEP_SAMPLES = 512
"""Completions of a step with the default recipe, for a figure of speed that means something."""
SLOW_SECONDS = 5.0
FIRST_SECONDS, FIRST_TIMES = 0.1, 10
"""A first call that takes longer than this, and so many times the mean of the others, is told."""
MOST_ROWS = 20
SHOWN = 48
"""Characters of a prompt in a table."""


@dataclass(frozen=True)
class RewardOptions:
    """What is asked for, as on the command line."""

    columns: Mapping[str, str] = field(default_factory=dict)
    n: int = 20
    completion: str | None = None
    timeout: float = 10.0
    digits: int = 3


@dataclass(frozen=True)
class Tried:
    """A record and what became of each completion."""

    prompt: "Prompt"
    outcomes: dict[str, Outcome]

    def value(self, case: str) -> float | None:
        """The reward of a case; None: missing, or not tried."""
        return self.outcomes[case].value if case in self.outcomes else None

    def above(self, case: str) -> bool | None:
        """Whether the own answer earns more than a case; None: cannot be said."""
        own, other = self.value(RIGHT), self.value(case)
        return None if own is None or other is None else own > other

    @property
    def doubtful(self) -> bool:
        """Whether a person should look at it."""
        return False in (self.above(OTHER), self.above(EMPTY)) or any(o.value is None for o in self.outcomes.values())


@dataclass(frozen=True)
class Trial:
    """All that was found."""

    reward: str
    data: str
    records: int
    tried: list[Tried]
    formed: str = ""
    """The first answer that was not scored as it stands, in the form that it was given; empty: none was."""

    @property
    def cases(self) -> list[str]:
        """Kinds of completions that were tried, in order."""
        return [c for c in (RIGHT, AGAIN, OTHER, EMPTY, GIVEN) if any(c in t.outcomes for t in self.tried)]

    def outcomes(self, *cases: str) -> list[Outcome]:
        """Of some cases, or of all."""
        return [t.outcomes[c] for t in self.tried for c in cases or self.cases if c in t.outcomes]

    @property
    def parts(self) -> list[str]:
        """Names of parts that any call returned."""
        return sorted({name for o in self.outcomes() for name in o.parts})


def try_reward(reward: str, source: str, wish: RewardOptions, *, as_json: bool) -> None:
    """Print what a reward does with some records of a source. Exit code 1 for one that is broken."""
    trial = examine(reward, source, wish)
    typer.echo(json.dumps(as_object(trial)) if as_json else "\n".join(lines(trial)))
    if verdict(trial)[0] == "broken":
        raise typer.Exit(1)


def examine(reward: str, source: str, wish: RewardOptions) -> Trial:
    """Score the own answer (twice), another record's, an empty and a given completion for each of some records.

    Raises RewardError or DataError for what cannot be loaded, and for answers that a verifier cannot read.
    """
    spec = _spec(reward)
    with RewardPool(spec, timeout=wish.timeout, wait=False) as pool:
        from tilth.data.prompts import load_source  # while the pool's process starts

        with own_option():
            prompts = load_source(_data(source, wish))
        if source not in task_names():
            check_answers(spec, prompts)
        chosen = _spread(prompts, wish.n)
        wants_mark = _wants_mark(spec)
        asked = _completions(chosen, prompts, wish.completion, wants_mark)
        pool.ready()
        found = pool.score([(key, chosen[key[0]].text, text, chosen[key[0]].info) for key, text in asked.items()])
    outcomes = dict(zip(asked, found))
    tried = [
        Tried(prompt, {case: outcome for (place, case), outcome in outcomes.items() if place == i})
        for i, prompt in enumerate(chosen)
    ]
    formed = (text for (i, case), text in asked.items() if case == RIGHT and text != chosen[i].answer)
    return Trial(reward, source, len(prompts), tried, next(formed, ""))


@contextmanager
def own_option() -> Iterator[None]:
    """Where records cannot be read, the hint names ``--columns`` instead of a recipe's key."""
    try:
        yield
    except DataError as error:
        message = str(error)
        option = message.replace("try data.columns.", "try --columns ")
        raise DataError(option, key=error.key if option == message else "--columns") from error


def columns_of(said: Sequence[str]) -> dict[str, str]:
    """``prompt=question`` and so on as a table; several may stand in one word, with commas. Raises RecipeError."""
    found = {}
    for pair in (part for word in said for part in word.split(",")):
        name, equals, column = pair.partition("=")
        if not (name and equals and column):
            raise RecipeError(
                f"--columns {pair!r} is not of the form prompt=NAME (also answer, messages, text)", key="--columns"
            )
        found[name.strip()] = column.strip()
    return found


def _spec(reward: str) -> str | dict[str, float]:
    """A name, or the table of names and weights that a recipe would have: {gsm8k = 1.0, "regex:####" = 0.1}."""
    if not reward.startswith("{"):
        return reward
    try:
        found: dict[str, float] = tomllib.loads(f"reward = {reward}")["reward"]
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"REWARD={reward!r} is no table of names and weights: {error}", key="REWARD") from None
    return found


def _data(source: str, wish: RewardOptions) -> DataConfig:
    try:
        return DataConfig(source=source, columns=dict(wish.columns), digits=wish.digits)  # type: ignore[arg-type]
    except ValidationError:
        wrong = ", ".join(sorted(set(wish.columns) - {"prompt", "answer", "messages", "text"}))
        raise RecipeError(
            f"--columns {wrong}: there is prompt, answer, messages, text", key=f"--columns.{wrong}"
        ) from None


def _spread(prompts: "PromptSet", count: int) -> "list[Prompt]":
    """Records at equal distances over the whole source."""
    places = np.unique(np.linspace(0, len(prompts) - 1, min(count, len(prompts))).round().astype(np.int64))
    return [prompts[i] for i in prompts.rows[places]]


def _wants_mark(spec: str | Mapping[str, float]) -> bool:
    """Whether a reward, or one of several, looks for the number behind ``####``."""
    return any(isinstance(builtin(name), Gsm8k) for name in ([spec] if isinstance(spec, str) else spec))


def _formed(answer: str) -> str:
    """An answer as a completion of GSM8K: a bare number, which no completion may be, gets the mark before it."""
    return answer if said_number(answer) is not None else f"#### {answer}"


def _completions(
    chosen: "list[Prompt]", prompts: "PromptSet", given: str | None, wants_mark: bool
) -> dict[tuple[int, str], str]:
    """What to score for each record: (place, case) -> completion."""
    form = _formed if wants_mark else str
    asked: dict[tuple[int, str], str] = {}
    neighbours = [prompts[i] for i in prompts.rows[:MOST_ROWS]]
    for i, prompt in enumerate(chosen):
        if prompt.answer is not None:
            asked[i, RIGHT] = form(prompt.answer)
        others = (p.answer for p in [*chosen[i + 1 :], *chosen[:i], *neighbours])
        other = next((a for a in others if a is not None and a != prompt.answer), None)
        if other is not None:
            asked[i, OTHER] = form(other)
        asked[i, EMPTY] = ""
        if given is not None:
            asked[i, GIVEN] = given
    # The second call comes after all first ones, so that what a function remembers of them shows.
    return asked | {(i, AGAIN): text for (i, case), text in asked.items() if case == RIGHT}


# ---- what it means ----


def verdict(trial: Trial) -> tuple[str, list[str]]:
    """(works, doubtful or broken; the sentences that say why), worst first."""
    said = [*_failing(trial), *_telling(trial), *_shape(trial), *_steady(trial), *_meaning(trial), *_speed(trial)]
    worst = max((rank for rank, _ in said), default=0)
    return ("works", "doubtful", "broken")[worst], [text for _, text in sorted(said, key=lambda one: -one[0])]


Said = list[tuple[int, str]]
"""(0: fine, 1: doubtful, 2: broken; a sentence)."""


def _failing(trial: Trial) -> Said:
    outcomes = trial.outcomes()
    failed = [o for o in outcomes if o.value is None]
    if not failed:
        return [(0, f"None of {len(outcomes)} calls failed.")]
    if len(failed) == len(outcomes):
        return [(2, f"Every one of {len(outcomes)} calls failed.")]
    own = sum(o.value is None for o in trial.outcomes(RIGHT))
    rank = 2 if own and own == len(trial.outcomes(RIGHT)) else 1
    where = f"{own} of them on the right answer" if own else "none of them on the right answer"
    hint = "" if own else "; where a bad answer is meant to earn nothing, return 0"
    said = f"{len(failed)} of {len(outcomes)} calls failed, {where}: in a run such samples are left out{hint}."
    return [(rank, said)]


def _telling(trial: Trial) -> Said:
    """Whether the right answer earns more."""
    if not trial.outcomes(RIGHT):
        return [(1, "The data has no answers, so nobody knows what the right one would earn.")]
    said: Said = []
    for case, name in ((OTHER, "another record's"), (EMPTY, "none at all")):
        known = [above for t in trial.tried if (above := t.above(case)) is not None]
        if known:
            few, most = sum(known) < len(known) / 2, sum(known) < 0.9 * len(known)
            count = f"{sum(known)} of {len(known)} records"
            same = sum(t.above(case) is False and t.value(RIGHT) == t.value(case) for t in trial.tried)
            equal = f", as much in {same}" if same else ""
            said.append((2 if few else 1 if most else 0, f"The right answer earns more than {name} in {count}{equal}."))
    values = {o.value for o in trial.outcomes() if o.value is not None}
    if len(values) == 1:
        said.append((2, f"Every call gave {format.number(values.pop())}: a reward that never differs teaches nothing."))
    return said


def _shape(trial: Trial) -> Said:
    """Whether answers were scored in another form than they have."""
    if not trial.formed:
        return []
    return [(0, f"Answers that are bare numbers were scored in the form that gsm8k reads, as in {trial.formed!r}.")]


def _steady(trial: Trial) -> Said:
    both = ((t.value(RIGHT), t.value(AGAIN)) for t in trial.tried)
    pairs = [(first, again) for first, again in both if first is not None and again is not None]
    moved = sum(first != again for first, again in pairs)
    if not moved:
        return [(0, "The same answer scored twice earned the same.")] if pairs else []
    return [(1, f"The same answer scored twice earned two different rewards in {moved} of {len(pairs)} records.")]


def _meaning(trial: Trial) -> Said:
    """What will be called accuracy."""
    values = {o.value for o in trial.outcomes() if o.value is not None}
    if "correct" in trial.parts:
        return [(0, "Accuracy in a run is the mean of its part 'correct'.")]
    if values <= {0.0, 1.0}:
        return [(0, "It is 0 or 1, so its mean is an accuracy.")] if values else []
    return [
        (
            0,
            "It is not only 0 and 1 and has no part 'correct', so its mean is told as a reward, not as an accuracy.",
        )
    ]


def _speed(trial: Trial) -> Said:
    seconds = [o.seconds for o in trial.outcomes() if o.status in ("ok", "invalid", "error")]
    if not any(seconds):
        return []
    first, mean = seconds[0], fmean(seconds[1:] or seconds)  # the first call may import what the others have then
    step = mean * STEP_SAMPLES
    speed = f"{_two_digits(1 / max(mean, 1e-9))} calls a second in one process"
    taken = f"{STEP_SAMPLES} completions take {_two_digits(step)} s"
    late = first > max(FIRST_SECONDS, FIRST_TIMES * mean)
    apart = f" The first call, not counted here, took {_two_digits(first)} s." if late else ""
    if step <= SLOW_SECONDS:
        return [(0, f"{speed}: {taken}.{apart}")]
    return [(1, f"Only {speed}: {taken}; more reward.workers share that.{apart}")]


def _two_digits(value: float) -> str:
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


# ---- for people ----


def lines(trial: Trial) -> list[str]:
    """All of it as text."""
    word, sentences = verdict(trial)
    kind = "prompts" if trial.data in task_names() else "records"
    head = [
        f"reward   {trial.reward}",
        f"data     {Path(trial.data).name}: {len(trial.tried)} of {trial.records:,} {kind}, spread evenly",
    ]
    mark = f"verdict  {word}"
    indented = [f"         {sentence}" for sentence in sentences]
    return [*head, "", *_table(_cases(trial)), "", *_table(_rows(trial)), *_failures(trial), "", mark, *indented]


def _cases(trial: Trial) -> list[list[str]]:
    """A line for each kind of completion: values, parts, time."""
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
    """A line for each record, doubtful ones first."""
    cases = [c for c in trial.cases if c in LABELS]
    rows = [["record", *(LABELS[c] for c in cases), "prompt"]]
    for tried in sorted(trial.tried, key=lambda t: not t.doubtful)[:MOST_ROWS]:
        values = [_said(tried.outcomes.get(case)) for case in cases]
        rows.append([f"{tried.prompt.index + 1:,}", *values, _short(tried.prompt.text)])
    return rows


def _said(outcome: Outcome | None) -> str:
    return "" if outcome is None else format.number(outcome.value) if outcome.value is not None else outcome.status


def _short(text: str) -> str:
    said = json.dumps(text, ensure_ascii=False)
    return said if len(said) <= SHOWN else said[: SHOWN - 4] + '..."'


def _failures(trial: Trial) -> list[str]:
    """Each reason once, with its count and the first record and completion."""
    reasons: dict[str, list[str]] = {}
    for tried in trial.tried:
        for case, outcome in tried.outcomes.items():
            if outcome.value is None:
                reasons.setdefault(outcome.reason, []).append(
                    f"record {tried.prompt.index + 1:,}, {LABELS.get(case, LABELS[RIGHT])}"
                )
    if not reasons:
        return []
    found = [f"{len(places):>7}  {reason} (first: {places[0]})" for reason, places in reasons.items()]
    return ["", " failed", *found[:MOST_ROWS]]


def _table(rows: list[list[str]]) -> list[str]:
    """Columns of equal width: names to the left, numbers to the right, and the last as it is."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    sides = ["<", *(">" for _ in widths[1:-1]), "<" if rows[0][-1] == "prompt" else ">"]
    return [" ".join(f" {c:{side}{w}}" for c, side, w in zip(row, sides, widths)).rstrip() for row in rows]


# ---- for programs ----


def as_object(trial: Trial) -> dict[str, Any]:
    """All of it as plain data; a missing value is null, with its reason."""
    word, sentences = verdict(trial)
    return {
        "reward": trial.reward,
        "data": trial.data,
        "records": trial.records,
        "verdict": word,
        "sentences": sentences,
        "tried": [
            {
                "record": t.prompt.index + 1,
                "prompt": t.prompt.text,
                "completions": {case: _plain(outcome) for case, outcome in t.outcomes.items()},
            }
            for t in trial.tried
        ],
    }


def _plain(outcome: Outcome) -> dict[str, Any]:
    parts = {name: None if np.isnan(value) else value for name, value in outcome.parts.items()}
    return {
        "value": outcome.value,
        "parts": parts,
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": outcome.seconds,
    }
