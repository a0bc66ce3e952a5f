"""``tilth trace capture``: profiles of the next steps of a run that goes on."""

import json
from pathlib import Path
from typing import Any

import typer

from tilth.analysis.events import parse_ranks
from tilth.core.errors import StorageError
from tilth.flows.profiling import ProfileRequest, ask, follow, steps_in_words, take_back
from tilth.ui import format


def capture(run: Path, steps: int, ranks: str, *, memory: bool, as_json: bool) -> None:
    """Ask for the steps, wait until they are recorded and print where the profiles are.

    DataError: not a run that goes on, no such ranks; StorageError: nothing could be recorded or written. Ctrl-C takes
    back what was asked for, if it has not begun.
    """
    request = ask(run, steps, parse_ranks(ranks), memory)
    try:
        line = _await(run, request, silent=as_json)
    except KeyboardInterrupt:
        if not take_back(run, request):
            typer.echo(f"it has begun; the profiles will be in {run / 'profiles'}", err=True)
        raise
    if line["state"] == "failed":
        raise StorageError(f"{run}: nothing was profiled: {line['error']}", key="profiles")
    if as_json:
        typer.echo(json.dumps(line))
    else:
        typer.echo("\n".join(_told(line)))


def _await(run: Path, request: ProfileRequest, *, silent: bool) -> dict[str, Any]:
    if not silent:
        typer.echo(_asked(run, request))
    line: dict[str, Any] = {}
    for line in follow(run, request):
        if line["state"] == "capturing" and not silent:
            typer.echo(f"recording {steps_in_words(line['first'], line['last'])}, which takes longer than without")
    return line


def _asked(run: Path, request: ProfileRequest) -> str:
    what = "its next step" if request.steps == 1 else f"its next {request.steps} steps"
    return f"asked {run} for {what}; Ctrl-C takes that back"


def _told(line: dict[str, Any]) -> list[str]:
    lines = [f"{made['path']}  {format.size(made['bytes'])}" for made in line["files"].values()]
    lines += [f"rank {rank}: nothing: {error}" for rank, error in line["errors"].items()]
    return [*lines, "they open at https://ui.perfetto.dev, or in chrome://tracing"]
