"""Reward functions: where they come from and what they may return. Imports no torch.

A reward is a plain callable ``(prompt: str, completion: str, info: dict) -> float | dict``. A dict has the key
``reward`` and any other named numbers, which are kept as its parts. A result that is no finite number makes the reward
missing, with a reason; it is never 0.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tilth.core.errors import RewardError

Reward = Callable[[str, str, dict[str, Any]], Any]
"""(prompt, completion, info) -> float or dict; ``info`` is what the data says of the prompt, ``answer`` among it."""


class Score(NamedTuple):
    """A normalised result. ``value`` None: missing, and ``reason`` says why."""

    value: float | None
    parts: dict[str, float]
    reason: str


def addition(prompt: str, completion: str, info: Mapping[str, Any]) -> float:
    """1.0 if the completion is the integer ``info["answer"]``, else 0.0.

    Exact equality of integers: white space around the number and leading zeros do not matter (the task itself pads its
    answers), anything else does: a word, a space inside, a plus sign, a decimal point, an empty completion.
    """
    given = _integer(completion)
    return float(given is not None and given == _integer(str(info["answer"])))


def _integer(text: str) -> str | None:
    """Canonical digits of a decimal integer of any size; None for any other text."""
    found = re.fullmatch(r"\s*(-?)0*([0-9]+)\s*", text)
    return None if found is None else (found[1] + found[2] if found[2] != "0" else "0")


BUILTIN: dict[str, Reward] = {"addition": addition}


def load_reward(spec: str | Reward) -> Reward:
    """The function that a recipe or a user names.

    spec: a callable; the name of a built-in verifier (``addition``); ``module:function``; ``path/to/file.py:function``.
    Raises RewardError in one line: no such file, module or function (with what there is, or the nearest), a file that
    fails when imported, something that cannot be called with (prompt, completion, info).
    """
    if callable(spec):
        return _checked(spec, getattr(spec, "__name__", type(spec).__name__))
    if spec in BUILTIN:
        return BUILTIN[spec]
    where, _, name = spec.rpartition(":")
    if not where or not name:
        hint = _nearest(spec, BUILTIN)
        raise RewardError(f"reward {spec!r}: give FILE.py:function or module:function, or a task's own{hint}")
    module = _load_file(Path(where), spec) if where.endswith(".py") else _load_module(where, spec)
    found: Any = module
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            raise RewardError(f"reward {spec!r}: {where} has no {name!r}{_nearest(name, _functions(module))}")
        found = getattr(found, attribute)
    return _checked(found, spec)


def normalise(result: Any) -> Score:
    """A reward function's result as a score: numbers, booleans, one-element tensors, or a dict with ``reward``.

    Parts of a dict that are no numbers are kept as NaN. A dict whose reward is missing has no parts.
    """
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
    return (value, "") if math.isfinite(value) else (None, f"returned {value}")


def _load_module(name: str, spec: str) -> ModuleType:
    if not {"", str(Path.cwd())} & set(sys.path):  # a console script does not see the folder it is called in
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise RewardError(f"reward {spec!r}: no module {error.name!r} on the import path") from None
        raise RewardError(f"reward {spec!r}: importing {name} failed: {describe(error)}") from error
    except Exception as error:
        raise RewardError(f"reward {spec!r}: importing {name} failed: {describe(error)}") from error


def _load_file(path: Path, spec: str) -> ModuleType:
    """Import a file by path, once; its folder joins the end of the import path, so that its neighbours are found."""
    path = path.expanduser().resolve()
    if not path.is_file():
        near = _nearest(path.name, (p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise RewardError(f"reward {spec!r}: no file {path}{near}")
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    source = importlib.util.spec_from_file_location(name, path)
    if source is None or source.loader is None:
        raise RewardError(f"reward {spec!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        source.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"reward {spec!r}: importing {path} failed: {describe(error)}") from error
    return module


def _checked(function: Any, spec: str) -> Reward:
    if not callable(function):
        raise RewardError(f"reward {spec!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind("prompt", "completion", {})
    except ValueError:  # a builtin without a signature
        return function
    except TypeError as error:
        raise RewardError(f"reward {spec!r} must take (prompt, completion, info): {error}") from None
    return function


def _functions(module: ModuleType) -> list[str]:
    return [k for k, v in vars(module).items() if not k.startswith("_") and inspect.isfunction(v)]


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 1, 0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(known[:20])}" if known else "; it has no function"


def describe(error: BaseException) -> str:
    """An exception in one line of at most 300 characters, with the place where it was raised."""
    message = " ".join(str(error).split())[:200]
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" at {Path(trace.tb_frame.f_code.co_filename).name[-60:]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}{': ' + message if message else ''}{place}"
