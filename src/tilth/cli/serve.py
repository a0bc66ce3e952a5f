"""``tilth serve``: OpenAI's interface to a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from tilth.core.errors import DataError
from tilth.serve.start import ServeOptions, open_server, served_name
from tilth.serve.tinker.base import ServiceLimits
from tilth.serve.tinker.start import TrainOptions, open_training

STATE = "tilth-service"
"""Folder of what clients make, below the current one, unless --state names another."""


def serve(
    model: str,
    host: str,
    port: int,
    token: str,
    adapter: Sequence[str] = (),
    template: str | None = None,
    backend: str = "local",
    train: bool = False,
    state: Path | None = None,
    name: str = "",
    pooling: str = "last",
    fast: bool = False,
    requests: int | None = None,
    models: int | None = None,
    idle: float | None = None,
    layout: str = "",
    address: str = "",
) -> None:
    """Serve until a signal; the address goes to standard error when the engine is ready."""
    adapters = _pairs(adapter)
    if pooling not in ("last", "mean"):
        raise DataError(f"--pooling={pooling}: use last or mean", key="--pooling")
    options = ServeOptions(host, port, token, template, adapters, backend, address, name, pooling, fast)
    limits = {"requests": requests, "models": models, "idle": idle}
    given = {"state": state, "layout": layout or None, **limits}
    if not train and (first := next((key for key, value in given.items() if value is not None), "")):
        raise DataError(f"--{first} is of a server that trains; add --train", key="--train")
    if train and fast:
        raise DataError("--fast with --train: samples must be reproducible after a restart", key="--fast")
    if train:
        own: dict[str, Any] = {key: value for key, value in limits.items() if value is not None}
        how = TrainOptions(state or Path(STATE), name, ServiceLimits(**own), layout)
        opened, address = open_training(model, options, how)
        typer.echo(f"training {name or model} for TINKER_BASE_URL={address}; Ctrl-C ends it", err=True)
        opened.run_here()
        return
    server, address = open_server(model, options)
    typer.echo(f"serving {', '.join([served_name(model, options), *adapters])} at {address}; Ctrl-C ends it", err=True)
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
