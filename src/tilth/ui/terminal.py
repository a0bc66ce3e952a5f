"""The console of commands that print."""

from rich.console import Console


class Terminal(Console):
    """Rich's console, for which a broken pipe is the error that it is for everybody else."""

    def on_broken_pipe(self) -> None:
        """Called where it was caught."""
        raise
