"""Code that one GRPO step runs in the controller and its workers: files, functions, calls, crossings of packages.

    python benchmarks/route.py [--quick] [--json PATH]

Backend "inline": roles are called in this process, so one profiler sees them all; other threads (writers, watches) are
not counted. The step is the third of a run whose model is 32 wide: 4 prompts, 4 answers of at most 8 tokens each, no
evaluation and no checkpoint. A crossing
is a call of a function of one package by a function of another; functions of other libraries in between are passed
over. --quick: the same.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from driver import benchmark_parser, write_rows

import tilth

SOURCE = str(Path(tilth.__file__).parent) + "/"
COUNTED = 3


class Route(tilth.Callback):
    """Counts calls of Tilth's functions from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.edges: Counter[tuple[str, str]] = Counter()
        self._stack: list[str] = []

    def on_step_end(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
        """Begin, or end."""
        sys.setprofile(self._note if step == COUNTED - 1 else None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(SOURCE):
            return
        file = frame.f_code.co_filename.removeprefix(SOURCE)
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        self.calls[file, frame.f_code.co_qualname, frame.f_code.co_firstlineno] += 1
        if self._stack and self._stack[-1] != file:
            self.edges[self._stack[-1], file] += 1
        self._stack.append(file)


def package(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def counts(route: Route) -> dict[str, Any]:
    crossings = Counter[tuple[str, str]]()
    for (caller, called), times in route.edges.items():
        if package(caller) != package(called):
            crossings[package(caller), package(called)] += times
    return {
        "files": len({file for file, *_ in route.calls}),
        "functions": len(route.calls),
        "calls": route.calls.total(),
        "packages": len({package(file) for file, *_ in route.calls}),
        "edges_between_files": len(route.edges),
        "edges_between_packages": len(crossings),
        "crossings_of_packages": crossings.total(),
    }


def main() -> None:
    args = benchmark_parser(__doc__, "nothing").parse_args()
    route = Route()
    with tempfile.TemporaryDirectory() as folder:
        tilth.train(
            [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)],
            lambda prompt, completion, info: float(completion.startswith(info["answer"])),
            live=False,
            callbacks=[route],
            run={"dir": folder},
            model={"hidden": 32},
            rollout={"prompts": 4, "group": 4, "max_tokens": 8},
            algorithm={"steps": COUNTED + 1},
        )
    row = counts(route)
    print("  ".join(f"{key} {value:,}" for key, value in row.items()))
    write_rows(args.json, [row])


if __name__ == "__main__":
    main()
