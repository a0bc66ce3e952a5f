"""``tilth export``, ``tilth ckpt export`` and ``tilth expand``: write a model as a Hugging Face directory."""

import json
import shlex

import typer

from tilth.cli.main import CkptExportCommand, ExpandCommand, ExportCommand
from tilth.models.expand import Sizes
from tilth.runs.export import write_expanded, write_model


def export(options: ExportCommand) -> None:
    """Write the model and print how to load it."""
    made = write_model(options.spec, options.where, adapter=options.adapter)
    typer.echo(f"wrote {made.path}: {made.loading()}")


def ckpt_export(options: CkptExportCommand) -> None:
    """Write weights of a checkpoint and print how to load them, or their files."""
    o = options
    made = write_model(o.spec, o.where, group=o.group, dtype=o.dtype, adapter=o.adapter)
    typer.echo(json.dumps(made.as_dict()) if o.as_json else f"wrote {made.path}: {made.loading()}")


def expand(options: ExpandCommand) -> None:
    """Write the model; print how large it is, how to load it and how to go on."""
    o = options
    sizes = Sizes(*(getattr(o, key) or 0 for key in Sizes._fields))
    made = write_expanded(o.spec, o.where, sizes, untie=o.untie)
    typer.echo(f"wrote {made.path}, with the logits of {o.spec}: {made.loading()}")
    typer.echo(f"train it further: tilth run RECIPE model.path={shlex.quote(str(made.path))} data.tokenizer=")
