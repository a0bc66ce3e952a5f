"""Output of commands: tables and lines, written to standard output at once."""

import shutil
from collections.abc import Iterable, Iterator, Sequence

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tilth.ui.format import plain

WIDTH = 100  # columns where there is no terminal
GAP = 3  # columns between two columns of a table


class Terminal(Console):
    """Rich's console, which raises BrokenPipeError instead of exiting."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich calls this where it caught it."""
        raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a drawing, whose texts come from files and control nothing."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def new_table(*columns: str, right: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table; the columns in ``right`` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def side_by_side(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Table | Text]:
    """Make tables as wide as the terminal that break no word, each with the first column: one, if all columns fit."""
    cells = [[name, *(row[i] for row in rows)] for i, name in enumerate(columns)]
    least = [max(len(word) for cell in column for word in [*cell.split(), ""]) + GAP for column in cells]
    full = [max(map(len, column)) + GAP for column in cells]
    tables: list[Table | Text] = []
    rest = list(range(1, len(columns)))
    while rest or not tables:
        room, taken = terminal_width() + GAP - least[0], [0]
        while rest and (room >= least[rest[0]] or taken == [0]):
            room -= least[rest[0]]
            taken.append(rest.pop(0))
        widths = {i: least[i] for i in taken}
        while room > 0 and (short := [i for i in taken if widths[i] < full[i]]):
            widths[max(short, key=lambda i: full[i] - widths[i])] += 1
            room -= 1
        made = new_table(*(columns[i] for i in taken), rows=[[row[i] for i in taken] for row in rows])
        for column, i in zip(made.columns, taken):
            column.width = widths[i] - GAP
        tables += [Text(), made] if tables else [made]
    return tables


def terminal_width() -> int:
    """Return the columns of the terminal, WIDTH where there is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def show(*parts: Table | Text | str, width: int = 0) -> None:
    """Print tables, as wide as the terminal, and texts as they are; width: wrap both to it.

    All of it is one write: a reader that needs the first line only (``| head -1``) gets it before its pipe closes.
    """
    console = Terminal(width=width or terminal_width(), highlight=False)
    with console.capture() as printed:
        for part in parts:
            console.print(part, markup=False, soft_wrap=not width and not isinstance(part, Table))
    typer.echo(printed.get(), nl=False, color=True)


def labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a name, padded to one width, and a value; rows without a value are left out."""
    rows = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in rows)
    return [f"{plain(name):<{width}}  {plain(value)}" for name, value in rows]
