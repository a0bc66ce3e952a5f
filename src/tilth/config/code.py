"""Facts about the user's code, for options and error messages: places, arguments, the line at fault."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def describe(error: BaseException, file: str = "") -> str:
    """Describe an exception in one line of at most 300 characters, with the place that raised it.

    file: the code at fault; its innermost line is named even if code that it called raised the error. Syntax errors
    that Python's importer raises name their line themselves.
    """
    try:
        message = " ".join(str(error).split())[:200]
    except Exception as another:  # noqa: BLE001 - whatever a user's __str__ raises
        message = f"(its text raises {type(another).__name__})"
    trace, frames = error.__traceback__, [("<frozen importlib>", 0)]
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    named, line = next((frame for frame in reversed(frames) if frame[0] == file), frames[-1])
    place = "" if named.startswith("<frozen importlib") else f" at {Path(named).name[-60:]}:{line}"
    notes = "".join(f" ({note[:100]})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}{': ' + message if message else ''}{place}{notes}"


def is_missing(name: str, error: BaseException) -> bool:
    """True if importing ``name`` failed because it or a package around it does not exist."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return bool(missing) and f"{name}.".startswith(f"{missing}.")


def keyword_options(code: Callable[..., Any]) -> dict[str, Any]:
    """Return keyword-only argument -> annotation of a function or class: its options."""
    known = inspect.signature(code, eval_str=True).parameters.values()
    return {p.name: p.annotation for p in known if p.kind is p.KEYWORD_ONLY}


def source(code: Any) -> str:
    """Return file and line of a function or class, for error messages."""
    file, line = place(inspect.unwrap(code))
    return f"{Path(file).name}:{line}"


def place(code: Any) -> tuple[str, int]:
    """Return file and first line of a function or class; ("?", 0) if Python has no source for it."""
    if inspect.isfunction(code):
        return code.__code__.co_filename, code.__code__.co_firstlineno
    try:
        return inspect.getsourcefile(code) or "?", inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return "?", 0
