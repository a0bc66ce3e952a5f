"""Tables for the terminal."""

import shutil
from collections.abc import Sequence

from rich import box
from rich.table import Table

from tilth.ui.terminal import Terminal

WIDTH = 100
"""Columns where there is no terminal."""


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns in ``right`` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def show(*parts: Table | str) -> None:
    """Print tables, as wide as the terminal, and texts as they are."""
    console = Terminal(width=shutil.get_terminal_size((WIDTH, 24)).columns, highlight=False)
    for part in parts:
        console.print(part, markup=False, soft_wrap=True) if isinstance(part, str) else console.print(part)
