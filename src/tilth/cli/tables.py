"""Output of commands: tables and lines, written to standard output at once."""

import shutil
from collections.abc import Iterable, Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100  # columns where there is no terminal


class Terminal(Console):
    """Rich's console, which raises BrokenPipeError instead of exiting."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich calls this where it caught it."""
        raise


def new_table(*columns: str, right: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table; the columns in ``right`` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def show(*parts: Table | Text | str, width: int = 0) -> None:
    """Print tables, as wide as the terminal, and texts as they are; width: wrap both to it.

    All of it is one write: a reader that needs the first line only (``| head -1``) gets it before its pipe closes.
    """
    console = Terminal(width=width or shutil.get_terminal_size((WIDTH, 24)).columns, highlight=False)
    with console.capture() as printed:
        for part in parts:
            console.print(part, markup=False, soft_wrap=not width and not isinstance(part, Table))
    typer.echo(printed.get(), nl=False, color=True)


def labelled(rows: Iterable[tuple[str, str]], width: int = 0) -> list[str]:
    """Lines of a name, padded to one width, and a value; rows without a value are left out."""
    rows = [(name, value) for name, value in rows if value]
    width = width or max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
