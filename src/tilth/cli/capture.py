"""``tilth trace capture``: profile the next steps of a running run."""

import json

import typer

from tilth.analysis.events import parse_ranks
from tilth.cli.main import TraceCaptureCommand
from tilth.core.errors import StorageError
from tilth.launch.profiling import ask, follow, steps_in_words, take_back
from tilth.ui import format


def capture(options: TraceCaptureCommand) -> None:
    """Request the steps, wait until they are recorded and print the paths of the profiles.

    DataError: the run is not running, or has no such ranks; StorageError: nothing could be recorded or written. Ctrl-C
    withdraws a request that has not begun.
    """
    run, as_json = options.run, options.as_json
    request = ask(run, options.steps, parse_ranks(options.ranks), options.memory)
    if not as_json:
        which = "its next step" if options.steps == 1 else f"its next {options.steps} steps"
        typer.echo(f"asked {run} for {which}; Ctrl-C takes that back")
    try:
        for line in follow(run, request):
            if line["state"] == "capturing" and not as_json:
                typer.echo(f"recording {steps_in_words(line['first'], line['last'])}, which takes longer than without")
    except KeyboardInterrupt:
        if not take_back(run, request):
            typer.echo(f"it has begun; the profiles will be in {run / 'profiles'}", err=True)
        raise
    if line["state"] == "failed":
        raise StorageError(f"{run}: nothing was profiled: {line['error']}", key="profiles")
    if as_json:
        typer.echo(json.dumps(line))
        return
    found = [f"{made['path']}  {format.size(made['bytes'])}" for made in line["files"].values()]
    found += [f"rank {rank}: nothing: {error}" for rank, error in line["errors"].items()]
    typer.echo("\n".join([*found, "they open at https://ui.perfetto.dev, or in chrome://tracing"]))
