"""``tilth serve``: OpenAI's interface to a trained model."""

from collections.abc import Sequence

import typer

from tilth.core.errors import DataError
from tilth.flows.serving import ServeOptions, open_server


def serve(
    model: str, host: str, port: int, token: str, adapter: Sequence[str] = (), template: str | None = None
) -> None:
    """Serve until a signal; the address goes to standard error when the engine is ready."""
    adapters = _pairs(adapter)
    server, address = open_server(model, ServeOptions(host, port, token, template, adapters))
    typer.echo(f"serving {', '.join([model, *adapters])} at {address}; Ctrl-C ends it", err=True)
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
