"""Arguments and options that several commands take, and their completions at a tab. Imports nothing heavy at start."""

from pathlib import Path
from typing import Annotated

import typer

SHIPPED = Path(__file__).parent.parent / "recipes"


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes; nothing for a path, so that the shell offers files."""
    return [name for name in sorted(p.stem for p in SHIPPED.glob("*.toml")) if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Keys to set, as ``rollout.group=``."""
    return [f"{name}=" for name in keys(incomplete)]


def keys(incomplete: str) -> list[str]:
    from tilth.config.keys import all_names

    return [name for name in all_names() if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Folders of runs in the folder that was typed, or in ``runs``."""
    folder = incomplete.rpartition("/")[0] if "/" in incomplete else "runs"
    found = sorted(path.parent for path in Path(folder or "/").glob("*/run.json"))
    return [str(path) for path in found if str(path).startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="name of a shipped recipe, or path of a TOML file", autocompletion=recipes),
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="keys to change", autocompletion=overrides)
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="directory of a run", autocompletion=runs)]
MODELS = "RUN, RUN@best, RUN@STEP, RUN@ema, a checkpoint's directory, a Hugging Face directory or hub id"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODELS, autocompletion=runs)]
CKPT = "RUN, RUN@best, RUN@STEP, a checkpoint's directory or URL, a folder of them (its newest)"
CheckpointArgument = Annotated[str, typer.Argument(metavar="CKPT", help=CKPT, autocompletion=runs)]
WHERE = "a run, a folder of checkpoints or of runs, or the URL of a folder"
WhereArgument = Annotated[str, typer.Argument(metavar="WHERE", help=WHERE, autocompletion=runs)]
AnyArgument = "any checkpoint (RUN, RUN@STEP, a directory, a URL) or a Hugging Face directory"
JsonOption = Annotated[bool, typer.Option("--json", help="print everything as JSON")]
StepsOption = Annotated[str, typer.Option("--steps", metavar="A:B", help="steps A to B-1, or one step; default: all")]
ATTEMPT = "attempt of a resumed run; default: the newest with a step"
AttemptOption = Annotated[int | None, typer.Option("--attempt", metavar="N", min=1, help=ATTEMPT)]
ColumnsOption = Annotated[list[str] | None, typer.Option(metavar="ROLE=NAME", help="column of a role: prompt=question")]
OutArgument = Annotated[str, typer.Argument(metavar="OUT", help="a new directory")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="softmax temperature; 0: greedy")]
TopPOption = Annotated[float, typer.Option(help="keep the smallest set of tokens with this mass")]
TopKOption = Annotated[int, typer.Option(min=0, help="keep the k likeliest tokens; 0: all")]
STOP = "text that ends a completion; may be repeated; default: the run's"
StopOption = Annotated[list[str] | None, typer.Option(help=STOP)]
SeedOption = Annotated[int, typer.Option(min=0, help="seed of sampling")]
TEMPLATE = "text to prompt: model (its chat template), chatml, a Jinja file, or '' (unchanged); default: the run's"
TemplateOption = Annotated[str | None, typer.Option(help=TEMPLATE)]
