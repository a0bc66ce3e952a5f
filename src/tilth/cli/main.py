"""``tilth``: the commands and their options. Each body lives in a module of its own, imported when it is called.

Whatever Tilth raises on purpose ends in one line on stderr and exit code 2; Ctrl-C in 130.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilth.config.errors import TilthError

USAGE: Any = typer.BadParameter.__mro__[1]
"""click's UsageError, wherever this version of typer has it from."""


class Commands(TyperGroup):
    """Turns errors into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for. ctx: click's context, which typer has of its own in recent versions."""
        try:
            return super().invoke(ctx)
        except TilthError as error:
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(2) from None
        except USAGE as error:
            typer.echo(f"error: {' '.join(error.format_message().split())} (tilth --help)", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted; what was saved is intact, and the same command goes on from there", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    help="Trains language models by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="directory of a run")]


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="name of a shipped recipe, or path of a TOML file")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="keys to change")] = None,
) -> None:
    """Train by a recipe.

    The run goes into a new folder of runs/, or on in an unfinished one of the same recipe. Keys of the recipe are
    changed on the command line, as in: tilth run addition-grpo algorithm.steps=50 run.name=short
    """
    from tilth.cli.run import train

    train(recipe, overrides or [])


@app.command()
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="directory of a run or of a Hugging Face model")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="text to continue")],
    n: Annotated[int, typer.Option("--n", min=1, help="number of completions")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="softmax temperature; 0: greedy")] = 1.0,
    top_p: Annotated[float, typer.Option(help="keep the smallest set of tokens with this mass")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="keep the k likeliest tokens; 0: all")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest completion in tokens; default: 64, or what the context leaves")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends a completion; may be repeated")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of sampling")] = 0,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="show each token with its log-prob")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a completion")] = False,
) -> None:
    """Continue a text by a trained model."""
    from tilth.cli.generate import Wish, speak

    wish = Wish(n, temperature, top_p, top_k, max_tokens, tuple(stop or ()), seed)
    speak(model, prompt, wish, logprobs=logprobs, as_json=as_json)


@app.command()
def export(run: RunArgument, out: Annotated[Path, typer.Argument(metavar="OUT", help="a new directory")]) -> None:
    """Write a run's model for transformers and vLLM."""
    from tilth.cli.export import write_model

    write_model(run, out)


@app.command()
def report(run: RunArgument) -> None:
    """Write report.html of a run, also while it goes on."""
    from tilth.cli.show import write

    write(run)


@app.command()
def show(
    run: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="all numbers as one JSON object")] = False
) -> None:
    """Say how a run stands, also while it goes on."""
    from tilth.cli.show import show_run

    show_run(run, as_json=as_json)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="all findings as one JSON object")] = False,
) -> None:
    """Look at this machine and say what to set."""
    from tilth.cli.doctor import examine

    examine(as_json=as_json)


def main() -> None:
    """Entry point of the ``tilth`` script."""
    app()
