"""Loading of reward functions and normalisation of their results. Imports no torch.

A reward is a plain callable ``(prompt: str, completion: str, info: dict) -> float | dict``. A dict has the key
``reward`` and any other named numbers, its parts. A result that is no finite number, or one too large for fp32
(``LARGEST``), makes the reward missing, with a reason; it is never 0.
"""

import difflib
import importlib
import importlib.util
import inspect
import math
import numbers
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from tilth.config.code import describe, is_missing
from tilth.config.plugins import Declaration, declared, existing, import_file
from tilth.config.tasks import task_of
from tilth.core.errors import DataError, PluginError, RewardError
from tilth.rewards.verifiers import builtin, verifier_names, verifier_specs

if TYPE_CHECKING:
    from tilth.data.columns import Prompt

LARGEST = 1e18
"""Greatest absolute value of a reward. In fp32 columns, differences of such rewards, their squares in a value loss and
sums of some hundred of these stay finite."""

Reward = Callable[[str, str, dict[str, Any]], Any]
"""(prompt, completion, info) -> float or dict. info: the other columns of the prompt's record, such as ``answer``."""


class Score(NamedTuple):
    """Normalised result. ``value`` None: the reward is missing, for this ``reason``."""

    value: float | None
    parts: dict[str, float]
    reason: str


class Weighted:
    """Weighted sum of several rewards, each also a part by its name; missing if any of them is missing.

    A part of a member keeps its name if that is unique, and is ``name/part`` otherwise. The value of a member that
    decides right or wrong (``addition``, ``exact``) counts as its part ``correct``.
    """

    entered: Callable[[int], object] = staticmethod(lambda place: None)
    """Called with the index of a member before the member itself, so that the pool can name one that hangs."""

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
            result = called(function, prompt, completion, info)
        except BaseException as error:
            error.add_note(f"in reward {name}")  # for ``describe``
            raise
        score = normalise(result)
        decides = getattr(function, "decides", False) and score.value is not None and not score.parts
        return score._replace(parts={"correct": score.value}) if decides and score.value is not None else score

    def check(self, info: Mapping[str, Any]) -> str:
        """Return what the first complaining member finds wrong with a given answer; "" if none does."""
        for name, function, _ in self.members:
            check = getattr(function, "check", None)
            if check is not None and (wrong := check(info)):
                return f"{name}: {wrong}"
        return ""


def short_names(specs: Sequence[str]) -> list[str]:
    """Return names of parts: of the verifier or function, or the whole specification if two were equal."""
    short = [spec.partition(":")[0] if builtin(spec) else spec.rpartition(":")[2] for spec in specs]
    return [spec if short.count(name) > 1 else name for spec, name in zip(specs, short)]


def member_names(spec: str | Mapping[str, float] | Reward) -> list[str]:
    """Return the names of the members of several rewards; [] for a single one."""
    if isinstance(spec, Weighted):
        return [name for name, _, _ in spec.members]
    return short_names(list(spec)) if isinstance(spec, Mapping) else []


def _join(scores: Mapping[str, Score]) -> dict[str, float]:
    """Merge values and parts of the members under unique names."""
    count = Counter([*scores, *(part for score in scores.values() for part in score.parts)])
    joined = {name: score.value for name, score in scores.items() if score.value is not None}
    for name, score in scores.items():
        joined |= {part if count[part] == 1 else f"{name}/{part}": value for part, value in score.parts.items()}
    return joined


def load_reward(spec: str | Mapping[str, float] | Reward) -> Reward:
    """Load the reward function that a recipe or a user names.

    spec: a callable; a built-in verifier (``addition``, ``gsm8k``, ``regex:PATTERN``, see ``verifiers.builtin``);
    ``module:function``; ``path/to/file.py:function``; or several of these names with their weights.
    Raises RewardError of one line if the file, module or function does not exist (with the nearest name), if importing
    it fails, or if it cannot be called with (prompt, completion, info).
    """
    if isinstance(spec, Mapping):
        return Weighted(spec)
    if callable(spec):
        return _checked(spec, getattr(spec, "__name__", type(spec).__name__))
    verifier = builtin(spec)
    if verifier is not None:
        return verifier
    where, name = _split(spec)
    module = _of_file(import_file, where, spec) if where.endswith(".py") else _load_module(where, spec)
    if (by_name := _declared().get(name)) and by_name.value.__module__ == module.__name__:
        return _checked(_value(by_name), spec)
    found: Any = module
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            functions = [k for k, v in vars(module).items() if not k.startswith("_") and inspect.isfunction(v)]
            raise _no_function(spec, where, name, functions)
        found = getattr(found, attribute)
    return _checked(found, spec)


def check_place(spec: str) -> None:
    """Raise RewardError for a specification whose file, package or function is not there; import no code of it."""
    if builtin(spec) is not None:
        return
    where, name = _split(spec)
    if not where.endswith(".py"):
        _check_package(where, spec)
        return
    text = _of_file(existing, where, spec).read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{re.escape(name.partition('.')[0])}\b", text) and not _MADE_NAMES.search(text):
        raise _no_function(spec, where, name, _functions(text))


_MADE_NAMES = re.compile(r"import \*|__getattr__|globals\(|setattr\(|exec\(")
"""Code that may define names which are not written out."""


def _functions(text: str) -> list[str]:
    return re.findall(r"^(?:async +)?def +([^\W_]\w*)", text, re.MULTILINE)


def _split(spec: str) -> tuple[str, str]:
    """Return file or module, and the function in it. RewardError if one is not named."""
    where, _, name = spec.rpartition(":")
    if not where or not name or where in verifier_names():
        raise RewardError(f"reward {spec!r}: {_alternatives(spec)}", key=_key(spec))
    return where, name


def _declared() -> dict[str, Declaration]:
    """Return name -> declaration of rewards and tasks of plugins. Raises RewardError for the name of a verifier."""
    for name, found in declared("task").items():
        if builtin(name) is not None:
            message = f"{found.title}: a verifier that comes with Tilth has this name; choose another one"
            raise RewardError(message, key=f"task.{name}")
    return {**declared("reward"), **declared("task")}


def _value(declaration: Declaration) -> Reward:
    return task_of(declaration.name).reward if declaration.kind == "task" else declaration.value


def of_plugins(spec: str | Mapping[str, float] | Reward) -> str | Mapping[str, float] | Reward:
    """Turn names of plugins into specifications for any process: ``brevity`` -> ``/path/mine.py:brevity``.

    A single function declared in a script or notebook stays a value, since no other process can import it. Raises
    RewardError for an unknown name.
    """
    known = {name: found for name, found in _declared().items() if builtin(name) is None}
    for name in [spec] if isinstance(spec, str) and spec else spec if isinstance(spec, Mapping) else ():
        if name not in known and ":" not in name and builtin(name) is None:
            raise RewardError(f"reward {name!r}: {_alternatives(name)}", key=_key(name))
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


def _alternatives(spec: str) -> str:
    if spec.endswith(".py"):
        found = _functions(_of_file(existing, spec, spec).read_text(encoding="utf-8", errors="replace"))
        return f"name its function too, as in {spec}:{found[0] if found else 'FUNCTION'}"
    known = [*verifier_specs(), *_declared()]
    return f"give FILE.py:function or module:function, or one of {', '.join(known)}{_verifier_hint(spec)}"


def _verifier_hint(spec: str) -> str:
    return _hint(spec.partition(":")[0], [*verifier_names(), "regex", *_declared()])


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_answers(spec: str | Mapping[str, float] | Reward, prompts: "Iterable[Prompt]") -> None:
    """Check that the given answers of all prompts can be verified, before a run starts.

    Calls ``check(info)`` of built-in verifiers and of functions given by value; files of functions are imported only in
    reward processes. info: columns of the record and the key ``prompt``. Raises DataError with the record, the problem
    and the first 60 characters of the answer.
    """
    checks = [check for one in _parts_of(spec) if (check := getattr(one, "check", None)) is not None]
    for prompt in prompts if checks else ():
        info = {"prompt": prompt.text, **prompt.info}
        for wrong in filter(None, (check(info) for check in checks)):
            answer = info.get("answer")
            shown = "" if answer is None else f"; its answer begins {str(answer)[:60]!r}"
            if answer is None and (columns := [name for name in info if name != "prompt"]):
                shown = f"; data.columns.answer={columns[0]} takes it from a column, of {', '.join(columns[:9])}"
            where = getattr(prompt, "where", "") or f"record {prompt.index + 1} of the data"
            raise DataError(f"{where} (prompt {prompt.text[:60]!r}): {wrong}{shown}", key="answer")


def _parts_of(spec: str | Mapping[str, float] | Reward) -> list[Any]:
    if isinstance(spec, Mapping):
        return [builtin(name) for name in spec]
    return [builtin(spec) if isinstance(spec, str) else spec]


def called(function: Reward, prompt: str, completion: str, info: dict[str, Any]) -> Any:
    """Call a reward function; wait for the result of an ``async`` one in this process's event loop."""
    result = function(prompt, completion, info)
    return _loop().run_until_complete(result) if inspect.isawaitable(result) else result


@cache
def _loop() -> Any:
    import asyncio  # only where a function is async: reward processes start fast

    return asyncio.new_event_loop()


def normalise(result: Any) -> Score:
    """Turn a result into a score: a number, boolean, one-element tensor, or a dict of these with the key ``reward``.

    Other parts of a dict become NaN. If its reward is missing, a dict has no parts.
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
    """Describe a number that cannot be a reward; "" for one that can."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3g}, more than a reward may be ({LARGEST:g})" if abs(value) > LARGEST else ""


def _see_here() -> None:
    """Add the working directory to the import path, where a console script does not see it."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))


def _check_package(name: str, spec: str) -> None:
    """Raise RewardError if the outermost package of a module is not there."""
    _see_here()
    root = name.partition(".")[0]
    if root not in sys.modules and importlib.util.find_spec(root) is None:
        raise _no_module(root, spec)


def _no_module(name: str | None, spec: str) -> RewardError:
    message = f"reward {spec!r}: no module {name!r} on the import path{_verifier_hint(spec)}"
    return RewardError(message, key=spec.rpartition(":")[0])


def _load_module(name: str, spec: str) -> ModuleType:
    _see_here()
    try:
        return importlib.import_module(name)
    except Exception as error:
        if is_missing(name, error):
            raise _no_module(getattr(error, "name", None), spec) from None
        message = f"reward {spec!r}: importing {name} failed: {describe(error)}"
        raise RewardError(message, key=f"{name}.import") from error


def is_importable(module: str) -> bool:
    """True if another process can import the module by name; false for one made by hand or loaded from a path."""
    root = module.partition(".")[0]
    return any(finder.find_spec(root, None) is not None for finder in sys.meta_path)


def _of_file(look: Callable[[Path], Any], path: str, spec: str) -> Any:
    """Return what ``look`` finds of the file of a reward. RewardError names the reward."""
    try:
        return look(Path(path))
    except PluginError as error:
        raise RewardError(f"reward {spec!r}: {error}", key=error.key) from error


def _checked(function: Any, spec: str) -> Reward:
    if not callable(function):
        raise RewardError(f"reward {spec!r} is a {type(function).__name__}, not a function", key=f"{_key(spec)}.type")
    try:
        inspect.signature(function).bind("prompt", "completion", {})
    except ValueError:  # a builtin without a signature
        return function
    except TypeError:
        message = f"reward {spec!r} must take (prompt, completion, info), not {inspect.signature(function)}"
        raise RewardError(message, key=f"{_key(spec)}.arguments") from None
    return function


def _no_function(spec: str, where: str, name: str, functions: Iterable[str]) -> RewardError:
    known = sorted(functions)
    hint = _hint(name, known) or (f"; there are {', '.join(known[:20])}" if known else "; it has no function")
    return RewardError(f"reward {spec!r}: {where} has no {name!r}{hint}", key=_key(spec))
