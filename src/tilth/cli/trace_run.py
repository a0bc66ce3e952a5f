"""``tilth trace RUN``: where the time of a run went."""

import json
from collections import Counter
from pathlib import Path

import typer

from tilth.core.errors import DataError


def account(run: Path, steps: str, *, as_json: bool) -> None:
    """Print where the time of a run's steps went. steps: "A:B", empty: all."""
    if not run.exists():
        raise DataError(f"no run at {str(run)!r}, nor is it a command of tilth trace (tilth trace --help)")
    from tilth.flows.readers import read_metrics

    spent: Counter[str] = Counter()
    for record in read_metrics(run):
        spent.update({k[5:]: v for k, v in record.items() if k.startswith("time/") and v})
    if as_json:
        typer.echo(json.dumps(spent))
    else:
        typer.echo("\n".join(f"{name:<12} {seconds:10.2f} s" for name, seconds in spent.most_common()))
