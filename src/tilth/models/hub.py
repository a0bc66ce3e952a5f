"""Models of the Hugging Face hub: fetched by their id, ORG/NAME, into the hub's own cache."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from tilth.config.schema import RunConfig
from tilth.core.errors import ModelError

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SHAPE = ["*.json", "*.jinja", "tokenizer*"]
_WEIGHTS = ["model*.safetensors"]  # some have a copy of them under another name


def is_hub_id(spec: str) -> bool:
    """Return whether a text can only be an id of the hub: of two words, the first of which is no folder here.

    Nor is it the folder that runs lie in by default, so that a mistyped run is not asked for over the network.
    """
    first = spec.partition("/")[0]
    return bool(_ID.fullmatch(spec)) and first != RunConfig().dir and not Path(first).exists()


@cache
def fetched(spec: str, *, weights: bool = True) -> str:
    """Return the folder of a model that an id of the hub names, fetched if it is not in the cache; else ``spec``.

    weights: without them only config, tokenizer and templates are fetched. Within one process an id is one revision.
    ModelError where the hub cannot be reached, or has no such model, with how to get it by hand.
    """
    if not is_hub_id(spec):
        return spec
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    network: Any = HfHubHTTPError.__bases__[0]  # of all errors of the client that this version speaks by
    try:
        return snapshot_download(spec, allow_patterns=[*_SHAPE, *(_WEIGHTS if weights else [])])
    except (OSError, ValueError, network) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        name = spec.partition("/")[2]
        raise ModelError(
            f"{spec!r} is no folder here, and could not be had from the Hugging Face hub ({reason}). Where the hub can "
            f"be reached: hf download {spec} --local-dir {name}; then name the folder, {name}",
            key=spec,
        ) from error
