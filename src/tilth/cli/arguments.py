"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from tilth.cli import completion

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="name of a shipped recipe, or path of a TOML file", autocompletion=completion.recipes
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="keys to change", autocompletion=completion.overrides),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="directory of a run", autocompletion=completion.runs)]
MODELS = "RUN, RUN@best, RUN@STEP, RUN@ema, a checkpoint's directory, one of Hugging Face or an id of its hub"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODELS, autocompletion=completion.runs)]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="RUN, RUN@best, RUN@STEP, a checkpoint's directory or URL, a folder of them (its newest)",
        autocompletion=completion.runs,
    ),
]
WhereArgument = Annotated[
    str,
    typer.Argument(
        metavar="WHERE",
        help="a run, a folder of checkpoints or of runs, or the URL of a folder",
        autocompletion=completion.runs,
    ),
]
AnyArgument = "any checkpoint (RUN, RUN@STEP, a directory, a URL) or a Hugging Face directory"
StepsOption = Annotated[
    str, typer.Option("--steps", metavar="A:B", help="steps A to B, B not included; or one; default: all")
]
AttemptOption = Annotated[
    int | None,
    typer.Option("--attempt", metavar="N", min=1, help="of a run that was continued; default: the newest with a step"),
]
