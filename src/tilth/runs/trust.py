"""Trust in the code that a run names: plugins, rewards, environments, the interpreter of an engine.

Opening a run executes none of it unless this user has trained with the same code, or has trusted it by
``tilth --trust``: a folder that holds a run may come from anybody. What counts is the content of the files and of the
user's modules that they import, wherever they lie; a digest of each is in ``$XDG_STATE_HOME/tilth/trusted``
(``~/.local/state``).
"""

import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilth.config.load import load_recipe
from tilth.config.plugins import load_plugins
from tilth.config.schema import Recipe
from tilth.core.errors import PluginError
from tilth.rewards.fingerprint import Imports
from tilth.rewards.verifiers import builtin
from tilth.runs.model_refs import run_settings

TRUST = "TILTH_TRUST"
"""Variable by which ``--trust`` reaches the workers of a command."""


def trust_all() -> None:
    """Trust the code of every run that this process and its workers open, and remember it."""
    os.environ[TRUST] = "1"


def remember(settings: Mapping[str, Any]) -> str:
    """Remember the code that a recipe names, as plain data, as trusted by this user; return a warning if that fails."""
    try:
        for name in _code(settings):
            _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
            (_folder() / _digest(name)).touch()
    except OSError as error:
        return f"cannot remember that you trust the code of this run, so commands on it need --trust: {error}"
    return ""


def check_trust(run: Path, settings: Mapping[str, Any]) -> None:
    """Raise PluginError if the recipe of a run names code that is gone, or that this user does not trust."""
    for name in _code(settings):
        file = name.partition(":")[0]
        if file.endswith(".py") and not os.path.isfile(file):
            message = f"{run} names {file!r} in its recipe, which is gone; put it back, or name its new place there"
            raise PluginError(message, key=f"{os.path.basename(file)}.gone")
    if os.environ.get(TRUST):
        remember(settings)
    elif new := [name for name in _code(settings) if not os.path.exists(_folder() / _digest(name))]:
        raise PluginError(
            f"{run} names code that you have not trained with: {', '.join(new)}; read it, then: tilth --trust COMMAND",
            key="--trust",
        )


def load_code(run: Path | None, settings: Mapping[str, Any]) -> None:
    """Import the plugins of a run, if there is one. PluginError: this user does not trust its code."""
    if run is not None:
        check_trust(run, settings)
        load_plugins(settings.get("plugins", ()))


def load_recipe_of(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe of a run. PluginError: this user does not trust its code."""
    check_trust(run, run_settings(run))
    return load_recipe(str(run / "recipe.toml"), overrides)


def load_named(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe that a user names to look at it; that of a run as ``load_recipe_of`` does."""
    folder = Path(name).parent
    return load_recipe_of(folder, overrides) if (folder / "run.json").is_file() else load_recipe(name, overrides)


def _folder() -> Path:
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home: a folder that never is
        state = os.devnull
    return Path(state) / "tilth" / "trusted"


def _code(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files, modules and programs that a recipe names."""
    yield from settings.get("plugins", ())
    rollout, reward = settings.get("rollout", {}), settings.get("reward", {}).get("function", "")
    for spec in (*([reward] if isinstance(reward, str) else reward), rollout.get("environment", "")):
        if ":" in spec and builtin(spec) is None:
            yield spec
    if python := rollout.get("python"):
        yield f"rollout.python={python}"


def _digest(name: str) -> str:
    """Return a digest of a name and of the user's files that importing it executes."""
    importlib.invalidate_caches()
    imports, path = Imports(), Path(name)
    if name.endswith(".py"):
        imports.search(str(path.parent))
        imports.file("", path)
    elif ":" in name:
        imports.spec(name)
    elif "=" not in name:
        imports.search(os.getcwd())
        imports.module(name)
    label = name if "=" in name else path.name
    found = sorted((file.name, hashlib.blake2b(file.read_bytes()).hexdigest()) for file in imports.files)
    return hashlib.blake2b(repr((label, found)).encode(), digest_size=32).hexdigest()
