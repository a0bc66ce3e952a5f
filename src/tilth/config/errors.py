"""Base of all errors that Tilth raises on purpose, and the one that a recipe can cause."""


class TilthError(Exception):
    """Base of every error that Tilth raises on purpose; the command line prints it in one line, exit code 2."""


class RecipeError(TilthError):
    """An unknown recipe, key or value; the message names the key, the value and what would be right."""


class AxisError(TilthError):
    """A parallel axis that is not in the table, or that says nothing of how it divides a model."""


class PluginError(TilthError):
    """User code that cannot be imported, declares a name twice, or fails when it is called; names file and line."""
