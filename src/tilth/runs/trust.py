"""Trust in the code that a run names: plugins, rewards, environments, the interpreter of an engine.

Opening a run executes none of it unless this user has trained with the same code, or has trusted it by
``tilth --trust``: a folder that holds a run may come from anybody. What counts is the content of the files and of the
user's modules that they import, wherever they lie; a digest of each is in ``$XDG_STATE_HOME/tilth/trusted``
(``~/.local/state``).
"""

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilth.config.load import dump_value, load_recipe
from tilth.config.plugins import load_plugins
from tilth.config.schema import Recipe
from tilth.core.errors import PluginError
from tilth.data.formats import is_source
from tilth.rewards.fingerprint import imports_of
from tilth.rewards.verifiers import builtin
from tilth.runs.readers import read_state, run_settings

TRUST = "TILTH_TRUST"
"""Variable by which ``--trust`` reaches the workers of a command."""


def trust_all() -> None:
    """Trust the code of every run that this process and its workers open, and remember it."""
    os.environ[TRUST] = "1"


def remember(settings: Mapping[str, Any]) -> str:
    """Remember the code that a recipe names, as plain data, as trusted by this user; return a warning if that fails."""
    try:
        for digest in _digests(settings, _files(_code(settings))).values():
            _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
            (_folder() / digest).touch()
    except OSError as error:
        return f"cannot remember that you trust the code of this run, so commands on it need --trust: {error}"
    return ""


def check_trust(run: Path, settings: Mapping[str, Any]) -> None:
    """Raise PluginError if the recipe of a run names code that is gone, or that this user does not trust."""
    names = _code(settings)
    for name in names:
        file = name.rpartition(":")[0] or name
        if file.endswith(".py") and not Path(file).expanduser().is_file():
            here = "is gone" if os.path.isabs(file) else f"is not in {os.getcwd()}: go where it was, {_begun_in(run)}"
            message = f"{run} names {file!r} in its recipe, which {here}; put it back, or name its new place there"
            raise PluginError(message, key=f"{os.path.basename(file)}.gone")
    files = _files(names)
    if os.environ.get(TRUST):
        remember(settings)
    elif new := [name for name, digest in _digests(settings, files).items() if not (_folder() / digest).exists()]:
        raise PluginError(
            f"{run} names code that you have not trained with: {', '.join(new)}; read it, then: tilth --trust COMMAND",
            key="--trust",
        )
    for source in {file for one in files.values() for file in one}:
        _drop_bytecode(source)


def _drop_bytecode(file: Path) -> None:
    """Delete the bytecode beside a source, which Python would execute in its place. PluginError."""
    cached = Path(importlib.util.cache_from_source(str(file)))
    try:
        cached.unlink(missing_ok=True)
    except OSError as error:
        if cached.lstat().st_uid == file.lstat().st_uid == 0:  # who could change this could change anything
            return
        message = f"{cached} may hold other code than {file.name}, and cannot be deleted: {error.strerror}; delete it"
        raise PluginError(message, key=f"{cached.name}.delete") from error


def load_code(run: Path | None, settings: Mapping[str, Any]) -> None:
    """Import the plugins of a run, if there is one. PluginError: this user does not trust its code."""
    if run is not None:
        check_trust(run, settings)
        load_plugins(settings.get("plugins", ()))


def load_recipe_of(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe of a run; files of data that are not here are those of the folder where it last began.
    PluginError: this user does not trust its code."""
    check_trust(run, settings := run_settings(run))
    return load_recipe(str(run / "recipe.toml"), [*_moved(run, settings.get("data", {})), *overrides])


def _begun_in(run: Path) -> str:
    """Return the folder in which the newest attempt of a run began; one of an earlier version does not know it."""
    state = read_state(run) if (run / "run.json").is_file() else {}
    return str(state.get("folder", "where the run was begun"))


def _moved(run: Path, data: Mapping[str, Any]) -> list[str]:
    """Return KEY=VALUE for each key of [data] with a file that is not here, but where the run began."""
    found = {key: data[key] for key in ("source", "heldout", "template", "tokenizer") if key in data}
    moved: dict[str, Any] = {key: place for key, name in found.items() if (place := _place(run, str(name))) != name}
    parts = [
        {**part, **{k: _place(run, str(part[k])) for k in ("source", "template") if k in part}}
        for part in data.get("mixture", ())
    ]
    if parts != list(data.get("mixture", ())):
        moved["mixture"] = parts
    return [f"data.{key}={dump_value(value)}" for key, value in moved.items()]


def _place(run: Path, name: str) -> str:
    """Return the name of a file: where the run began, if it is there and not here."""
    if {".", "/"} & {*name} and not is_source(name) and is_source(place := os.path.join(_begun_in(run), name)):
        return place
    return name


def load_named(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe that a user names to look at it; that of a run as ``load_recipe_of`` does."""
    folder = Path(name).parent
    return load_recipe_of(folder, overrides) if (folder / "run.json").is_file() else load_recipe(name, overrides)


def _folder() -> Path:
    try:
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        state = state if state.is_absolute() else Path.home() / ".local" / "state"  # else a run could bring it along
    except RuntimeError:  # a user without a home: a folder that never is
        state = Path(os.devnull)
    return state / "tilth" / "trusted"


def _code(settings: Mapping[str, Any]) -> list[str]:
    """Return the files and modules that a recipe names, with the functions and classes in them."""
    reward, game = (
        settings.get(name, {}).get(key, "") for name, key in (("reward", "function"), ("rollout", "environment"))
    )
    named = [*([reward] if isinstance(reward, str) else reward), game]
    return [*settings.get("plugins", ()), *(spec for spec in named if ":" in spec and builtin(spec) is None)]


def _digests(settings: Mapping[str, Any], files: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Return a digest of all that a recipe names and that executes code: of files and modules with what they import,
    of the interpreter and the options of an engine. files: of the code that it names."""
    rollout = settings.get("rollout", {})
    found = {name: (Path(name).name, paths) for name, paths in files.items()}
    found |= {
        text: (text, ())
        for key in ("python", "options")
        if rollout.get(key) and (text := f"rollout.{key}={rollout[key]}")
    }
    return {name: _digest(*code) for name, code in found.items()}


def _files(names: Sequence[str]) -> dict[str, Sequence[Path]]:
    """Return the files of each: as found beside it first, and in the order in which a process searches the folders."""
    each = zip(names, imports_of(names), imports_of(names, own_first=False), strict=True)
    return {name: list(dict.fromkeys([*own.files, *others.files])) for name, own, others in each}


def _digest(label: str, files: Sequence[Path]) -> str:
    contents = sorted((file.name, hashlib.blake2b(file.read_bytes()).hexdigest()) for file in files)
    return hashlib.blake2b(repr((label, contents)).encode(), digest_size=32).hexdigest()
