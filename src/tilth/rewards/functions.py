"""Reward functions: where they come from and what they may return. Imports no torch.

A reward is a plain callable ``(prompt: str, completion: str, info: dict) -> float | dict``. A dict has the key
``reward`` and any other named numbers, which are kept as its parts. A result that is no finite number, or one that
fp32 cannot work with (``LARGEST``), makes the reward missing, with a reason; it is never 0.
"""

import difflib
import importlib
import inspect
import math
import numbers
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from tilth.config.plugins import Declaration, declared, describe, import_file, is_missing
from tilth.config.tasks import task_of
from tilth.core.errors import DataError, PluginError, RewardError
from tilth.rewards.verifiers import builtin, verifier_names, verifier_specs

__all__ = ["Reward", "Score", "Weighted", "check_answers", "describe", "is_importable"]
__all__ += ["load_reward", "member_names", "normalise"]

LARGEST = 1e18
"""Greatest absolute value of a reward. Columns of rows are fp32; differences of rewards, their squares in a value loss
and sums of some hundred of these stay finite there."""

Reward = Callable[[str, str, dict[str, Any]], Any]
"""(prompt, completion, info) -> float or dict; ``info`` is what the data says of the prompt, ``answer`` among it."""


class Score(NamedTuple):
    """A normalised result. ``value`` None: missing, and ``reason`` says why."""

    value: float | None
    parts: dict[str, float]
    reason: str


class PromptLike(Protocol):
    """What is asked of a prompt here: its place in the data, its text, and what else the data says of it."""

    @property
    def index(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def info(self) -> dict[str, Any]: ...


class Weighted:
    """The weighted sum of several rewards, each kept as a part by its name; missing if any of them is.

    A member's own parts keep their names where nothing else has them, and are ``name/part`` otherwise: so ``correct``
    of the only member that says it stays ``correct``. A member that is right or wrong by nature (``addition``,
    ``exact``) says it by its value.
    """

    entered: Callable[[int], object] = staticmethod(lambda place: None)
    """Called with the place of a member before it is, so that the pool knows which one hangs."""

    def __init__(self, spec: Mapping[str, float]) -> None:
        if not spec:
            raise RewardError(
                "the table of rewards is empty; give at least one with its weight, as in {gsm8k = 1.0}",
                key="reward.function",
            )
        for name, weight in spec.items():
            if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
                message = f"the weight of reward {name!r} is {weight!r}, not a finite number"
                raise RewardError(message, key=f"reward.function.{name}")
        self.members = [(name, load_reward(s), float(w)) for name, (s, w) in zip(member_names(spec), spec.items())]

    def __call__(self, prompt: str, completion: str, info: dict[str, Any]) -> Score:
        scores: dict[str, Score] = {}
        for place, (name, function, _) in enumerate(self.members):
            self.entered(place)
            score = self._score(name, function, prompt, completion, info)
            if score.value is None:
                return Score(None, {}, f"{name}: {score.reason}")
            scores[name] = score
        total = sum(weight * (scores[name].value or 0.0) for name, _, weight in self.members)
        if wrong := _unusable(total):
            return Score(None, {}, f"the weighted sum is {wrong}")
        return Score(total, _join(scores), "")

    @staticmethod
    def _score(name: str, function: Reward, prompt: str, completion: str, info: dict[str, Any]) -> Score:
        try:
            result = function(prompt, completion, info)
        except BaseException as error:
            error.add_note(f"in reward {name}")  # which ``describe`` says
            raise
        score = normalise(result)
        decides = getattr(function, "decides", False) and score.value is not None and not score.parts
        return score._replace(parts={"correct": score.value}) if decides and score.value is not None else score

    def check(self, info: Mapping[str, Any]) -> str:
        """The first member's complaint about the given answer (see ``verifiers``)."""
        for name, function, _ in self.members:
            check = getattr(function, "check", None)
            if check is not None and (wrong := check(info)):
                return f"{name}: {wrong}"
        return ""


def short_names(specs: Sequence[str]) -> list[str]:
    """Names of parts: a built-in's or a function's own, the whole specification where two would be the same."""
    short = [spec.partition(":")[0] if builtin(spec) else spec.rpartition(":")[2] for spec in specs]
    return [spec if short.count(name) > 1 else name for spec, name in zip(specs, short)]


def member_names(spec: str | Mapping[str, float] | Reward) -> list[str]:
    """What the members of several rewards are called; none for a single one."""
    if isinstance(spec, Weighted):
        return [name for name, _, _ in spec.members]
    return short_names(list(spec)) if isinstance(spec, Mapping) else []


def _join(scores: Mapping[str, Score]) -> dict[str, float]:
    """Values of the members and their own parts, each under a name that nothing else has."""
    said = Counter([*scores, *(part for score in scores.values() for part in score.parts)])
    joined = {name: score.value for name, score in scores.items() if score.value is not None}
    for name, score in scores.items():
        joined |= {part if said[part] == 1 else f"{name}/{part}": value for part, value in score.parts.items()}
    return joined


def load_reward(spec: str | Mapping[str, float] | Reward) -> Reward:
    """The function that a recipe or a user names.

    spec: a callable; a built-in verifier (``addition``, ``gsm8k``, ``regex:PATTERN``, see ``verifiers.builtin``);
    ``module:function``; ``path/to/file.py:function``; or several of these names with their weights.
    Raises RewardError in one line: no such file, module or function (with what there is, or the nearest), a file that
    fails when imported, something that cannot be called with (prompt, completion, info).
    """
    if isinstance(spec, Mapping):
        return Weighted(spec)
    if callable(spec):
        return _checked(spec, getattr(spec, "__name__", type(spec).__name__))
    verifier = builtin(spec)
    if verifier is not None:
        return verifier
    where, _, name = spec.rpartition(":")
    if not where or not name or where in verifier_names():
        raise RewardError(f"reward {spec!r}: {_what_there_is(spec)}", key=_key(spec))
    module = _load_file(Path(where), spec) if where.endswith(".py") else _load_module(where, spec)
    if (by_name := _brought().get(name)) and by_name.value.__module__ == module.__name__:
        return _checked(_value(by_name), spec)
    found: Any = module
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            message = f"reward {spec!r}: {where} has no {name!r}{_nearest(name, _functions(module))}"
            raise RewardError(message, key=_key(spec))
        found = getattr(found, attribute)
    return _checked(found, spec)


def _brought() -> dict[str, Declaration]:
    """Rewards of plugins by name, those of their tasks too. Raises RewardError for one of the name of a verifier."""
    for name, found in declared("task").items():
        if builtin(name) is not None:
            message = f"{found.title}: a verifier that comes with Tilth has this name; choose another one"
            raise RewardError(message, key=f"task.{name}")
    return {**declared("reward"), **declared("task")}


def _value(declaration: Declaration) -> Reward:
    return task_of(declaration.name).reward if declaration.kind == "task" else declaration.value


def of_plugins(spec: str | Mapping[str, float] | Reward) -> str | Mapping[str, float] | Reward:
    """Names that plugins declare as specifications that any process can load: ``brevity`` -> ``/path/mine.py:brevity``.

    A single one that is declared in a script or a notebook is given by value, since no other process can import it.
    Raises RewardError: a name that nothing has.
    """
    known = {name: found for name, found in _brought().items() if builtin(name) is None}
    for name in [spec] if isinstance(spec, str) and spec else spec if isinstance(spec, Mapping) else ():
        if name not in known and ":" not in name and builtin(name) is None:
            raise RewardError(f"reward {name!r}: {_what_there_is(name)}", key=_key(name))
        if name in known and not known[name].spec and isinstance(spec, Mapping):
            message = f"reward {name!r} of several is declared in a script; move it into a file (plugins)"
            raise RewardError(message, key=f"{name}.script")
    if isinstance(spec, Mapping):
        return {known[name].spec if name in known else name: weight for name, weight in spec.items()}
    if isinstance(spec, str) and spec in known:
        return known[spec].spec or _value(known[spec])
    return spec


def _key(spec: str) -> str:
    """Return a specification without folders, for the key of an error."""
    return spec.rpartition("/")[2] or "reward.function"


def _what_there_is(spec: str) -> str:
    ours = [*verifier_specs(), *_brought()]
    return f"give FILE.py:function or module:function, or one of {', '.join(ours)}{_meant(spec)}"


def _meant(spec: str) -> str:
    close = difflib.get_close_matches(spec.partition(":")[0], [*verifier_names(), "regex", *_brought()], 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_answers(spec: str | Mapping[str, float] | Reward, prompts: Iterable[PromptLike]) -> None:
    """Refuse data whose given answers cannot be verified, before a run is spent on them.

    Asks ``check(info)`` of built-in verifiers and of functions given by value; files of functions are not imported
    here, only in the processes that score. info: what the data says, and the key ``prompt``.
    Raises DataError with the record, what is wrong and the first 60 characters of its answer.
    """
    checks = [check for one in _parts_of(spec) if (check := getattr(one, "check", None)) is not None]
    for prompt in prompts if checks else ():
        info = {"prompt": prompt.text, **prompt.info}
        for wrong in filter(None, (check(info) for check in checks)):
            answer = info.get("answer")
            shown = "" if answer is None else f"; its answer begins {str(answer)[:60]!r}"
            where = getattr(prompt, "where", "") or f"record {prompt.index + 1} of the data"
            raise DataError(f"{where} (prompt {prompt.text[:60]!r}): {wrong}{shown}", key="answer")


def _parts_of(spec: str | Mapping[str, float] | Reward) -> list[Any]:
    if isinstance(spec, Mapping):
        return [builtin(name) for name in spec]
    return [builtin(spec) if isinstance(spec, str) else spec]


def normalise(result: Any) -> Score:
    """A reward function's result as a score: numbers, booleans, one-element tensors, or a dict with ``reward``.

    Parts of a dict that are no such numbers are kept as NaN. A dict whose reward is missing has no parts.
    """
    if isinstance(result, Score):
        return result
    if isinstance(result, Mapping):
        if "reward" not in result:
            return Score(None, {}, f"returned a dict without 'reward' (keys: {', '.join(map(str, result)) or 'none'})")
        value, reason = _number(result["reward"])
        parts = {str(k): _number(v)[0] for k, v in result.items() if k != "reward"}
        named = {k: math.nan if v is None else v for k, v in parts.items()}
        return Score(value, named if value is not None else {}, reason)
    value, reason = _number(result)
    return Score(value, {}, reason)


def _number(result: Any) -> tuple[float | None, str]:
    kind = type(result).__name__
    if not isinstance(result, numbers.Real) and hasattr(result, "item"):  # a scalar of numpy or torch
        try:
            result = result.item()
        except (ValueError, RuntimeError, TypeError):
            return None, f"returned a {kind} that is not one number"
    if not isinstance(result, numbers.Real):
        return None, "returned None" if result is None else f"returned a {kind}, not a number"
    try:
        value = float(result)
    except OverflowError:
        return None, "returned a number too large for a float"
    wrong = _unusable(value)
    return (None, f"returned {wrong}") if wrong else (value, "")


def _unusable(value: float) -> str:
    """A number that cannot be a reward, in words; "" for one that can."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3g}, more than a reward may be ({LARGEST:g})" if abs(value) > LARGEST else ""


def _load_module(name: str, spec: str) -> ModuleType:
    if not {"", str(Path.cwd())} & set(sys.path):  # a console script does not see the folder it is called in
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        if is_missing(name, error):
            message = f"reward {spec!r}: no module {error.name!r} on the import path{_meant(spec)}"  # type: ignore[attr-defined]
            raise RewardError(message, key=name) from None
        message = f"reward {spec!r}: importing {name} failed: {describe(error)}"
        raise RewardError(message, key=f"{name}.import") from error


def is_importable(module: str) -> bool:
    """Whether another process finds the module by name (one made by hand or loaded from a path it does not)."""
    root = module.partition(".")[0]
    return any(finder.find_spec(root, None) is not None for finder in sys.meta_path)


def _load_file(path: Path, spec: str) -> ModuleType:
    try:
        return import_file(path)
    except PluginError as error:
        raise RewardError(f"reward {spec!r}: {error}", key=error.key) from error


def _checked(function: Any, spec: str) -> Reward:
    if not callable(function):
        message = f"reward {spec!r} is a {type(function).__name__}, not a function"
        raise RewardError(message, key=f"{_key(spec)}.type")
    try:
        inspect.signature(function).bind("prompt", "completion", {})
    except ValueError:  # a builtin without a signature
        return function
    except TypeError as error:
        message = f"reward {spec!r} must take (prompt, completion, info): {error}"
        raise RewardError(message, key=f"{_key(spec)}.arguments") from None
    return function


def _functions(module: ModuleType) -> list[str]:
    return [k for k, v in vars(module).items() if not k.startswith("_") and inspect.isfunction(v)]


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 1, 0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(known[:20])}" if known else "; it has no function"
