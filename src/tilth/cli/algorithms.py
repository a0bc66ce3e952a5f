"""``tilth algorithms``: all of them side by side, or the differences of some."""

import json
from typing import Any

import typer

from tilth.cli.main import AlgorithmsCommand
from tilth.cli.tables import show, side_by_side
from tilth.rl.overview import COLUMNS, entries, overview, row


def compare(options: AlgorithmsCommand, named: tuple[list[str], dict[str, Any]]) -> None:
    """Print the flows that are named, or all, with the keys that are. Of several named ones only differences."""
    flows, keys = named
    found = overview(flows, keys)
    if options.as_json:
        typer.echo(json.dumps({"algorithms": found, "entries": entries()}, indent=2))
        return
    if len(flows) > 1:
        columns = {key: [facts[key] for facts in found.values()] for key in next(iter(found.values()))}
        differing = {key: values for key, values in columns.items() if any(value != values[0] for value in values)}
        show(*side_by_side(["", *flows], [(key, *map(_shown, values)) for key, values in differing.items()]))
        return
    tables = side_by_side(["flow", *COLUMNS], [(flow, *row(facts).values()) for flow, facts in found.items()])
    show(*tables, *(f"\n{kind}: {', '.join(known)}" for kind, known in entries().items() if not flows))


def _shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
