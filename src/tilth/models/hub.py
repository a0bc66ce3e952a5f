"""Models of the Hugging Face hub, downloaded by id, ORG/NAME, into the hub's cache."""

import difflib
import re
from functools import cache
from pathlib import Path

from tilth.config.schema import RunConfig
from tilth.core.errors import ModelError
from tilth.data.hub import HubError, download

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SHAPE = ["*.json", "*.jinja", "tokenizer*"]
_WEIGHTS = ["model*.safetensors"]  # some have a copy of them under another name


def is_hub_id(spec: str) -> bool:
    """Return True for an id of the hub: two words, the first of which is neither a folder here nor the default folder
    of runs, so that a mistyped run is not requested over the network."""
    first = spec.partition("/")[0]
    return bool(_ID.fullmatch(spec)) and first != RunConfig().dir and not Path(first).exists()


def check_place(spec: str) -> None:
    """Raise ModelError, with the nearest name, for a model whose place is no folder, no URL and no id of the hub."""
    place = Path(spec) if Path(spec).exists() else Path(spec.rpartition("@")[0] or spec)
    if "://" not in spec and not is_hub_id(spec) and not place.is_dir():
        raise missing(place)


def missing(place: Path) -> ModelError:
    """Return the error for a folder that is not there, with the nearest name."""
    beside = [found.name for found in place.parent.iterdir() if found.is_dir()] if place.parent.is_dir() else []
    near = difflib.get_close_matches(place.name, beside, 1)
    hint = f"; did you mean {str(place.with_name(near[0]))!r}?" if near else ""
    return ModelError(f"no model directory {str(place)!r}{hint}", key=place.name)


@cache
def fetched(spec: str, *, weights: bool = True) -> str:
    """Return the folder of a hub id, downloaded if it is not cached; any other ``spec`` as it is.

    weights: False downloads only config, tokenizer and templates. Within one process an id is one revision. Raises
    ModelError, with the command to download by hand, if the hub is unreachable or has no such model.
    """
    if not is_hub_id(spec):
        return spec
    try:
        return download(spec, [*_SHAPE, *(_WEIGHTS if weights else [])])
    except HubError as error:
        name = spec.partition("/")[2]
        raise ModelError(
            f"{spec!r} is no folder here, and could not be had from the Hugging Face hub ({error}). Where the hub can "
            f"be reached: hf download {spec} --local-dir {name}; then name the folder, {name}",
            key=spec,
        ) from error
