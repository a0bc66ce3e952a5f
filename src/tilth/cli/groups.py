"""Groups of commands, and the exit code of each kind of failure.

An error that Tilth raises on purpose is printed in one line on stderr: exit code 2. Ctrl-C: 130. A reader of the output
that has closed its pipe: 141, as of any program that SIGPIPE ends. Output that cannot be written (full disk): 2.
"""

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from tilth.config.plugins import Declaration, absolute, blame, declared_by, load_plugins
from tilth.core.errors import CallTimeout, PluginError, TilthError, WorkerError, WorkerLost
from tilth.ui.output import discard

USAGE: Any = typer.BadParameter.__mro__[1]  # click's UsageError, which recent versions of typer have a copy of


@contextmanager
def _written() -> Iterator[None]:
    """End in an exit code if standard output cannot be written."""
    try:
        yield
    except BrokenPipeError:
        discard(sys.stdout)
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        discard(sys.stdout)
        _end(f"error: the output cannot be written: {error.strerror}", 2)


class Commands(TyperGroup):
    """The commands of Tilth and of plugins; turns errors into a line and an exit code."""

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command of Tilth or of the plugins that ``--plugins`` names. PluginError: both have the name."""
        if name == "help" and ctx.parent is None:
            typer.echo(ctx.get_help())
            raise typer.Exit
        own, shipped = _declared(ctx).get(name), super().get_command(ctx, name)
        if own is None or shipped is None:
            return shipped if own is None else _command(own)
        raise PluginError(
            f"{own.title} has the name of a command that comes with Tilth; choose another name", key=f"command.{name}"
        )

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, those of plugins last."""
        return [*super().list_commands(ctx), *_declared(ctx)]

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line, which prints for ``--version`` and ``--help``."""
        with _written():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. ctx: click's context, which recent versions of typer have a copy of."""
        try:
            with _written():
                return super().invoke(ctx)
        except (WorkerError, WorkerLost, CallTimeout) as error:
            _end(f"error: {error}", 2)  # with the worker's traceback, the tail of its log or the stacks
        except TilthError as error:
            _end("error: " + " ".join(str(error).split()), 2)
        except USAGE as error:
            what = " ".join(error.format_message().split()).removesuffix(".")
            _end(f"error: {what}{_usage_hint(error)} (tilth --help)", 2)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            from tilth.core.memory import is_out_of_memory, no_memory

            if is_out_of_memory(error):  # torch has no class of its own for it on a CPU
                _end(f"error: {no_memory(error)}", 2)
            if (found := blame(error, "")) is None:
                raise
            _end(f"error: {found}", 2)
        except KeyboardInterrupt:
            _end("interrupted; whatever a run has saved is intact", 130)


def _declared(ctx: Any) -> dict[str, Declaration]:
    """Commands of the plugins that the command line names."""
    named = absolute(ctx.params.get("plugins") or ())
    load_plugins(named)
    return {found.name: found for found in declared_by("command", named)}


def _command(declaration: Declaration) -> Any:
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    made.command(declaration.name)(declaration.value)
    return typer.main.get_command(made)


def _usage_hint(error: Any) -> str:
    """Return what would be right, for a key written as an option and for a recipe that is not named."""
    option = str(getattr(error, "option_name", ""))
    if "." in option:
        return f"; keys of a recipe have no dashes: {option.lstrip('-')}=VALUE"
    missing = str(getattr(getattr(error, "param", None), "metavar", ""))
    if missing == "RECIPE":
        from tilth.config.load import names

        return f"; recipes are {', '.join(names())}, or a TOML file"
    if missing == "RUN":
        return f"; runs are {', '.join(runs[-9:]) if (runs := _runs()) else 'in runs, which has none'}"
    return ""


def _runs() -> list[str]:
    """Return the runs of the default folder, oldest first."""
    from tilth.config.schema import RunConfig

    found = Path(RunConfig().dir).glob("*/run.json")
    return [str(file.parent) for file in sorted(found, key=lambda file: file.stat().st_mtime)]


def _end(line: str, code: int) -> NoReturn:
    """Print a line, if stderr takes it, and exit."""
    from tilth.ui.format import plain  # imports numpy

    with suppress(OSError):
        typer.echo(plain(line), err=True)
    raise typer.Exit(code) from None


class RunFirst(TyperGroup):
    """A group whose first word may be a run instead of a command: ``tilth trace RUN`` calls its command ``RUN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Pass what is neither a command nor an option for help to the command ``RUN``."""
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named or not args else ["RUN", *args])
