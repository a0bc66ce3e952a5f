"""``tilth serve``: OpenAI's interface to a trained model."""

from collections.abc import Sequence
from pathlib import Path

import typer

from tilth.cli.main import ServeCommand
from tilth.core.errors import DataError
from tilth.serve.start import ServeOptions, open_server, served_name
from tilth.serve.tinker.base import ServiceLimits
from tilth.serve.tinker.start import TrainOptions, open_training

STATE = "tilth-service"
"""Folder of what clients make, below the current one, unless --state names another."""


def serve(command: ServeCommand) -> None:
    """Serve until a signal; the address goes to standard error when the engine is ready."""
    c, adapters = command, _pairs(command.adapter or ())
    if c.pooling not in ("last", "mean"):
        raise DataError(f"--pooling={c.pooling}: use last or mean", key="--pooling")
    options = ServeOptions(
        c.host, c.port, c.token, c.template, adapters, c.backend, c.address, c.name, c.pooling, c.fast
    )
    limits = {name: value for name in ServiceLimits.__annotations__ if (value := getattr(c, name)) is not None}
    given = [*(name for name in ("state", "layout") if getattr(c, name)), *limits]
    if not c.train and given:
        raise DataError(f"--{given[0]} is of a server that trains; add --train", key="--train")
    if c.train and c.fast:
        raise DataError("--fast with --train: samples must be reproducible after a restart", key="--fast")
    if c.train:
        how = TrainOptions(c.state or Path(STATE), c.name, ServiceLimits(**limits), c.layout)
        trainer, address = open_training(c.model, options, how)
        typer.echo(f"training {c.name or c.model} for TINKER_BASE_URL={address}; Ctrl-C ends it", err=True)
        trainer.run_here()
        return
    server, address = open_server(c.model, options)
    names = ", ".join([served_name(c.model, options), *adapters])
    typer.echo(f"serving {names} at {address}; Ctrl-C ends it", err=True)
    server.run_here()


def _pairs(given: Sequence[str]) -> dict[str, str]:
    """Return name -> directory. Raises DataError."""
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not (name and folder) or name in found:
            raise DataError(f"--adapter {one}: give NAME=DIR, each name once", key="--adapter")
        found[name] = folder
    return found
