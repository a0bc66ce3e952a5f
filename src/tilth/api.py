"""Tilth as a library: ``tilth.train``, and ``run_recipe`` for the command line."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilth.config.imports import uncollected
from tilth.config.load import check_allowed, from_dict
from tilth.config.plugins import absolute, forget
from tilth.config.roles import roles_of
from tilth.config.schema import Recipe
from tilth.core.errors import ModelError, RecipeError

if TYPE_CHECKING:
    from tilth.data.given import Given
    from tilth.data.prompts import Key, RecordsByValue
    from tilth.flows.callbacks import Callback
    from tilth.launch.build import Dataset
    from tilth.launch.supervisor import Inherited
    from tilth.rewards.process_pool import RewardPool
    from tilth.ui.result import RunResult

Reward = Callable[[str, str, dict[str, Any]], Any]
Spec = Reward | str | Mapping[str, float]
"""A reward function, its name, or several names with weights."""


def run_recipe(
    recipe: Recipe,
    *,
    name: str,
    callbacks: Sequence["Callback"] = (),
    prompts: "Dataset | None" = None,
    reward: Spec | None = None,
    allow: Sequence[str] = (),
    fallback: bool = False,
    handed: "Inherited | None" = None,
    replay: Path | None = None,
) -> "RunResult":
    """Run a recipe to its end, or resume its newest unfinished run, and write ``report.html``.

    prompts and reward replace the recipe's own; callbacks of plugins and trackers of run.track are added. allow: keys
    and sections whose values may have changed. fallback: resume from the newest valid checkpoint if the newest one is
    damaged. handed: what a supervisor hands to this process. replay: an asynchronous run to repeat. Raises TilthError
    (bad input, a broken invariant) and Interrupted.
    """
    from tilth.analysis.slow_rank import SlowRankWatch
    from tilth.data.prompts import PromptSet, with_holdout
    from tilth.flows.callbacks import checked
    from tilth.launch.rewards import chosen_reward
    from tilth.rewards.fingerprint import fingerprint
    from tilth.runs.readers import read_state
    from tilth.runs.signals import HeldSignals
    from tilth.ui.track import tracking

    callbacks = checked(callbacks, recipe.plugins)
    function = chosen_reward(recipe, prompts, reward)
    _check_places(recipe, function)
    if replay is not None:
        read_state(replay)
    with HeldSignals() as held:
        with tracking(recipe) as trackers, _pool(recipe, function) as pool:
            # mistakes in the data and the reward are found without torch, whose import takes seconds
            material, digest = _material(recipe, prompts, function), fingerprint(function) if function else ""
            if isinstance(material, PromptSet):
                recipe = with_holdout(recipe, material)
            with uncollected():  # the pool's processes start while this one imports torch
                from tilth.launch.life import launch

            directory, summary = launch(
                recipe,
                name,
                material,
                pool,
                [*callbacks, *trackers, SlowRankWatch()],
                reward=digest,
                allow=allow,
                fallback=fallback,
                handed=handed,
                replay=replay,
                finished=held.begin,
            )
        from tilth.ui.report import write_report
        from tilth.ui.result import RunResult

        write_report(directory)
    return RunResult(directory, summary)


def check_models(recipe: Recipe) -> None:
    """Raise ModelError for a model that is nowhere, or an adapter of another kind; read none of them."""
    from tilth.models.adapter_config import read_lora
    from tilth.models.hub import check_place

    loaded = {key: path for spec in roles_of(recipe).values() for key, path in spec.paths(recipe).items()}
    paths = {"model.path": recipe.model.path, **loaded, "model.adapter": recipe.model.adapter}
    for key, path in paths.items():
        try:
            if path and key == "model.adapter":
                read_lora(Path(path))
            elif path:
                check_place(path)
        except ModelError as error:
            raise ModelError(f"{key}: {error}", key=key) from None


def _check_places(recipe: Recipe, function: Spec | None) -> None:
    """Raise an error for places and names that are not there, or an adapter of another kind; import none of them."""
    from tilth.envs.process import check_place as check_environment
    from tilth.rewards.functions import check_place as check_reward

    check_models(recipe)
    for spec in [function] if isinstance(function, str) else function if isinstance(function, Mapping) else ():
        check_reward(spec)
    if environment := recipe.rollout.environment:
        check_environment(environment)


def _pool(recipe: Recipe, function: Spec | None) -> "AbstractContextManager[RewardPool | None]":
    from tilth.rewards.process_pool import RewardPool

    if function is None:
        return nullcontext()
    here = recipe.cluster.backend == "inline"  # otherwise the reward role's worker starts the pool
    how = recipe.reward
    return RewardPool(function, workers=how.workers, timeout=how.timeout, quiet=True, wait=False, start=here)


def _material(recipe: Recipe, prompts: "Dataset | None", function: Spec | None) -> "Dataset":
    """Return the training data; DataError for answers that the reward cannot verify."""
    from tilth.data.pairs import recipe_prompts
    from tilth.data.prompts import PromptSet
    from tilth.launch.rewards import task_name
    from tilth.rewards.functions import check_answers

    if prompts is not None and not isinstance(prompts, PromptSet):
        return prompts
    asked = prompts or recipe_prompts(recipe)
    if recipe.flow_spec.learns == "documents":
        from tilth.launch.build import PretrainTexts

        return PretrainTexts.of(asked, recipe.data.holdout)
    if function and not (prompts is None and task_name(recipe)):  # a task's answers are valid, and slow to check
        check_answers(function, asked)
    return asked


def train(
    data: "Given | os.PathLike[str]",
    reward: Spec | None = None,
    *,
    heldout: "Given | os.PathLike[str] | None" = None,
    name: str = "train",
    callbacks: Sequence["Callback"] = (),
    live: bool = True,
    keys: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    **settings: Any,
) -> "RunResult":
    """Train a language model by reinforcement learning on prompts and a reward function.

    data: records with ``prompt`` and optionally ``answer`` and further columns (for other names,
        ``keys={"data.columns": {"prompt": "question"}}``): a list or an iterator of dictionaries, a DataFrame of pandas
        or polars, an Arrow table, a ``datasets.Dataset``; or texts; or, as ``data.source``, the name of a file (JSONL,
        CSV, Parquet, ...), a folder or a task. An iterator is read once, to its end.
    reward: (prompt, completion, info) -> number, or a dict with "reward"; or any value of ``reward.function``:
        ``"gsm8k"``, ``{"exact": 1.0, "style.py:brevity": 0.1}``. Not needed if ``flow`` is "sft" or "pretrain", or
        ``data`` is a task.
    heldout: data to evaluate on, of the same kinds as data; default: a share of data (``data.holdout``).
    settings: sections of a recipe, e.g. ``model={"path": "..."}``, ``algorithm={"steps": 50}``, ``seed=1``.
    keys: any key by its full name, e.g. ``{"data.template": "chatml", "reward.timeout": 5.0}``; not data.source.
    allow: keys and sections whose values may have changed in a resumed run, as ``--allow``; "data" too.
    callbacks: instances of ``tilth.Callback``. live: show the run in the terminal.

    The same call with the same data and reward resumes an unfinished run. Return the directory and the summary.
    """
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    check_allowed(allow)
    if not name or "/" in name or name in (".", ".."):
        raise RecipeError(f"name = {name!r} is not the name of a folder; use for example 'train'", key="name")
    wanted, brought = _sources(_with_keys(settings, keys or {}), data, heldout)
    if isinstance(plugins := wanted.get("plugins", ()), Sequence):
        forget(absolute([str(name) for name in plugins]))
    recipe = from_dict(wanted)
    prompts = _given(recipe, brought) if brought else None
    from tilth.ui.live import Live

    view = [Live(recipe)] if live else []
    if not isinstance(callbacks, Sequence):
        raise RecipeError(f"callbacks is {callbacks!r}, not a list; give [{callbacks!r}]", key="callbacks")
    given = [*view, *callbacks]
    try:
        for shown in view:
            shown.start()
        result = run_recipe(recipe, name=name, callbacks=given, prompts=prompts, reward=reward, allow=allow)
        for shown in view:
            shown.on_message(f"report: {result.report}")
        return result
    finally:
        for shown in view:
            shown.stop()


def _sources(wanted: dict[str, Any], data: Any, heldout: Any) -> tuple[dict[str, Any], "RecordsByValue"]:
    """Return the recipe with names of files and tasks, and the records that have no name."""
    from tilth.data.given import file_name

    section = dict(wanted.get("data", {}))
    if "source" in section:
        raise RecipeError(
            "data.source conflicts with the data that tilth.train is given; leave it out", key="data.source"
        )
    if section.get("mixture"):
        message = "data.mixture conflicts with the data that tilth.train is given; run a recipe, or leave it out"
        raise RecipeError(message, key="data.mixture")
    if heldout is not None and section.get("heldout"):
        raise RecipeError(
            f"data.heldout = {section['heldout']} conflicts with heldout; give one of them", key="data.heldout"
        )
    brought: dict[Key, Given] = {}
    places: tuple[tuple[Key, Any], ...] = (("source", data), ("heldout", heldout))
    for key, value in places:
        if (named := file_name(value)) is not None:
            section[key] = named
        elif key == "source" or value is not None:
            brought[key] = value
    # A run's recipe does not name data that it cannot read again, nor the default task.
    section.setdefault("source", "")
    if "heldout" in brought:
        section.pop("holdout", None)
    return wanted | {"data": section}, brought


def _given(recipe: Recipe, brought: "RecordsByValue") -> "Dataset":
    """Return the caller's records with the data that the recipe names. Raises DataError."""
    from tilth.data.pairs import recipe_prompts

    found = recipe_prompts(recipe, brought)
    if recipe.flow_spec.learns != "documents":
        return found
    from tilth.launch.build import PretrainTexts

    return PretrainTexts.of(found, recipe.data.holdout)


def _with_keys(settings: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in settings.items()}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        if key:
            found.setdefault(section, {})[key] = value
        else:
            found[section] = value
    return found
