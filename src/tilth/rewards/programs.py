"""Reward of programs: unit tests judge them in a sandbox. Imports no torch; nothing that a model wrote runs in here."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from tilth.config.code import parse
from tilth.core.errors import RewardError

if TYPE_CHECKING:
    from tilth.sandbox.run import Sandbox

_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class UnitTests:
    """1.0 if the completion's program passes ``info["tests"]``, Python that raises otherwise. RewardError if an empty
    program passes them too.

    Both run in a sandbox, in two processes, so that the program reaches neither the tests nor their verdict. Tests see
    plain values as they are, and other objects of the program by handles that they can call, read and iterate over.

    The program is the last fenced block of the completion, or all of it. ``format``: 1 if it compiles.
    """

    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Mapping[str, Any]) -> dict[str, float]:
        blocks = _CODE.findall(completion)
        program = blocks[-1] if blocks else completion
        try:
            compile(program, "program.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return {"reward": 0.0, "correct": 0.0, "format": 0.0}
        passed = float(_passes(program, info["tests"]))
        if passed and _judge_nothing(info["tests"]):
            message = (
                "an empty program passes the tests too; call the functions that test (a file of pytest or unittest"
            )
            raise RewardError(f"{message} defines them alone), and let what they raise through", key="tests.empty")
        return {"reward": passed, "correct": passed, "format": 1.0}

    def check(self, info: Mapping[str, Any]) -> str:
        """Check that there are tests that compile and execute no text."""
        if not isinstance(info.get("tests"), str):
            return "the record has no column tests with Python source"
        try:
            tests = parse(info["tests"])
            compile(tests, "tests.py", "exec")
        except (SyntaxError, ValueError) as error:
            return f"the tests do not compile: {error}"
        if used := sorted(EXECUTE & {name for node in ast.walk(tests) for name in _names(node)}):
            return f"the tests use {used[0]}, by which a program's answer could claim that they passed; compare values"
        return ""


PASSED = "the tests passed\n"
EXECUTE = frozenset({"eval", "exec", "pickle", "shelve", "marshal", "runpy"})
"""Names with which tests execute what they are given."""


def _names(node: ast.AST) -> tuple[str, ...]:
    """Return the names that a node reads or imports."""
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    return (
        (node.id,) if isinstance(node, ast.Name) else (node.module or "",) if isinstance(node, ast.ImportFrom) else ()
    )


def _passes(program: str, tests: str) -> bool:
    found = _sandbox().run(_judge(), stdin=json.dumps({"program": program, "tests": tests}))
    return found.state == "ok" and found.stdout.endswith(PASSED)


@lru_cache(1024)
def _judge_nothing(tests: str) -> bool:
    return _passes("", tests)


_one_sandbox = Lock()


@cache
def _judge() -> str:
    from tilth.sandbox import apart

    return f"{Path(apart.__file__).read_text()}\njudge()\nprint({PASSED.strip()!r})\n"


def _sandbox() -> "Sandbox":
    """Return the sandbox of this process. SandboxError if this machine allows none."""
    with _one_sandbox:  # a cache alone would make one for each of several threads, and drop all but one in use
        return _made_sandbox()


@cache
def _made_sandbox() -> "Sandbox":
    from tilth.sandbox.run import Sandbox  # most reward processes need none, and begin the sooner

    return Sandbox()
