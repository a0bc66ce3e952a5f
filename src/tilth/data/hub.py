"""Downloads from the Hugging Face hub, and its datasets by name: ``hf:ORG/NAME[/CONFIG[/SPLIT]]``. Imports no client
before one is asked for."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tilth.core.errors import DataError, TilthError
from tilth.core.lines import replace

PREFIX = "hf:"
PARQUET = "refs/convert/parquet"
"""Branch in which the hub keeps each dataset as Parquet files, CONFIG/SPLIT/NNNN.parquet, whatever its own format."""


class HubError(TilthError):
    """The hub is unreachable and has left nothing in its cache, or it has nothing of this name."""


def download(spec: str, patterns: Sequence[str], **more: Any) -> str:
    """Return the folder of a repository of the hub with the files of these patterns. HubError, with the reason."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(spec, allow_patterns=[*patterns], **more))
    except (OSError, ValueError, _network()) as error:
        raise HubError(_reason(error), key=spec) from error


def _reason(error: BaseException) -> str:
    return str(error.__cause__ or error).strip().partition("\n")[0]


def _network() -> Any:
    """Return the base of the errors of the HTTP client of this version."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


@cache
def dataset_files(source: str) -> list[Path]:
    """Return the files of ``hf:ORG/NAME[/CONFIG[/SPLIT]]`` in order, downloaded if they are not cached. CONFIG may be
    left out if there is but one, or one named default; SPLIT is train.

    Within one process a name is one revision. Raises DataError, which names what there is, or how to get it by hand.
    """
    org, name, config, split = [*(parts := source.removeprefix(PREFIX).split("/")), *[""] * 4][:4]
    if not (2 <= len(parts) <= 4 and all(parts)):
        message = (
            f"{source!r} is no dataset of the hub; write hf:ORG/NAME, hf:ORG/NAME/CONFIG or hf:ORG/NAME/CONFIG/SPLIT"
        )
        raise DataError(message, key=source)
    spec, how = f"{org}/{name}", {"repo_type": "dataset", "revision": PARQUET}
    there = _listed(source, spec, how)
    config = config or next((c for c in ("default", *there) if c in there and (c == "default" or len(there) == 1)), "")
    if config not in there:
        asked = f"has no config {config!r}" if config else "has several configs"
        right = f"; name one, as in hf:{spec}/{sorted(there)[0]}" if there else ""
        message = f"{source!r} {asked}; there is {', '.join(sorted(there)) or 'none'}{right}"
        raise DataError(message, key=f"{source}.config")
    split = split or "train"
    if split not in there[config]:
        message = f"{source!r} has no split {split!r}; there is {', '.join(sorted(there[config]))}"
        raise DataError(f"{message}, as in hf:{spec}/{config}/{sorted(there[config])[0]}", key=f"{source}.split")
    chosen = sorted(there[config][split])
    folder = Path(_had(source, spec, chosen, **how))
    _remember(folder, spec, there)
    if absent := [file for file in chosen if not (folder / file).is_file()]:
        raise _by_hand(source, spec, f"{absent[0]} is not in its cache, and the hub cannot be reached")
    return [folder / file for file in chosen]


def _listed(source: str, spec: str, how: dict[str, str]) -> dict[str, dict[str, list[str]]]:
    """Return config -> split -> files, as the hub lists them, or has listed them for what is cached if it cannot be
    reached: the cache itself may be a part of them."""
    from huggingface_hub import HfApi, constants

    names, why = list[str](), ""
    try:
        if not constants.HF_HUB_OFFLINE:
            found = HfApi().dataset_info(spec, revision=how["revision"])
            names = [file.rfilename for file in found.siblings or ()]
    except (OSError, ValueError, _network()) as error:
        why = _reason(error)
    if not names:
        folder = Path(_had(source, spec, [], why, **how, local_files_only=True))
        try:
            listed: dict[str, dict[str, list[str]]] = json.loads(_listing(folder, spec).read_text(encoding="utf-8"))
            return listed
        except (OSError, ValueError) as error:
            raise _by_hand(source, spec, f"{folder} may lack files of it, whose list is gone") from error
    there: dict[str, dict[str, list[str]]] = {}
    for name in names:
        if name.count("/") == 2 and name.endswith(".parquet"):
            config, split, _ = name.split("/")
            there.setdefault(config, {}).setdefault(split, []).append(name)
    return there


def _listing(folder: Path, spec: str) -> Path:
    """Return the file beside the cache that lists the files of the dataset in the revision of a folder of it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).parent / "tilth" / f"{spec.replace('/', '--')}-{folder.name}.json"


def _remember(folder: Path, spec: str, there: dict[str, dict[str, list[str]]]) -> None:
    if not (path := _listing(folder, spec)).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(there).encode())


def _had(source: str, spec: str, patterns: Sequence[str], why: str = "", **how: Any) -> str:
    """Return the folder of a download. DataError. why: the reason that it names, in place of that of the download."""
    try:
        return download(spec, patterns, **how)
    except HubError as error:
        raise _by_hand(source, spec, why or str(error)) from error


def _by_hand(source: str, spec: str, reason: str) -> DataError:
    return DataError(
        f"{source!r} could not be had from the Hugging Face hub ({reason}). Where the hub can be reached: hf download "
        f"{spec} --repo-type dataset --revision {PARQUET} --local-dir DIR; then data.source='DIR/CONFIG/train'",
        key=source,
    )
