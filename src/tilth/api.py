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

        return launch(recipe, name, prompts or load_source(recipe.data), pool, observers)


def train(
    data: Iterable[Mapping[str, Any] | str],
    reward: Reward,
    *,
    name: str = "train",
    observers: Sequence["Observer"] | None = None,
    **settings: Any,
) -> "RunResult":
    """Train a language model by reinforcement learning on prompts and a reward function.

    data: dictionaries with ``prompt`` and, for a warm-up or the reward's use, ``answer`` and whatever else; or texts.
    reward: (prompt, completion, info) -> number, or a dict with "reward"; a lambda or a function of the script works.
    settings: sections of a recipe, e.g. ``model={"path": "..."}``, ``algorithm={"steps": 50}``, ``seed=1``.
    observers: who watches; default: the terminal.

    The same call continues an unfinished run. Returns its directory and summary.
    """
    from tilth.data.prompts import PromptSet

    recipe = from_dict(settings)
    if observers is None:
        from tilth.ui.live import Live

        observers = [Live(recipe)]
    return run_recipe(recipe, name=name, observers=observers, prompts=PromptSet.of(data), reward=reward)


def _task_reward(recipe: Recipe) -> str:
    from tilth.rl.rewards import BUILTIN

    if recipe.data.source in BUILTIN:
        return recipe.data.source
    from tilth.data.prompts import load_source

    load_source(recipe.data)  # a mistyped source is the error to tell first
    raise RewardError(
        f"data.source={recipe.data.source} has no reward of its own; set reward.function=FILE.py:function"
    )
