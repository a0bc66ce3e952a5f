"""Facts about the user's code, for options and error messages: places, arguments, imports, the line at fault."""

import ast
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tilth.config.imports import uncollected


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


def keyword_defaults(code: Callable[..., Any]) -> dict[str, Any]:
    """Return keyword-only argument -> default of a function or class."""
    known = inspect.signature(code).parameters.values()
    return {p.name: p.default for p in known if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


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


def parse(text: str | bytes) -> ast.Module:
    """Return ``ast.parse``, in the midst of which no other code of Python runs.

    CPython before 3.11.8 and 3.12.2 has one depth for all parses of a process (gh-106905). In a garbage collection
    finalizers run and threads take turns, and tracebacks that they format are parsed: the outer parse raises
    SystemError then.
    """
    with uncollected():
        return ast.parse(text)


@functools.lru_cache(128)
def imported_by(source: bytes, package: str) -> tuple[str, ...]:
    """Return full names of modules that a source may import; for ``from a import b`` both a and a.b."""
    try:
        todo: list[ast.AST] = [parse(source)]
    except (SyntaxError, ValueError):  # importing it raises
        return ()
    names: list[str] = []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and _called(node.test) == "TYPE_CHECKING":
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names += full_names(node.module or "", node.level, [alias.name for alias in node.names], package)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names.append(first.value)
    return tuple(names)


def _called(node: ast.expr) -> str:
    """Return the last part of a dotted name; "" for another expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def full_names(module: str, level: int, names: Iterable[str], package: str) -> Iterator[str]:
    """Yield full names of modules of ``from module import names``."""
    try:
        whole = importlib.util.resolve_name("." * level + module, package) if level else module
    except ImportError:  # beyond the top-level package: importing it raises
        return
    yield whole
    yield from (f"{whole}.{name}" for name in names if name != "*")
