"""Reward of programs: unit tests judge them in a sandbox. Imports no torch; nothing that a model wrote runs in here."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from tilth.sandbox import apart
from tilth.sandbox.run import Sandbox

_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class UnitTests:
    """1.0 if the completion's program passes ``info["tests"]``, Python that raises otherwise.

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
        given = json.dumps({"program": program, "tests": info["tests"]})
        found = _sandbox().run(_judge(), stdin=given)
        passed = float(found.state == "ok" and found.stdout.endswith(PASSED))
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


PASSED = "the tests passed\n"
_one_sandbox = Lock()


@cache
def _judge() -> str:
    return f"{Path(apart.__file__).read_text()}\njudge()\nprint({PASSED.strip()!r})\n"


def _sandbox() -> Sandbox:
    """Return the sandbox of this process. SandboxError if this machine allows none."""
    with _one_sandbox:  # a cache alone would make one for each of several threads, and drop all but one in use
        return _made_sandbox()


@cache
def _made_sandbox() -> Sandbox:
    return Sandbox()
