"""Who watches a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Say = Callable[[str], None]
"""Puts a line into the run's log and before whoever watches."""


class Observer(Protocol):
    """Who watches a run: the terminal, the report, a test."""

    def on_step(self, record: dict[str, Any], sample: dict[str, Any] | None) -> None:
        """A step was committed. ``sample``: one sampled answer, where there is one."""
        ...

    def on_message(self, text: str) -> None:
        """Something worth a line."""
        ...

    def on_end(self, summary: dict[str, Any]) -> None:
        """The run ended."""
        ...


@runtime_checkable
class Beginner(Protocol):
    """An observer that wants to know, before the first step, where the run is kept and whether it goes on."""

    def on_begin(self, directory: Path, step: int, say: Say) -> None:
        """step: the last one that is kept, a later one of an earlier attempt is void; say: a line for the run's log."""
        ...
