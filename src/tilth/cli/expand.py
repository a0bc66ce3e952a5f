"""``tilth expand``: write a larger model that computes what a trained one does."""

import shlex

import typer

from tilth.cli.main import ExpandCommand
from tilth.models.expand import Sizes
from tilth.runs.export import write_expanded


def expand(options: ExpandCommand) -> None:
    """Write the model; print how large it is, how to load it and how to go on."""
    o = options
    sizes = Sizes(*(getattr(o, key) or 0 for key in Sizes._fields))
    made = write_expanded(o.spec, o.where, sizes, untie=o.untie)
    typer.echo(f"wrote {made.path}, with the logits of {o.spec}: {made.loading()}")
    typer.echo(f"train it further: tilth run RECIPE model.path={shlex.quote(str(made.path))} data.tokenizer=")
