"""Declare commands: the app with its own options, groups, and how a class becomes a command."""

import functools
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any, TypeVar

import typer
from typer import Option

import tilth
from tilth.cli.groups import Commands
from tilth.config.roles import resolve
from tilth.core.errors import PluginError

Declared = TypeVar("Declared")


def _version(wanted: bool) -> None:
    if wanted:
        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "not installed"
        typer.echo(f"tilth {tilth.__version__}, torch {torch}, Python {platform.python_version()}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="versions of tilth, torch and Python")
    ] = False,
    plugins: Annotated[
        list[str] | None,
        Option("--plugins", metavar="FILE.py", is_eager=True, help="your code that adds commands; repeatable"),
    ] = None,
    trust: Annotated[bool, Option("--trust", help="import the code of the run that a command opens")] = False,
) -> None:
    """Train language models by reinforcement learning."""
    if trust:
        from tilth.runs.trust import trust_all

        trust_all()


app = typer.Typer(
    cls=Commands, callback=options, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def group(name: str, text: str, kind: type[typer.core.TyperGroup] = typer.core.TyperGroup) -> typer.Typer:
    """Add a group of commands to the app. text: its help."""
    made = typer.Typer(cls=kind, help=text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(made, name=name)
    return made


def command(
    name: str, target: str, parent: typer.Typer = app, first: Callable[[Any], Any] | None = None
) -> Callable[[type[Declared]], type[Declared]]:
    """Register a command: a named tuple declares its options, ``target`` (module:function) takes an object of it.

    target: of this package, or of the studies, as in "studies.module:function". Its module is imported when the command
    runs. first: called with the object before, so that mistakes that it finds need not wait for seconds of imports;
    what it returns is the second argument of the target.
    """

    def register(declared: type[Declared]) -> type[Declared]:
        @functools.wraps(declared, updated=())
        def call(**given: Any) -> None:
            _, own, function = target.partition("studies.")
            asked = declared(**given)
            found = () if first is None else (first(asked),)
            body = study(function) if own else resolve(f"tilth.cli.{target}")
            body(asked, *found)

        parent.command(name)(call)
        return declared

    return register


def study(target: str) -> Callable[..., Any]:
    """Import a function (module:function) of the studies in ``benchmarks/``. PluginError: they are not installed."""
    try:
        return resolve(f"tilth_studies.{target}")
    except ModuleNotFoundError as error:
        if error.name != "tilth_studies":
            raise
        message = "this is a command of the studies, which are not installed: pip install . in Tilth's folder"
        raise PluginError(message, key="tilth_studies") from error
