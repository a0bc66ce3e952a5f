"""``tilth export`` and ``tilth ckpt export``: write a model as a Hugging Face directory."""

import json

import typer

from tilth.cli.main import CkptExportCommand, ExportCommand
from tilth.runs.export import write_model


def export(options: ExportCommand) -> None:
    """Write the model and print how to load it."""
    made = write_model(options.spec, options.where, adapter=options.adapter)
    typer.echo(f"wrote {made.path}: {made.loading()}")


def ckpt_export(options: CkptExportCommand) -> None:
    """Write weights of a checkpoint and print how to load them, or their files."""
    o = options
    made = write_model(o.spec, o.where, group=o.group, dtype=o.dtype, adapter=o.adapter)
    typer.echo(json.dumps(made.as_dict()) if o.as_json else f"wrote {made.path}: {made.loading()}")
