"""Identity of a run: which unfinished run a recipe resumes, and which changes of keys it may have."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilth.config.load import differences, digest, load_recipe, newer_keys
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, RecipeError, StorageError
from tilth.core.files import make_folder, writing
from tilth.runs.files import Lock
from tilth.runs.readers import read_state

_OTHER = {
    "algorithm.correction": "M2PO's loss divides by all tokens now, and by those that it keeps in the version of Tilth "
    "that began it (algorithm.options.denominators=kept with --allow algorithm goes on so)",
    "data": "its data are others",
    "reward.function": "its reward function, or a file that it imports or reads, has changed",
    "data.template": "the file of its template has changed",
    "plugins": "a plugin, or a file that it imports, has changed",
}
"""Messages for inputs that changed; for a model the message has the old and the new one."""


@dataclass(frozen=True)
class Identity:
    """A recipe, with fingerprints of the inputs that it only names."""

    recipe: Recipe
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Key -> fingerprint of the data, the reward function, a template's file, the models that paths lead to."""
    allow: tuple[str, ...] = ()
    """Keys and sections whose values may have changed (``--allow``)."""
    folder: Path | None = None
    """Of the run that a former controller of this command began; None: ``claim`` finds the run."""

    @property
    def digest(self) -> str:
        """Digest of recipe and inputs."""
        if not self.inputs:
            return digest(self.recipe)
        inputs = json.dumps(self.inputs, sort_keys=True).encode()
        return f"{digest(self.recipe)}-{hashlib.blake2b(inputs, digest_size=4).hexdigest()}"

    def same(self, path: Path, state: dict[str, Any]) -> bool:
        """True if the run in this folder has this identity, or differs in allowed keys only."""
        if state["digest"] == self.digest:
            return True
        try:
            return bool(self.allow) and not self._refused(self.changes(path, state))
        except RecipeError:  # written by a version with other keys
            return False

    def changes(self, path: Path, state: dict[str, Any]) -> dict[str, str]:
        """Return key -> message for each difference of the run in this folder; RecipeError if it cannot be read."""
        found = self._other_values(path, state) | self._newer(path, state)
        before = state.get("inputs", {})
        for key in sorted({*before, *self.inputs}):
            was, now = (inputs.get(key, "nothing") for inputs in (before, self.inputs))
            if was != now:
                found.setdefault(key, _OTHER.get(key, f"{key} led to {was} and leads to {now}"))
        return found

    def _other_values(self, path: Path, state: dict[str, Any]) -> dict[str, str]:
        if state["digest"].partition("-")[0] == digest(self.recipe):
            return {}
        # Its plugins may have moved and are not imported; ``changes`` compares their contents.
        return differences(load_recipe(str(path / "recipe.toml"), ["plugins=[]"]), self.recipe)

    def _newer(self, path: Path, state: dict[str, Any]) -> dict[str, str]:
        if state["digest"].partition("-")[0] == digest(self.recipe):
            return {}
        version = state["environment"]["packages"]["tilth"]
        found = newer_keys((path / "recipe.toml").read_text(encoding="utf-8"), self.recipe)
        why = f"is new since the version of Tilth that began it ({version}, {state['started']})"
        return {key: f"{key} {why}, and is {json.dumps(value)}" for key, value in found.items()}

    def same_recipe(self, path: Path, state: dict[str, Any]) -> bool:
        """True if the recipe of the run in this folder has no other values, though it may lack newer keys."""
        try:
            return not self._other_values(path, state)
        except RecipeError:  # written by a version with other keys
            return False

    def began(self, state: Mapping[str, Any]) -> bool:
        """True if the run with this state began with this recipe and these inputs, whatever its updates have changed
        since, of the inputs too."""
        before = state.get("began")
        if before is None or before["recipe"] != digest(self.recipe):
            return False
        free = replace(self, allow=(*self.allow, *state["change"]["allow"]))
        keys = {*before["inputs"], *self.inputs}
        return all(before["inputs"].get(key) == self.inputs.get(key) or free.allows(key) for key in keys)

    def _refused(self, changes: Mapping[str, str]) -> dict[str, str]:
        return {key: message for key, message in changes.items() if not self.allows(key)}

    @property
    def reward(self) -> str:
        """Digest of the reward function, its time-out and the data it scores."""
        inputs = [self.inputs.get(name) for name in ("reward.function", "data")]
        text = json.dumps([self.recipe.reward.function, self.recipe.reward.timeout, inputs])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def data(self) -> str:
        """Digest of the data, and of the keys by which its records become numbered samples."""
        keys = self.recipe.data.model_dump(mode="json", exclude={"loaders", "shadows"}, exclude_defaults=True)
        inputs = {name: value for name, value in self.inputs.items() if name.partition(".")[0] == "data"}
        return hashlib.blake2b(json.dumps([keys, inputs], sort_keys=True).encode(), digest_size=8).hexdigest()

    def allows(self, name: str) -> bool:
        """True if the value of this key may have changed."""
        if any(name == given or name.startswith(f"{given}.") for given in self.allow):
            return True
        return name == "data" and any(given.partition(".")[0] == "data" for given in self.allow)

    def check_name(self) -> None:
        """Raise RecipeError, before anything starts, if ``run.name`` is a run that cannot be resumed as this one."""
        path = Path(self.recipe.run.dir) / self.recipe.run.name
        if not self.recipe.run.name or not (path / "run.json").exists():
            return
        state, name = read_state(path), f"run.name={self.recipe.run.name}: {path}"
        if state["digest"] != self.digest:
            changes = self.changes(path, state) if (path / "recipe.toml").exists() else {}
            refused = self._refused(changes)
            if refused or not changes:
                raise RecipeError(_another(name, path, refused), key=next(iter(refused), "run.json.digest"))
        elif state["state"] == "finished":
            message = f"{name} is finished; choose another name, or make the run longer (--allow algorithm.steps)"
            raise RecipeError(message, key="run.json.state")


def _another(name: str, path: Path, refused: dict[str, str]) -> str:
    what = "; ".join(list(refused.values())[:3]) or "it was resumed with other keys since"
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    allow = " ".join(f"--allow {key}" for key in refused)
    return (
        f"{name} is another run: {what}{more}. Give the same values to resume it, {allow or 'the same data'} to resume "
        f"it with the change, or choose another name (model.path={path} begins with its weights)"
    )


def claim(who: Identity, name: str) -> tuple[Path, Lock]:
    """Return the newest unfinished run in ``run.dir`` that can be resumed, or a new numbered folder; with its lock.

    With ``run.name`` it is that folder, new or unfinished. A folder that another process is writing is skipped, or a
    StorageError if it is named. RecipeError if the named run is finished or another one.
    """
    root = Path(who.recipe.run.dir)
    if who.folder is not None:
        return _named(who.folder, who)
    with writing(root):
        make_folder(root)
    if who.recipe.run.name:
        return _named(root / who.recipe.run.name, who)
    return _resumed(who, name) or _numbered(root, name)


def find(who: Identity, name: str) -> Path | None:
    """Return the folder that ``claim`` would resume; None if it would make a new one."""
    if who.folder is not None or who.recipe.run.name:
        path = who.folder or Path(who.recipe.run.dir) / who.recipe.run.name
        return path if (path / "run.json").exists() and who.same(path, read_state(path)) else None
    if (found := _resumed(who, name)) is None:
        return None
    found[1].release()
    return found[0]


def of_command(who: Identity, name: str) -> Path | None:
    """Return the newest unfinished run that this command resumes, or that it began and updates have changed since; None
    without one, or if another process writes it."""
    for path, state in _unfinished(who, name):
        if who.same(path, state) or who.began(state):
            with suppress(StorageError):  # another process is writing it
                Lock(path / "run.lock").release()
                return path
    return None


def passed_over(who: Identity, name: str) -> list[str]:
    """Return a log line on the newest unfinished run of the same recipe if ``claim`` makes a new one, since something
    that the recipe only names has changed (a plugin, the reward, data), or a key is newer than the run."""
    if who.folder is not None or who.recipe.run.name:
        return []
    for path, state in _unfinished(who, name):
        if not who.same_recipe(path, state):
            continue
        if who.same(path, state):
            return []
        refused = who._refused(who.changes(path, state))
        allow = " ".join(f"--allow {key}" for key in refused)
        line = f"{path} is not finished and not resumed: {'; '.join(refused.values())}; {allow} resumes it"
        return [line] if refused else []  # a kill may have left a recipe without its digest
    return []


def _named(path: Path, who: Identity) -> tuple[Path, Lock]:
    with writing(path):
        make_folder(path)
    lock = Lock(path / "run.lock")
    state = read_state(path) if (path / "run.json").exists() else None
    done = state is not None and state["state"] == "finished" and state["digest"] == who.digest
    if state and (done or not who.same(path, state)):  # a finished run may become longer by allowed keys
        lock.release()
        message = f"run.name={path.name}: {path} is finished or another run; choose another name"
        raise RecipeError(message, key="run.name")
    return path, lock


def _unfinished(who: Identity, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield folder and state of each unfinished run with the name of the recipe, or of its file, newest first."""
    root, given = Path(who.recipe.run.dir), who.recipe.run.name
    there = _runs(root, name) if root.is_dir() and not given else []
    for path in [root / given] if given else [path for _, path in reversed(there)]:
        with suppress(DataError):  # not a run, or a damaged one
            state = read_state(path)
            if state["state"] != "finished":
                yield path, state


def _resumed(who: Identity, name: str) -> tuple[Path, Lock] | None:
    """Return the newest run that this one resumes, with its lock."""
    for path, state in _unfinished(who, name):
        if who.same(path, state):
            with suppress(StorageError):  # another process is writing it
                return path, Lock(path / "run.lock")
    return None


def _numbered(root: Path, name: str) -> tuple[Path, Lock]:
    number = max((n for n, _ in _runs(root, name)), default=0) + 1
    while True:
        path = root / f"{name}-{number:03d}"
        with writing(path):
            try:
                make_folder(path, exist_ok=False)
                return path, Lock(path / "run.lock")
            except FileExistsError:
                number += 1


def _runs(root: Path, name: str) -> Sequence[tuple[int, Path]]:
    """Return numbers and folders ``name-N``, ascending."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    return sorted((int(m[1]), p) for p in root.iterdir() if p.is_dir() and (m := pattern.fullmatch(p.name)))
