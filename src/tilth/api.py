"""Tilth as a library: ``tilth.train`` and what the command line calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType
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
    reward: Reward | str | Mapping[str, float] | None = None,
) -> "RunResult":
    """Run a recipe to its end, or continue its newest unfinished run.

    prompts and reward replace the recipe's own. Raises TilthError (bad input, a broken invariant) and Interrupted.
    """
    from tilth.rl.rewards import check_answers, files_hash
    from tilth.rl.verifiers import TASKS
    from tilth.roles.reward_pool import RewardPool

    function = reward or recipe.reward.function or _task_reward(recipe)
    with RewardPool(function, workers=recipe.reward.workers, timeout=recipe.reward.timeout, wait=False) as pool:
        # The pool's processes start while torch is being imported here.
        from tilth.data.prompts import load_source
        from tilth.flows.launch import launch

        asked = prompts or load_source(recipe.data)
        if prompts or recipe.data.source not in TASKS:  # a task's answers are right, and a million are slow to check
            check_answers(function, asked)
        return launch(
            recipe,
            name,
            asked,
            pool,
            observers,
            reward=_identity(reward) if reward else "",
            reward_file=files_hash(function),
        )


def train(
    data: Iterable[Mapping[str, Any] | str],
    reward: Reward | str | Mapping[str, float],
    *,
    name: str = "train",
    observers: Sequence["Observer"] | None = None,
    keys: Mapping[str, Any] | None = None,
    **settings: Any,
) -> "RunResult":
    """Train a language model by reinforcement learning on prompts and a reward function.

    data: dictionaries with ``prompt`` and, for a warm-up or the reward's use, ``answer`` and whatever else; or texts.
    reward: (prompt, completion, info) -> number, or a dict with "reward"; a lambda or a function of the script works.
        Or what ``reward.function`` of a recipe may be: ``"gsm8k"``, ``{"exact": 1.0, "style.py:brevity": 0.1}``.
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


def _task_reward(recipe: Recipe) -> str:
    from tilth.rl.verifiers import SPECS, TASKS

    if recipe.data.source in TASKS:
        return recipe.data.source
    from tilth.data.prompts import load_source

    load_source(recipe.data)  # a mistyped source is the error to tell first
    raise RewardError(
        f"data.source={recipe.data.source} has no reward of its own; set reward.function to FILE.py:function "
        f"or one of {', '.join(SPECS)}"
    )
