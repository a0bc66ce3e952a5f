"""The console of commands that print."""

from rich.console import Console


class Terminal(Console):
    """Rich's console, which raises BrokenPipeError instead of exiting."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich calls this where it caught it."""
        raise
