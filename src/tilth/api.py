"""Tilth as a library: ``tilth.train`` and what the command line calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from tilth.config.load import from_dict
from tilth.config.schema import Recipe
from tilth.core.errors import RecipeError, RewardError

if TYPE_CHECKING:
    from tilth.data.prompts import PromptSet
    from tilth.flows.build import Material
    from tilth.flows.launch import RunResult
    from tilth.flows.observers import Observer
    from tilth.roles.reward_pool import RewardPool

Reward = Callable[[str, str, dict[str, Any]], Any]
Spec = Reward | str | Mapping[str, float]
"""A reward by value, by name, or several names with their weights."""


def run_recipe(
    recipe: Recipe,
    *,
    name: str,
    observers: Sequence["Observer"] = (),
    prompts: "PromptSet | None" = None,
    reward: Spec | None = None,
    allow: Sequence[str] = (),
    fallback: bool = False,
) -> "RunResult":
    """Run a recipe to its end, or continue its newest unfinished run.

    prompts and reward replace the recipe's own; the trackers of run.track watch too. allow: keys and sections in which
    the run that goes on may have had other values. fallback: where its newest checkpoint is damaged, take the newest
    valid one.

    Raises TilthError (bad input, a broken invariant) and Interrupted.
    """
    from tilth.rl.rewards import files_hash
    from tilth.ui.track import tracking

    function = _reward(recipe, prompts, reward)
    with tracking(recipe) as trackers, _pool(recipe, function) as pool:
        # The pool's processes start while torch is being imported here.
        from tilth.flows.launch import launch

        return launch(
            recipe,
            name,
            _material(recipe, prompts, function),
            pool,
            [*observers, *trackers],
            reward=_identity(reward) if reward else "",
            reward_file=files_hash(function) if function else "",
            allow=allow,
            fallback=fallback,
        )


def _reward(recipe: Recipe, prompts: "PromptSet | None", given: Spec | None) -> Spec | None:
    """What scores; None where nothing is generated: pre-training, and fine-tuning without a reward."""
    if recipe.facts.learns == "documents" or recipe.facts.value:
        return None
    task = "" if prompts is not None or recipe.reward.model else _task(recipe)
    function = given or recipe.reward.function or task
    silent = not recipe.facts.samples or recipe.reward.model
    return function or (None if silent else _no_reward(recipe, prompts))


def _pool(recipe: Recipe, function: Spec | None) -> "AbstractContextManager[RewardPool | None]":
    from tilth.roles.reward_pool import RewardPool

    if function is None:
        return nullcontext()
    here = recipe.cluster.backend == "inline"  # otherwise the worker that scores has a pool of its own
    return RewardPool(function, workers=recipe.reward.workers, timeout=recipe.reward.timeout, wait=False, start=here)


def _material(recipe: Recipe, prompts: "PromptSet | None", function: Spec | None) -> "Material":
    """What is learned from; of prompts with answers that the reward can verify. Raises DataError."""
    from tilth.data.pairs import recipe_prompts
    from tilth.data.prompts import load_texts
    from tilth.flows.build import Texts
    from tilth.rl.rewards import check_answers

    if recipe.facts.learns == "documents":
        return Texts(*load_texts(recipe.data)) if prompts is None else Texts.of(prompts, recipe.data.holdout)
    asked = prompts or recipe_prompts(recipe)
    if function and not (prompts is None and _task(recipe)):  # a task's are right, and a million are slow to check
        check_answers(function, asked)
    return asked


def train(
    data: Iterable[Mapping[str, Any] | str],
    reward: Spec | None = None,
    *,
    name: str = "train",
    observers: Sequence["Observer"] | None = None,
    keys: Mapping[str, Any] | None = None,
    **settings: Any,
) -> "RunResult":
    """Train a language model by reinforcement learning on prompts and a reward function.

    data: dictionaries (a list, any iterable) with ``prompt`` and, for a warm-up or the reward's use, ``answer`` and
        whatever else (of other names: ``keys={"data.columns": {"prompt": "question"}}``); or texts.
    reward: (prompt, completion, info) -> number, or a dict with "reward"; a lambda or a function of the script works.
        Or what ``reward.function`` of a recipe may be: ``"gsm8k"``, ``{"exact": 1.0, "style.py:brevity": 0.1}``; or
        nothing where ``flow`` is "sft" or "pretrain".
    settings: sections of a recipe, e.g. ``model={"path": "..."}``, ``algorithm={"steps": 50}``, ``seed=1``.
    keys: any key by its full name, e.g. ``{"data.heldout": "test.jsonl", "reward.timeout": 5.0}``; not data.source.
    observers: who watches; default: the terminal.

    The same call (same data, same reward) continues an unfinished run. Returns its directory and summary.
    """
    wanted = _with_keys(settings, keys or {})
    if "source" in wanted.get("data", {}):
        raise RecipeError("data.source has no place beside the records that tilth.train is given as data; leave it out")
    recipe = from_dict(wanted)
    if observers is None:
        from tilth.ui.live import Live

        observers = [Live(recipe)]
    return run_recipe(recipe, name=name, observers=observers, prompts=_given(data, recipe), reward=reward)


def _given(data: Iterable[Mapping[str, Any] | str], recipe: Recipe) -> "PromptSet":
    """The caller's records, with those of ``data.heldout`` after them. Raises DataError."""
    from tilth.data.pairs import JoinedPairs, pair_records, recipe_prompts
    from tilth.data.prompts import PromptSet
    from tilth.data.sources import Joined, from_records

    pairs = recipe.facts.learns == "pairs"
    source = pair_records(data, recipe.data.columns) if pairs else from_records(data, recipe.data.columns)
    if not recipe.data.heldout:
        return PromptSet(source)
    held = recipe.data.model_copy(update={"source": recipe.data.heldout, "heldout": ""})
    theirs = recipe_prompts(recipe.model_copy(update={"data": held})).source
    return PromptSet((JoinedPairs if pairs else Joined)(source, theirs))


def _with_keys(settings: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in settings.items()}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        if key:
            found.setdefault(section, {})[key] = value
        else:
            found[section] = value
    return found


def _identity(value: Any) -> str:
    """What tells a function given by value from another one, the same in every process.

    Its code, constants, defaults and what it closes over; of any other object its plain value, or else its type.
    """
    if isinstance(value, CodeType):
        return f"code({value.co_code.hex()} {_identity(value.co_consts)} {value.co_names})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_identity, value)))}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_identity, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_identity(k)}: {_identity(v)}' for k, v in value.items())}}}"
    if isinstance(value, FunctionType):
        closed = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return f"def({_identity((value.__code__, value.__defaults__, value.__kwdefaults__, closed))})"
    if value is None or isinstance(value, (int, float, complex, str, bytes, bool)):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}({_identity(getattr(value, '__dict__', None))})"


def _task(recipe: Recipe) -> str:
    """The verifier of a task that is trained on, which has its name; empty for other data."""
    from tilth.rl.verifiers import TASKS

    return recipe.data.source if recipe.data.source in TASKS else ""


def _no_reward(recipe: Recipe, prompts: "PromptSet | None") -> NoReturn:
    from tilth.data.prompts import load_source
    from tilth.rl.verifiers import SPECS

    if prompts is None:
        load_source(recipe.data)  # a mistyped source is the error to tell first
    what = "the data" if prompts is not None else f"data.source={recipe.data.source}"
    raise RewardError(
        f"{what} has no reward of its own; set reward.function to FILE.py:function or one of {', '.join(SPECS)}"
    )
