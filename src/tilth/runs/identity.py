"""Which run a recipe goes on with: an unfinished one of the same work, or of work that differs in allowed keys only."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilth.config.load import differences, digest, load_recipe
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, RecipeError, StorageError
from tilth.core.target import make_folder, writing
from tilth.runs.files import Lock
from tilth.runs.readers import read_state

_OTHER = {
    "data": "its data are others",
    "reward.function": "its reward function, or what that imports or reads, is another one",
    "data.template": "the file of its template is another one",
}
"""What is said of an input that changed; of one that is a model, what its key led to and leads to."""


@dataclass(frozen=True)
class Identity:
    """What a run is: its recipe, and what that does not hold."""

    recipe: Recipe
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Key -> fingerprint: of the data, the reward function, a template's file, the models that paths lead to."""
    allow: tuple[str, ...] = ()
    """Keys and sections in which the run that goes on may have had other values (``--allow``)."""

    @property
    def digest(self) -> str:
        """Tells this work from any other."""
        if not self.inputs:
            return digest(self.recipe)
        said = json.dumps(self.inputs, sort_keys=True).encode()
        return f"{digest(self.recipe)}-{hashlib.blake2b(said, digest_size=4).hexdigest()}"

    def same(self, path: Path, state: dict[str, Any]) -> bool:
        """Whether the run in this folder is this one, or may become it."""
        if state["digest"] == self.digest:
            return True
        return bool(self.allow) and not any(self._refused(path, state))

    def changes(self, path: Path, state: dict[str, Any]) -> dict[str, str]:
        """In which keys the run in this folder is another one, each in words; RecipeError if it cannot be read."""
        found = {}
        if state["digest"].partition("-")[0] != digest(self.recipe):
            # Its plugins, which may have moved, are not imported: what is in them is compared below.
            found = differences(load_recipe(str(path / "recipe.toml"), ["plugins=[]"]), self.recipe)
        before = state.get("inputs", {})
        for key in sorted({*before, *self.inputs}):
            was, now = (inputs.get(key, "nothing") for inputs in (before, self.inputs))
            if was != now:
                found.setdefault(key, _OTHER.get(key, f"{key} led to {was} and leads to {now}"))
        return found

    def _refused(self, path: Path, state: dict[str, Any]) -> Iterator[str]:
        try:
            changes = self.changes(path, state)
        except RecipeError as error:  # of a time when recipes had other keys
            yield str(error)
            return
        for name, words in changes.items():
            if not self.allows(name):
                yield words

    @property
    def reward(self) -> str:
        """Tells this reward from any other: its function, the time it has and the data that it is asked about."""
        inputs = [self.inputs.get(name) for name in ("reward.function", "data")]
        said = json.dumps([self.recipe.reward.function, self.recipe.reward.timeout, inputs])
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def allows(self, name: str) -> bool:
        """Whether the run that goes on may have had another value of this key."""
        if any(name == given or name.startswith(f"{given}.") for given in self.allow):
            return True
        return name == "data" and any(given.partition(".")[0] == "data" for given in self.allow)

    def check_name(self) -> None:
        """RecipeError, before anything is started, if ``run.name`` is taken by a run that this cannot go on with."""
        path = Path(self.recipe.run.dir) / self.recipe.run.name
        if not self.recipe.run.name or not (path / "run.json").exists():
            return
        state, name = read_state(path), f"run.name={self.recipe.run.name}: {path}"
        if state["digest"] != self.digest:
            changes = self.changes(path, state) if (path / "recipe.toml").exists() else {}
            refused = {key: words for key, words in changes.items() if not self.allows(key)}
            if refused or not changes:
                raise RecipeError(_another(name, path, refused), key=next(iter(refused), "run.json.digest"))
        elif state["state"] == "finished":
            raise RecipeError(
                f"{name} is finished; choose another name, or make it longer (--allow algorithm.steps)",
                key="run.json.state",
            )


def _another(name: str, path: Path, refused: dict[str, str]) -> str:
    what = "; ".join(list(refused.values())[:3]) or "it has gone on with other keys since"
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    allow = " ".join(f"--allow {key}" for key in refused)
    return (
        f"{name} is another run: {what}{more}. Give the same values to go on with it, {allow or 'the same data'} to go "
        f"on with it changed, or choose another name (model.path={path} would begin with its weights)"
    )


def claim(who: Identity, name: str) -> tuple[Path, Lock]:
    """The newest unfinished run in ``run.dir`` that can be gone on with, or a new numbered folder; locked.

    With ``run.name`` it is that folder, new or unfinished. A folder that another process is writing is passed over;
    named, it is a StorageError that says who writes it. RecipeError if the named run is finished or another's.
    """
    root = Path(who.recipe.run.dir)
    with writing(root):
        make_folder(root)
    if who.recipe.run.name:
        return _named(root / who.recipe.run.name, who)
    return _unfinished(root, name, who) or _numbered(root, name)


def find(who: Identity, name: str) -> Path | None:
    """The folder that ``claim`` would go on in, as things stand; None if it would make a new one."""
    root = Path(who.recipe.run.dir)
    if who.recipe.run.name:
        path = root / who.recipe.run.name
        state = read_state(path) if (path / "run.json").exists() else None
        return path if state and who.same(path, state) else None
    found = _unfinished(root, name, who) if root.is_dir() else None
    if found is None:
        return None
    found[1].release()
    return found[0]


def _named(path: Path, who: Identity) -> tuple[Path, Lock]:
    with writing(path):
        make_folder(path)
    lock = Lock(path / "run.lock")
    state = read_state(path) if (path / "run.json").exists() else None
    done = state is not None and state["state"] == "finished" and state["digest"] == who.digest
    if state and (done or not who.same(path, state)):  # a finished one may become longer, by keys that are allowed
        lock.release()
        raise RecipeError(
            f"run.name={path.name}: {path} is finished or another run; choose another name", key="run.name"
        )
    return path, lock


def _unfinished(root: Path, name: str, who: Identity) -> tuple[Path, Lock] | None:
    for _, path in reversed(_runs(root, name)):
        try:
            state = read_state(path)
        except DataError:  # no run, or a broken one: nothing to continue
            continue
        if state["state"] == "finished" or not who.same(path, state):
            continue
        try:
            return path, Lock(path / "run.lock")
        except StorageError:  # somebody is writing it
            continue
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
    """Folders ``name-N`` with their numbers, in order."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    return sorted((int(m[1]), p) for p in root.iterdir() if p.is_dir() and (m := pattern.fullmatch(p.name)))
