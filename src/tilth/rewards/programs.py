"""Reward of programs: unit tests judge them in a sandbox. Imports no torch; nothing that a model wrote runs in here."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, ClassVar

from tilth.sandbox.run import Sandbox

_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class UnitTests:
    """1.0 if the completion's program passes ``info["tests"]``, Python that raises otherwise; both run in a sandbox.

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
        # Tests are a part of the same program, so that one that exits early must not look as if they had passed.
        marker = f"passed-{os.urandom(8).hex()}"
        found = _sandbox().run(f"{program}\n{info['tests']}\nprint({marker!r})")
        passed = float(found.state == "ok" and found.stdout.endswith(f"{marker}\n"))
        return {"reward": passed, "correct": passed, "format": 1.0}

    def check(self, info: Mapping[str, Any]) -> str:
        """Check that there are tests that compile."""
        if not isinstance(info.get("tests"), str):
            return "the record has no column tests with Python source"
        try:
            compile(info["tests"], "tests.py", "exec")
        except (SyntaxError, ValueError) as error:
            return f"the tests do not compile: {error}"
        return ""


_one_sandbox = Lock()


def _sandbox() -> Sandbox:
    """Return the sandbox of this process. SandboxError if this machine allows none."""
    with _one_sandbox:  # a cache alone would make one for each of several threads, and drop all but one in use
        return _made_sandbox()


@cache
def _made_sandbox() -> Sandbox:
    return Sandbox()
