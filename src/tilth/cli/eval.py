"""How good a model is at a dataset: asked for on the command line, answered as a table or as JSON."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from tilth.cli.reward import own_option
from tilth.config.load import from_dict, load_recipe
from tilth.config.plugins import load_plugins, task_names
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError, RewardError, TilthError
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import PromptSet, load_source
from tilth.flows.evaluate import Evaluation, How, Progress, Sample, check_out, evaluate, write_completions
from tilth.flows.model import LoadedModel, load_model
from tilth.rewards.functions import Reward, check_answers, of_plugins
from tilth.rewards.process_pool import RewardPool
from tilth.rewards.verifiers import verifier_specs
from tilth.rl.passk import Interval
from tilth.rollout.request import SamplingParams
from tilth.runs.files import to_json
from tilth.runs.readers import read_state
from tilth.ui import format

MAX_TOKENS = 512
SHOWN = 2
"""Right and wrong samples that are printed, of each."""
_WIDTH = 300
"""Characters of a text that are printed."""
_EVERY, _EVERY_LINE = 0.5, 30.0
"""Seconds between two updates of the line that says how far it is, and between two lines where no terminal is."""


@dataclass(frozen=True)
class EvalOptions:
    """What is asked for, as on the command line; None and empty: as the run did, or the default."""

    model: str
    data: str = ""
    reward: tuple[str, ...] = ()
    k: str = "1"
    n: int = 0
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    template: str | None = None
    columns: tuple[str, ...] = ()
    limit: int = 0
    seed: int = 0
    max_rows: int = 256
    workers: int = 1
    timeout: float | None = None
    out: Path | None = None
    as_json: bool = False


def judge(wish: EvalOptions) -> None:
    """Evaluate and print the numbers."""
    if wish.out is not None:
        check_out(wish.out)
    loaded = load_model(wish.model)
    how = plan(wish, loaded)
    spec = reward_of(wish, loaded)
    timeout = loaded.settings.get("reward", {}).get("timeout", 10.0) if wish.timeout is None else wish.timeout
    with RewardPool(spec, workers=wish.workers, timeout=timeout, wait=False) as pool:
        prompts = prompts_of(wish, loaded)
        if wish.data not in task_names():
            check_answers(spec, prompts)
        seen = trained_on(wish, loaded, prompts)
        pool.ready()  # so that a reward that cannot be had is told alone
        found = evaluate(loaded, prompts, pool, how, _progress(how.samples))
    if wish.out is not None:
        write_completions(wish.out, found)
    data = wish.data or "what the run held out"
    head = {"model": wish.model, "step": loaded.step, "data": data, "reward": spec, "trained_on": seen}
    summary = {**head, **found.summary()}
    typer.echo(to_json(summary) if wish.as_json else "\n".join([*table(summary), *examples(found)]))


def plan(wish: EvalOptions, loaded: LoadedModel) -> How:
    """Numbers and sampling. Without a word on them: greedy for one sample, temperature 1 for several."""
    k = _whole_numbers(wish.k)
    rollout = loaded.settings.get("rollout", {})
    several = max(wish.n, *k) > 1
    sampling = SamplingParams(
        max_tokens=wish.max_tokens or rollout.get("max_tokens", MAX_TOKENS),
        temperature=float(several) if wish.temperature is None else wish.temperature,
        top_k=wish.top_k,
        top_p=wish.top_p,
        stop=wish.stop or loaded.stop,
    )
    template = loaded.template if wish.template is None else wish.template
    return How(k, wish.n, sampling, template, wish.seed, wish.max_rows)


def _whole_numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise DataError(f"--k {text}: it must be whole numbers of at least 1, as in 1,8", key="--k")
    return tuple(sorted({int(part) for part in parts}))


def reward_of(wish: EvalOptions, loaded: LoadedModel) -> str | Mapping[str, float] | Reward:
    """What judges: as asked, else the task's own, else the run's."""
    if loaded.run is not None:
        load_plugins(loaded.settings.get("plugins", ()))  # which may declare rewards
    if wish.reward:
        return of_plugins(wish.reward[0] if len(wish.reward) == 1 else dict.fromkeys(wish.reward, 1.0))
    if wish.data in task_names():
        return of_plugins(wish.data)
    settings = loaded.settings
    source = settings.get("data", {}).get("source", "")
    found: str | dict[str, float] = settings.get("reward", {}).get("function") or (
        source if source in task_names() else ""
    )
    if not found:
        raise RewardError(
            f"these prompts have no reward; name one: --reward FILE.py:function, or {', '.join(verifier_specs())}",
            key="--reward",
        )
    return of_plugins(found)


def prompts_of(wish: EvalOptions, loaded: LoadedModel) -> PromptSet:
    """The prompts of the data, or those that the run held out; ``limit`` of them, those of least hash."""
    if wish.data:
        with own_option():
            prompts = load_source(_data(wish, loaded.settings.get("data", {})))
    elif loaded.run is not None:
        prompts = _heldout(loaded.run)
    else:
        raise DataError(
            f"{wish.model} is no run, so it has no held-out prompts; name the data: tilth eval MODEL DATA", key="DATA"
        )
    return prompts.subset(wish.limit) if wish.limit else prompts


def trained_on(wish: EvalOptions, loaded: LoadedModel, prompts: PromptSet) -> int | None:
    """How many of these prompts have a text that the run trained on; None: unknown, where its data cannot be read."""
    if loaded.run is None:
        return None
    if not wish.data:
        return 0
    try:
        own = _own(loaded.run)
    except TilthError:  # its files are gone, or its recipe is of another version
        return None
    return None if own is None else prompts.common(own[0])


def _heldout(run: Path) -> PromptSet:
    own = _own(run)
    if own is None:
        raise DataError(
            f"run {run} had other prompts than its recipe's data.source gives now: they came from tilth.train, or "
            "files have changed; name the data: tilth eval MODEL DATA",
            key="data.source",
        )
    return own[1]


def _own(run: Path) -> tuple[PromptSet, PromptSet] | None:
    """What a run trained on and what it held out, by its recipe; None if that is not what it really had."""
    recipe = load_recipe(str(run / "recipe.toml"))
    if recipe.flow == "pretrain" or not recipe.data.source:  # it had documents, not prompts; or no name for them
        return None
    prompts, state = recipe_prompts(recipe), read_state(run)
    train, held = prompts.split(recipe.data.holdout)
    plan = state.get("plan") or {}
    same = (plan.get("train_prompts"), plan.get("heldout_prompts")) == (len(train), len(held))
    same &= state.get("data") in (None, prompts.fingerprint())  # None: a run of before this was kept
    return (train, held) if same else None


def _data(wish: EvalOptions, settings: Mapping[str, Any]) -> DataConfig:
    """DATA as a recipe would have it; its columns and sizes are the run's unless named."""
    columns = dict(settings.get("columns", {}))
    for pair in wish.columns:
        column, equals, name = pair.partition("=")
        if not equals:
            raise DataError(f"--columns {pair}: write which is which, as in prompt=question", key="--columns")
        columns[column] = name
    own = ("options",) if wish.data in (settings.get("source"), settings.get("heldout")) else ()
    sizes = {name: settings[name] for name in ("digits", "length", "flawed", *own) if name in settings}
    return from_dict({"data": {"source": wish.data, "columns": columns, **sizes}}).data


def _amount(prompts: int, samples: int) -> str:
    """What is ahead, in words."""
    return f"{prompts:,} prompts x {samples:,} samples: {prompts * samples:,} completions to generate"


def _progress(samples: int) -> Progress:
    """Says on stderr what is ahead, ``samples`` of each prompt, and then how far it is: a terminal's line is written
    anew, a file or pipe gets a line now and then."""
    every, begin, end = (_EVERY, "\r", "") if sys.stderr.isatty() else (_EVERY_LINE, "", "\n")
    last = [time.monotonic()]

    def show(done: int, of: int) -> None:
        if not done:
            typer.echo(_amount(of // samples, samples), err=True)
            return
        now = time.monotonic()
        if now - last[0] > every or done == of:
            last[0] = now
            sys.stderr.write(f"{begin}{done:,} of {of:,} completions" + ("\n" if done == of else end))
            sys.stderr.flush()

    return show


# ---- in words ----


def table(s: Mapping[str, Any]) -> list[str]:
    """The numbers as people read them."""
    several, sampling = s["samples"] > 1, s["sampling"]
    how = f"temperature {sampling['temperature']:g}" if sampling["temperature"] else "greedy"
    each = f"{s['samples']} samples of each" if several else "one sample of each"
    step = f" (step {s['step']:,})" if s["step"] is not None else ""
    lines = [
        f"{s['model']}{step} on {s['data']}: {s['prompts']:,} prompts, {each}, {how}, seed {s['seed']}",
        "",
        f"{'':<12}{'pass@k':<28}avg@k",
    ]
    for k in s["pass"]:
        mean = _ranged(s["avg"][k], format.number if s["graded"] else format.share)
        lines.append(f"{'k = ' + k:<12}{_ranged(s['pass'][k]):<28}{mean:<28}".rstrip())
    lines += ["", *(f"{name:<12}{_ranged(found, format.number)}" for name, found in s["parts"].items())]
    return [*lines, *_costs(s), "", "In brackets: 95 % intervals over prompts. " + _note(s), *_seen(s), *_missing(s)]


def _costs(s: Mapping[str, Any]) -> list[str]:
    length, seconds = s["length"], s["seconds"]
    cut = f"{format.share(length['cut'])} cut at {s['sampling']['max_tokens']}"
    return [
        f"{'length':<12}mean {length['mean']:.1f}, longest {length['max']} tokens; {cut}",
        f"{'speed':<12}{s['tokens_per_second']:,.0f} tokens/s: {s['tokens']:,} tokens in {seconds['generate']:.1f} s, "
        f"scored in {seconds['score']:.1f} s",
    ]


def _note(s: Mapping[str, Any]) -> str:
    if "correct" in s["parts"]:
        return "pass@k and avg@k are of the part correct."
    return "Right is a reward of at least 1." + (" avg@k is the mean reward." if s["graded"] else "")


def _seen(s: Mapping[str, Any]) -> list[str]:
    if s["trained_on"] is None:
        return ["Whether it was trained on these prompts is unknown."]
    if not s["trained_on"]:
        return []
    return [
        f"{s['trained_on']:,} of these prompts are among those that the run trained on; without DATA it is asked only "
        "what it held out"
    ]


def _missing(s: Mapping[str, Any]) -> list[str]:
    if not s["missing"]:
        return []
    total = s["prompts"] * s["samples"]
    few = [
        f"pass@{k} is over {found['prompts']:,}" for k, found in s["pass"].items() if found["prompts"] < s["prompts"]
    ]
    said = f"{s['missing']:,} of {total:,} rewards are missing ({s['timed_out']} timed out) and count nowhere"
    prompts = f"; of {s['prompts']:,} prompts {', '.join(few)}" if few else ""
    return [f"{said}{prompts}. The first reason: {s['missing_reason']}"]


def _ranged(found: Mapping[str, Any], told: Callable[[float], str] = format.share) -> str:
    value, low, high = (found[name] for name in Interval._fields)
    if math.isnan(value):
        return "–"
    return told(value) + ("" if math.isnan(low) else f"  [{told(low)}, {told(high)}]")


def examples(found: Evaluation) -> list[str]:
    """A few answers that are right and a few that are not, of different prompts."""
    lines = []
    for right, title in ((True, "right"), (False, "wrong")):
        for sample in _first([s for s in found.samples if s.right is right]):
            gold = "" if sample.prompt.answer is None else f"   (answer: {_short(sample.prompt.answer)})"
            lines += ["", f"{title}{gold}", f"  {_short(sample.prompt.text)}", f"  → {_short(sample.said.text)}"]
    return lines


def _first(samples: list[Sample]) -> list[Sample]:
    return list({s.prompt.index: s for s in reversed(samples)}.values())[::-1][:SHOWN]


def _short(text: str) -> str:
    """One printable line: what a model says must not steer the terminal."""
    plain = "".join(c if c.isprintable() else "�" for c in text.replace("\n", "⏎"))
    return plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH // 2]} … {plain[-_WIDTH // 2 :]}"
