"""Tasks: what a task declares, once, in a file of its own, and how one is found by name. Imports no torch.

A file of ``tilth/tasks`` declares each task that comes with Tilth, as ``TASK``, and has its name; a plugin declares one
with ``tilth.task``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from tilth.config.errors import PluginError
from tilth.config.plugins import Declaration, declared


@dataclass(frozen=True)
class Task:
    """One task, ``data.source=NAME`` and ``reward.function=NAME``."""

    prompts: Callable[..., Any]
    """Makes the prompts: a ``tilth.data.computed.Source``, or records as ``tilth.train`` takes them. Arguments are keys
    of [data] by their names (``digits``), keyword-only ones are options (``data.options.KEY``)."""
    reward: Callable[[str, str, dict[str, Any]], Any]
    """(prompt, completion, info) -> number or dict; a ``tilth.rewards.verifiers.Verifier`` judges given answers too."""
    wrong: Callable[[Any], str] | None = None
    """Makes the answer of a prompt wrong, for pairs of answers; None: the task has no pairs."""

    def make_prompts(self, section: Any) -> Any:
        """Prompts for a section [data], given the keys and options that they ask for."""
        given = {**dict(section), **section.options}
        return self.prompts(
            **{name: given[name] for name in inspect.signature(self.prompts).parameters if name in given}
        )


@cache
def _of_plugin(declaration: Declaration) -> Task:
    made = declaration.value()
    if not isinstance(made, Task):
        raise PluginError(f"{declaration.title} returns no tilth.config.tasks.Task")
    return made


def task_of(name: str) -> Task:
    """The task of a name, one of ``plugins.task_names()``."""
    found = declared("task").get(name)
    shipped: Task | None = None if found else import_module(f"tilth.tasks.{name}").TASK
    return shipped or _of_plugin(found)  # type: ignore[arg-type]
