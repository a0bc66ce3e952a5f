"""Tilth as a library: ``tilth.train`` and what the command line calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilth.config.load import from_dict
from tilth.config.schema import Recipe
from tilth.core.errors import RewardError

if TYPE_CHECKING:
    from tilth.data.prompts import PromptSet
    from tilth.flows.launch import RunResult
    from tilth.flows.run import Observer

Reward = Callable[[str, str, dict[str, Any]], Any]


def run_recipe(
    recipe: Recipe,
    *,
    name: str,
    observers: Sequence["Observer"] = (),
    prompts: "PromptSet | None" = None,
    reward: Reward | None = None,
) -> "RunResult":
    """Run a recipe to its end, or continue its newest unfinished run.

    prompts and reward replace the recipe's own. Raises TilthError (bad input, a broken invariant) and Interrupted.
    """
    from tilth.roles.reward_pool import RewardPool

    function = reward or recipe.reward.function or _task_reward(recipe)
    with RewardPool(function, workers=recipe.reward.workers, timeout=recipe.reward.timeout, wait=False) as pool:
        # The pool's processes start while torch is being imported here.
        from tilth.data.prompts import load_source
        from tilth.flows.launch import launch

        identity = _identity(reward) if reward else ""
        return launch(recipe, name, prompts or load_source(recipe.data), pool, observers, identity)


def train(
    data: Iterable[Mapping[str, Any] | str],
    reward: Reward,
    *,
    name: str = "train",
    observers: Sequence["Observer"] | None = None,
    keys: Mapping[str, Any] | None = None,
    **settings: Any,
) -> "RunResult":
    """Train a language model by reinforcement learning on prompts and a reward function.

    data: dictionaries with ``prompt`` and, for a warm-up or the reward's use, ``answer`` and whatever else; or texts.
    reward: (prompt, completion, info) -> number, or a dict with "reward"; a lambda or a function of the script works.
    settings: sections of a recipe, e.g. ``model={"path": "..."}``, ``algorithm={"steps": 50}``, ``seed=1``.
    keys: any key by its full name, e.g. ``{"data.holdout": 0.2, "reward.timeout": 5.0}``.
    observers: who watches; default: the terminal.

    The same call (same data, same reward) continues an unfinished run. Returns its directory and summary.
    """
    from tilth.data.prompts import PromptSet

    recipe = from_dict(_with_keys(settings, keys or {}))
    if observers is None:
        from tilth.ui.live import Live

        observers = [Live(recipe)]
    return run_recipe(recipe, name=name, observers=observers, prompts=PromptSet.of(data), reward=reward)


def _with_keys(settings: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in settings.items()}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        if key:
            found.setdefault(section, {})[key] = value
        else:
            found[section] = value
    return found


def _identity(reward: Reward) -> str:
    """What tells a function given by value from another one: its code, as far as Python shows it."""
    code = getattr(reward, "__code__", None)
    if code is None:
        return f"{type(reward).__module__}.{type(reward).__qualname__}"
    constants = [c for c in code.co_consts if not hasattr(c, "co_code")]
    return f"{code.co_name} {code.co_code.hex()} {constants} {code.co_names}"


def _task_reward(recipe: Recipe) -> str:
    from tilth.rl.rewards import BUILTIN

    if recipe.data.source in BUILTIN:
        return recipe.data.source
    from tilth.data.prompts import load_source

    load_source(recipe.data)  # a mistyped source is the error to tell first
    raise RewardError(
        f"data.source={recipe.data.source} has no reward of its own; set reward.function=FILE.py:function"
    )
