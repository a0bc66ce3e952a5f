"""The table: a row for each registered entry, a column for each kind of check."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tests.rl.conformance.cell import Cell, Check, Subject, cell
from tests.rl.conformance.checks import FEW, MANY, check_golden, check_invariance, check_oracle, check_split
from tests.rl.conformance.edges import check_edges
from tests.rl.conformance.flows import check_flows
from tests.rl.conformance.published import check_published
from tilth import rl

FUNCTIONS = {"value": ("clip", "no clip")}
"""Losses that are functions, not entries of the registry."""
COLUMNS = {
    "golden": "(a) vectors published by running verl's functions",
    "oracle": "(b) plain loops in float64, random batches, every option",
    "invariance": "(c) micro-batches, order of rows, padding, names of groups",
    "edges": "(d) groups of one, equal rewards, all masked, missing rewards, NaN at masked places",
    "workers": "(e) two workers that share groups",
    "flows": "(f) one step of every flow that can use it",
    "published": "(g) what a recipe that names it alone gets, against papers and verl",
}


def subjects() -> list[Subject]:
    """Every row: what is registered, whoever registered it, and the functions."""
    found = [Subject(kind, name) for kind, names in rl.names().items() for name in names]
    return found + [Subject(kind, name) for kind, names in FUNCTIONS.items() for name in names]


def checks(quick: bool) -> dict[str, Check]:
    """The checks of one entry by itself; flows are run for all entries together."""
    count = FEW if quick else MANY
    return {
        "golden": check_golden,
        "oracle": partial(check_oracle, count=count),
        "invariance": partial(check_invariance, count=count),
        "edges": check_edges,
        "workers": partial(check_split, count=count),
        "published": check_published,
    }


@dataclass
class Table:
    """cells: subject -> column -> cell."""

    cells: dict[Subject, dict[str, Cell]] = field(default_factory=dict)

    @property
    def failures(self) -> list[tuple[Subject, str, Cell]]:
        """All cells that fail."""
        return [(s, c, found) for s, row in self.cells.items() for c, found in row.items() if found.state == "fail"]

    def rows(self) -> list[dict[str, Any]]:
        """For JSON: kind, name, column and what the cell says."""
        return [
            {"kind": subject.kind, "name": subject.name, "column": column, **asdict(found)}
            for subject, row in self.cells.items()
            for column, found in row.items()
        ]

    def markdown(self) -> str:
        """The table, its columns, why cells do not apply, and what fails."""
        reasons = list(dict.fromkeys(f.note for row in self.cells.values() for f in row.values() if f.state == "n/a"))
        lines = [f"| kind | name | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
        for subject, row in self.cells.items():
            texts = [_text(row[c], reasons) if c in row else "" for c in COLUMNS]
            lines.append(f"| {subject.kind} | `{subject.name}` | {' | '.join(texts)} |")
        lines += ["", *(f"- {name}: {told}" for name, told in COLUMNS.items())]
        lines += [f"- n/a {i}: {reason}" for i, reason in enumerate(reasons, 1)]
        lines += [f"- FAIL {s.kind} {s.name}, {c}: {found.note}" for s, c, found in self.failures]
        return "\n".join(lines)


def _text(found: Cell, reasons: list[str]) -> str:
    return f"n/a {reasons.index(found.note) + 1}" if found.state == "n/a" else found.text()


def make(
    quick: bool,
    chosen: Iterable[Subject] | None = None,
    say: Callable[[str], None] = lambda text: None,
    flows: bool = True,
) -> Table:
    """Run the checks of these entries, or of all of them. flows: whether to run recipes too."""
    table = Table()
    for subject in subjects() if chosen is None else chosen:
        table.cells[subject] = {name: cell(check, subject) for name, check in checks(quick).items()}
        took = sum(found.seconds for found in table.cells[subject].values())
        say(f"{subject.kind} {subject.name}: {took:.1f} s")
    if flows:
        say("one step of every flow")
        for subject, cells in check_flows(list(table.cells), quick).items():
            processes = cells.pop("processes", Cell("pass"))
            if processes.state == "fail":
                table.cells[subject]["workers"] = processes
            table.cells[subject] |= cells
    return table
