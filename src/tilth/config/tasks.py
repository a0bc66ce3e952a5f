"""Tasks, each declared once in its own file, and their lookup by name. Imports no torch.

Each task that comes with Tilth is ``TASK`` in the file of ``tilth/tasks`` with its name; a plugin declares one with
``tilth.task``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from tilth.config.errors import PluginError
from tilth.config.plugins import Declaration, call_declared, declared


@dataclass(frozen=True)
class Task:
    """One task, ``data.source=NAME`` and ``reward.function=NAME``."""

    prompts: Callable[..., Any]
    """Returns a ``tilth.data.computed.Source``, or records as ``tilth.train`` takes them. Arguments are keys of [data]
    (``digits``), keyword-only arguments are options (``data.options.KEY``)."""
    reward: Callable[[str, str, dict[str, Any]], Any]
    """(prompt, completion, info) -> number or dict; a ``tilth.rewards.verifiers.Verifier`` checks given answers too."""
    wrong: Callable[[Any], str] | None = None
    """Returns a wrong answer to a prompt, for pairs of answers; None: the task has no pairs."""

    environment: type | None = None
    """Subclass of ``tilth.Environment`` that ``rollout.environment=NAME`` chooses; None: answers of one turn."""

    def make_prompts(self, section: Any) -> Any:
        """Return the prompts for a section [data]."""
        given = {**dict(section), **section.options}
        return self.prompts(
            **{name: given[name] for name in inspect.signature(self.prompts).parameters if name in given}
        )


@cache
def _of_plugin(declaration: Declaration) -> Task:
    made = call_declared(declaration)
    if not isinstance(made, Task):
        raise PluginError(f"{declaration.title} returns no tilth.config.tasks.Task", key=f"task.{declaration.name}")
    return made


def task_of(name: str) -> Task:
    """Return the task of a name, one of ``plugins.task_names()``."""
    found = declared("task").get(name)
    shipped: Task | None = None if found else import_module(f"tilth.tasks.{name}").TASK
    return shipped or _of_plugin(found)  # type: ignore[arg-type]
