"""Base of all errors that Tilth raises on purpose, and those that a recipe or a plugin can cause."""

import difflib
from collections.abc import Iterable, Sequence


class TilthError(Exception):
    """Base of every error that Tilth raises on purpose; the command line prints it in one line, exit code 2.

    key: what is at fault, independent of the sentence's wording. A recipe key (``train.device``), a command's option
    (``--only``), an argument, a column, a tensor or the name of a file, followed by the field where one field of it is
    wrong (``manifest.json.version``, ``embed.weight.shape``).
    """

    ranks: tuple[int, ...] = ()
    """Workers that raised it or caused it; () if it is not known, or the controller's own."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ArgumentError(ValueError):
    """A function of Tilth was called with an argument it cannot use; key: the argument's name."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class RecipeError(TilthError):
    """An unknown recipe, key or value; the message names the key, the value and what would be right."""


class AxisError(TilthError):
    """A parallel axis that is not in the table, or that lacks a rule for dividing a model."""


class PluginError(TilthError):
    """User code that cannot be imported, declares a name twice, or fails when it is called; names file and line."""


def nearest(name: str, *choices: Iterable[str]) -> str:
    """Return "did you mean X?" for the first of these lists with a similar name, else all names of the first list."""
    lists = [list(names) for names in choices]
    near = [match for names in lists for match in difflib.get_close_matches(name, names, 1)]
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(lists[0]) or 'none'}"


def listed(names: Sequence[object], most: int) -> str:
    """Return the first names as text, and how many there are besides."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
