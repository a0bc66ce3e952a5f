"""``tilth algorithms``: all of them side by side, or how some of them differ."""

import json
from collections.abc import Sequence
from typing import Any

import typer

from tilth.cli.tables import new_table, show
from tilth.config.load import parse_overrides
from tilth.rl.overview import COLUMNS, entries, overview, row


def compare(words: Sequence[str], *, as_json: bool) -> None:
    """Print the flows among the words, or all; the others are overrides. Of several named ones only what differs."""
    flows = [word for word in words if "=" not in word]
    found = overview(flows, parse_overrides([word for word in words if "=" in word]))
    if as_json:
        typer.echo(json.dumps({"algorithms": found, "entries": entries()}, indent=2))
        return
    if len(flows) > 1:
        table = new_table("", *flows)
        for key in next(iter(found.values())):
            values = [facts[key] for facts in found.values()]
            if any(value != values[0] for value in values):
                table.add_row(key, *map(_shown, values))
        show(table)
        return
    table = new_table("flow", *COLUMNS)
    for flow, facts in found.items():
        table.add_row(flow, *row(facts).values())
    show(table, *(f"\n{kind}: {', '.join(known)}" for kind, known in entries().items() if not flows))


def _shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
