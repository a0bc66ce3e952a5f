"""``tilth --version``: this package, torch and Python, without importing torch."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

import tilth


def _show(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilth {tilth.__version__}, torch {_torch()}, Python {platform.python_version()}")
        raise typer.Exit


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show, is_eager=True, help="show versions of tilth, torch and Python")
    ] = False,
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--plugins", metavar="FILE.py", is_eager=True, help="code of your own that adds commands; may be repeated"
        ),
    ] = None,
) -> None:
    """Trains language models by reinforcement learning."""
