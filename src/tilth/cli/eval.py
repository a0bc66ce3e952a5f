"""``tilth eval``: evaluate a model on a dataset; print a table or JSON."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from tilth.cli.main import EvalCommand
from tilth.cli.reward import columns_of, own_option
from tilth.config.load import from_dict
from tilth.config.plugins import task_names
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError, RewardError, TilthError
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import PromptSet, load_source
from tilth.engines.request import SamplingParams
from tilth.envs.pool import EnvironmentPool
from tilth.launch.evaluate import (
    EvalSettings,
    Evaluation,
    Progress,
    check_out,
    evaluate,
    evaluate_episodes,
    write_completions,
)
from tilth.rewards.functions import Reward, check_answers, of_plugins
from tilth.rewards.process_pool import RewardPool
from tilth.rewards.verifiers import verifier_specs
from tilth.rl.passk import Interval
from tilth.runs.files import to_json
from tilth.runs.models import LoadedModel, load_model
from tilth.runs.readers import read_state
from tilth.runs.trust import load_code, load_recipe_of
from tilth.ui import format

MAX_TOKENS = 512
SHOWN = 2  # number of right and of wrong samples that are printed
_WIDTH = 300  # most characters of a printed text
_EVERY, _EVERY_LINE = 0.5, 30.0
"""Seconds between two updates of the progress line on a terminal, and between two lines elsewhere."""


def judge(options: EvalCommand) -> None:
    """Evaluate and print the numbers."""
    if options.out is not None:
        check_out(options.out)
    loaded = load_model(options.model)
    how = plan(options, loaded)
    if environment_of(options, loaded):
        _tell(options, loaded, *_episodes(options, loaded, how))
        return
    spec = reward_of(options, loaded)
    timeout = loaded.settings.get("reward", {}).get("timeout", 10.0) if options.timeout is None else options.timeout
    with RewardPool(spec, workers=options.workers, timeout=timeout, wait=False, quiet=True) as pool:
        prompts = prompts_of(options, loaded)
        if options.data not in task_names():
            check_answers(spec, prompts)
        seen = trained_on(options, loaded, prompts)
        pool.ready()  # so that an error of the reward comes first
        found = evaluate(loaded, prompts, pool, how, _progress(how.samples))
    _tell(options, loaded, found, spec, seen)


def _episodes(options: EvalCommand, loaded: LoadedModel, how: EvalSettings) -> tuple[Evaluation, str, int | None]:
    """Play episodes of the run's environment; return the evaluation, what gave the rewards, and ``trained_on``."""
    rollout, spec = loaded.settings["rollout"], environment_of(options, loaded)
    load_code(loaded.run, loaded.settings)  # a plugin may declare the task
    prompts = prompts_of(options, loaded)
    seen = trained_on(options, loaded, prompts)
    plugins = loaded.settings.get("plugins", ())
    seconds = rollout["turn_seconds"] if options.timeout is None else options.timeout
    pool = EnvironmentPool(spec, workers=options.workers, timeout=seconds, plugins=plugins)
    try:
        return evaluate_episodes(loaded, prompts, pool, how, rollout["turns"], _progress(how.samples)), spec, seen
    finally:
        pool.close()


def environment_of(options: EvalCommand, loaded: LoadedModel) -> str:
    """Return the run's environment, which gives the rewards unless ``--reward`` names one; "": none."""
    found: str = loaded.settings.get("rollout", {}).get("environment", "")
    return "" if options.reward else found


def _tell(
    options: EvalCommand,
    loaded: LoadedModel,
    found: Evaluation,
    spec: str | Mapping[str, float] | Reward,
    seen: int | None,
) -> None:
    if options.out is not None:
        write_completions(options.out, found)
    data = options.data or "what the run held out"
    head = {"model": options.model, "step": loaded.step, "data": data, "reward": spec, "trained_on": seen}
    summary = {**head, **found.summary()}
    typer.echo(to_json(summary) if options.as_json else "\n".join([*table(summary), *examples(found)]))


def plan(options: EvalCommand, loaded: LoadedModel) -> EvalSettings:
    """Resolve numbers and sampling. Default temperature: greedy for one sample, 1 for several."""
    parts = [part.strip() for part in options.k.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise DataError(f"--k {options.k}: it must be whole numbers of at least 1, as in 1,8", key="--k")
    k = tuple(sorted({int(part) for part in parts}))
    rollout = loaded.settings.get("rollout", {})
    several = max(options.n, *k) > 1
    sampling = SamplingParams(
        max_tokens=options.max_tokens or rollout.get("max_tokens", MAX_TOKENS),
        temperature=float(several) if options.temperature is None else options.temperature,
        top_k=options.top_k, top_p=options.top_p, stop=tuple(options.stop or ()) or loaded.stop,
    )  # fmt: skip
    template = loaded.template if options.template is None else options.template
    return EvalSettings(k, options.n, sampling, template, options.seed, options.max_rows)


def reward_of(options: EvalCommand, loaded: LoadedModel) -> str | Mapping[str, float] | Reward:
    """Return the reward: the given one, else the task's, else the run's."""
    load_code(loaded.run, loaded.settings)  # a plugin may declare rewards
    if options.reward:
        return of_plugins(options.reward[0] if len(options.reward) == 1 else dict.fromkeys(options.reward, 1.0))
    if options.data in task_names():
        return of_plugins(options.data)
    settings = loaded.settings
    source = settings.get("data", {}).get("source", "")
    default = source if source in task_names() else ""
    found: str | dict[str, float] = settings.get("reward", {}).get("function") or default
    if not found:
        known = ", ".join(verifier_specs())
        message = f"{options.data or options.model} has no reward of its own; name one: --reward FILE.py:function"
        raise RewardError(f"{message}, or {known}", key="--reward")
    return of_plugins(found)


def prompts_of(options: EvalCommand, loaded: LoadedModel) -> PromptSet:
    """Return the prompts of the data, or the run's held-out ones; at most ``limit``, those of least hash."""
    if options.data:
        with own_option():
            prompts = load_source(_data(options, loaded.settings.get("data", {})))
    elif loaded.run is not None:
        own = _own(loaded.run)
        if own is None:
            raise DataError(
                f"run {loaded.run} had other prompts than its recipe's data.source gives now: they came from "
                "tilth.train, or files have changed; name the data: tilth eval MODEL DATA",
                key="data.source",
            )
        prompts = own[1]
    else:
        raise DataError(
            f"{options.model} is no run, so it has no held-out prompts; name the data: tilth eval MODEL DATA",
            key="DATA",
        )
    return prompts.subset(options.limit) if options.limit else prompts


def trained_on(options: EvalCommand, loaded: LoadedModel, prompts: PromptSet) -> int | None:
    """Count the prompts whose text the run trained on; None: unknown, its data cannot be read."""
    if loaded.run is None:
        return None
    if not options.data:
        return 0
    try:
        own = _own(loaded.run)
    except TilthError:  # its files are gone, or its recipe is of another version
        return None
    return None if own is None else prompts.common(own[0])


def _own(run: Path) -> tuple[PromptSet, PromptSet] | None:
    """Return a run's training and held-out prompts by its recipe; None if its data has changed since."""
    recipe = load_recipe_of(run)
    if recipe.flow == "pretrain" or not all(
        part.source for part in recipe.data.sources
    ):  # documents, or data without a name
        return None
    prompts, state = recipe_prompts(recipe), read_state(run)
    train, held = prompts.split(recipe.data.holdout)
    plan = state.get("plan") or {}
    same = (plan.get("train_prompts"), plan.get("heldout_prompts")) == (len(train), len(held))
    same &= state.get("data") in (None, prompts.fingerprint())  # None: a run of before this was kept
    return (train, held) if same else None


def _data(options: EvalCommand, settings: Mapping[str, Any]) -> DataConfig:
    """Return DATA as a recipe has it, with the run's columns and sizes as defaults."""
    columns = settings.get("columns", {}) | columns_of(options.columns or ())
    own = ("options",) if options.data in (settings.get("source"), settings.get("heldout")) else ()
    sizes = {name: settings[name] for name in ("digits", "length", "flawed", *own) if name in settings}
    return from_dict({"data": {"source": options.data, "columns": columns, **sizes}}).data


def _progress(samples: int) -> Progress:
    """Report on stderr what is ahead, ``samples`` of each prompt, then how many are done: in one line that a terminal
    overwrites, elsewhere in a line now and then."""
    every, begin, end = (_EVERY, "\r", "") if sys.stderr.isatty() else (_EVERY_LINE, "", "\n")
    last = [time.monotonic()]

    def show(done: int, of: int) -> None:
        now = time.monotonic()
        if not done:
            typer.echo(f"{of // samples:,} prompts x {samples:,} samples: {of:,} completions to generate", err=True)
        elif now - last[0] > every or done == of:
            last[0] = now
            sys.stderr.write(f"{begin}{done:,} of {of:,} completions" + ("\n" if done == of else end))
            sys.stderr.flush()

    return show


# ---- printing ----


def table(s: Mapping[str, Any]) -> list[str]:
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
    return [*lines, *_costs(s), "", *_notes(s)]


def _costs(s: Mapping[str, Any]) -> list[str]:
    length, seconds = s["length"], s["seconds"]
    cut = f"{format.share(length['cut'])} cut at {s['sampling']['max_tokens']}"
    return [
        f"{'length':<12}mean {length['mean']:.1f}, longest {length['max']} tokens; {cut}",
        f"{'speed':<12}{s['tokens_per_second']:,.0f} tokens/s: {s['tokens']:,} tokens in {seconds['generate']:.1f} s, "
        f"scored in {seconds['score']:.1f} s",
    ]


def _notes(s: Mapping[str, Any]) -> list[str]:
    right = "Right is a reward of at least 1." + (" avg@k is the mean reward." if s["graded"] else "")
    note = "pass@k and avg@k are of the part correct." if "correct" in s["parts"] else right
    lines = ["In brackets: 95 % intervals over prompts. " + note]
    if s["trained_on"] is None:
        lines.append("Whether it was trained on these prompts is unknown.")
    elif s["trained_on"]:
        lines.append(
            f"{s['trained_on']:,} of these prompts are among those that the run trained on; without DATA only held-out "
            "prompts are used"
        )
    if s["missing"]:
        few = [f"pass@{k} is over {one['prompts']:,}" for k, one in s["pass"].items() if one["prompts"] < s["prompts"]]
        prompts = f"; of {s['prompts']:,} prompts {', '.join(few)}" if few else ""
        total = s["prompts"] * s["samples"]
        missing = f"{s['missing']:,} of {total:,} rewards are missing ({s['timed_out']} timed out) and count nowhere"
        lines.append(f"{missing}{prompts}. The first reason: {s['missing_reason']}")
    return lines


def _ranged(found: Mapping[str, Any], form: Callable[[float], str] = format.share) -> str:
    value, low, high = (found[name] for name in Interval._fields)
    if math.isnan(value):
        return "–"
    return form(value) + ("" if math.isnan(low) else f"  [{form(low)}, {form(high)}]")


def examples(found: Evaluation) -> list[str]:
    """Return a few right and a few wrong answers, of different prompts, as lines."""
    lines = []
    for right, title in ((True, "right"), (False, "wrong")):
        by_prompt = {s.prompt.index: s for s in reversed(found.samples) if s.right is right}
        for sample in list(by_prompt.values())[::-1][:SHOWN]:
            gold = "" if sample.prompt.answer is None else f"   (answer: {_short(sample.prompt.answer)})"
            lines += ["", f"{title}{gold}", f"  {_short(sample.prompt.text)}", f"  → {_short(sample.trajectory.text)}"]
    return lines


def _short(text: str) -> str:
    """Return one printable line: a model's text must not control the terminal."""
    plain = format.plain(text, "⏎").replace("\t", " ")
    return plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH // 2]} … {plain[-_WIDTH // 2 :]}"
