"""Updates of a running run: which keys may change, the requests in its folder, and what a controller has of them.

RUN/updates/0001.json     a request: what changes, who asked, and what became of it
RUN/updates/code/DIGEST/  plugins as they were when the run began, or when an update brought them
"""

import getpass
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tilth.config.keys import all_names, fixed
from tilth.config.roles import roles_of
from tilth.config.schema import Recipe
from tilth.core.errors import PluginError, RecipeError, parsing
from tilth.core.files import create, make_folder, writing
from tilth.core.write_queue import settle
from tilth.rewards.fingerprint import files_fingerprint, imports_of

UPDATES = "updates"
"""Folder of a run with its updates."""
LATEST = 24 * 3600.0
"""Seconds after which an update is taken without a restart to wait for (ByteRobust, arXiv 2509.16293)."""
State = Literal["waiting", "in force", "undone"]
"""waiting: until the first commit with it."""
PLUGIN_KEYS = ("plugins", "reward.function", "rollout.environment")
"""Inputs of a run that other plugins change."""
CODE = {"code": "the code of Tilth"}
"""Changes of an update without keys and plugins."""
FIXED: Mapping[str, str] = fixed()
"""Keys and sections that make another run -> why."""


@dataclass(frozen=True)
class RecipeChange:
    """Difference of a controller's recipe from that of its command, all updates together.

    number: of the newest update in it, 0: none; overrides: KEY=VALUE; allow: keys that may have changed in the run.
    """

    number: int = 0
    overrides: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RecipeChange":
        """Return it from its JSON."""
        return cls(values["number"], tuple(values["overrides"]), tuple(values["allow"]))


NONE = RecipeChange()


@dataclass(frozen=True)
class Update:
    """Request for other keys or other code. changes: key -> message; restarts: ``guard.restarts`` with it.

    urgent: at the next commit, else at the next restart. why: it was undone; step: after which it was taken;
    hang_after: ``guard.hang_after`` with it, 0 in a request of an earlier version. back: KEY=VALUE of what it takes
    away, if it is one for fewer workers; grows: the number of such a one that it takes back, 0: none.
    """

    change: RecipeChange
    changes: Mapping[str, str]
    restarts: int
    urgent: bool
    by: str
    time: str
    state: State = "waiting"
    why: str = ""
    step: int = 0
    hang_after: float = 0.0
    back: tuple[str, ...] = ()
    grows: int = 0

    @property
    def number(self) -> int:
        """Number of the update in its run, from 1."""
        return self.change.number

    @property
    def age(self) -> float:
        """Seconds since the request."""
        return (datetime.now(UTC) - datetime.fromisoformat(self.time)).total_seconds()

    @property
    def renews_tilth(self) -> bool:
        """True if the code of Tilth is imported again with it."""
        return CODE.keys() <= self.changes.keys()

    def title(self) -> str:
        """Return number and changes in a line."""
        return f"update {self.number} ({'; '.join(self.changes.values())})"

    def dump(self) -> bytes:
        """Return it as JSON."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Update":
        """Return it from its JSON."""
        lists = {"change": RecipeChange.of(values["change"]), "back": tuple(values.get("back", ()))}
        state = "waiting" if values["state"] == "trying" else values["state"]  # of an earlier version
        return cls(**{**values, **lists, "state": state})


def path_of(run: Path, number: int) -> Path:
    """Return the file of a request."""
    return run / UPDATES / f"{number:04d}.json"


def read_updates(run: str | Path) -> list[Update]:
    """Return the updates of a run, oldest first. DataError: one is torn, or none."""
    settle(Path(run) / UPDATES)
    found = list[Update]()
    for file in sorted((Path(run) / UPDATES).glob("[0-9]*.json")):
        with parsing(file):
            found.append(Update.of(json.loads(file.read_bytes())))
    return found


def shrunk(updates: Sequence[Update]) -> Update | None:
    """Return the newest update for fewer workers that is in force, and not taken back since, nor its keys changed."""
    found = list[Update]()
    for one in updates:
        if one.state != "in force":
            continue
        if one.grows:
            found = [other for other in found if other.number != one.grows]
        elif one.back:
            found.append(one)
        else:
            found = [other for other in found if not {word.partition("=")[0] for word in other.back} & set(one.changes)]
    return found[-1] if found else None


def tries(updates: Sequence[Update], lost: Update) -> int:
    """Return how often the run has tried to take this update for fewer workers back."""
    return sum(one.grows == lost.number for one in updates)


def waiting(run: str | Path) -> list[Update]:
    """Return the updates that no step was committed with yet."""
    return [one for one in read_updates(run) if one.state == "waiting"]


def check(before: Recipe, after: Recipe, changes: Mapping[str, str]) -> None:
    """Raise RecipeError for a change that makes another run. changes: key -> message."""
    if "plugins" in changes:
        message = (
            f"{changes['plugins']}: code comes as --plugin FILE, which replaces the plugin of that name or adds one"
        )
        raise RecipeError(message, key="plugins")
    for name, message in changes.items():
        known = [one for one in FIXED if name == one or name.startswith(f"{one}.")]
        if known and (why := FIXED[max(known, key=len)]):
            raise RecipeError(
                f"{message}: that is another run, since {why}; begin one (model.path=RUN begins with the "
                "weights of this one)",
                key=name,
            )
    had, has = roles_of(before), roles_of(after)
    if changed := sorted(had.keys() ^ has.keys()):
        key = next(iter(changes), "plugins")
        raise RecipeError(
            f"{'; '.join(changes.values())}: the run would {'lose' if changed[0] in had else 'need'} the role "
            f"{changed[0]}, and roles stay as they are; begin another run (model.path=RUN begins with the weights of "
            "this one)",
            key=key,
        )


def allowed(changes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys, or tables of keys, that ``--allow`` knows for these changes."""
    known, found = set(all_names()), list[str]()
    for name in changes:
        while name and name not in known:
            name = name.rpartition(".")[0]
        found += [name] if name else []
    return tuple(dict.fromkeys(found))


def request(run: Path, update: Update) -> Update:
    """Write a request with the next number in one piece, and return it. StorageError."""
    folder = run / UPDATES
    with writing(folder):
        make_folder(folder)
        while True:
            numbers = [int(file.stem) for file in folder.glob("[0-9]*.json")]
            new = replace(update, change=replace(update.change, number=max(numbers, default=0) + 1))
            if create(path_of(run, new.number), new.dump()):  # else another one was faster
                return new


def asked_by() -> str:
    """Return user and machine of this process."""
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # a user without a name
        user = getpass.getuser()
    return f"{user}@{os.uname().nodename}"


def keep_code(run: Path, plugins: Sequence[str]) -> tuple[str, ...]:
    """Copy plugins that are files, with what they import from each other's folders, into the run; return where they
    are.

    Names of modules stay. PluginError for a file that is not there, StorageError.
    """
    files = [name for name in plugins if name.endswith(".py")]
    if not files:
        return tuple(plugins)
    if missing := [name for name in files if not Path(name).is_file()]:
        raise PluginError(f"no file {missing[0]}", key=Path(missing[0]).name)
    folder = (run / UPDATES / "code" / files_fingerprint(files)).resolve()
    places = {name: folder / str(index) / Path(name).name for index, name in enumerate(files)}
    with writing(folder):
        for source, target in _with_neighbours(places):
            if not target.exists():
                make_folder(target.parent)
                target.write_bytes(source.read_bytes())
    return tuple(str(places.get(name, name)) for name in plugins)


def _with_neighbours(places: Mapping[str, Path]) -> Iterator[tuple[Path, Path]]:
    """Yield source and place of plugins, and of the files that they import from the folder of any of them."""
    homes = [(Path(name).resolve().parent, place.parent) for name, place in places.items()]
    for imports in (*imports_of([*places]), *imports_of([*places], own_first=False)):
        for file in map(Path.resolve, imports.files):
            yield from ((file, place / file.relative_to(home)) for home, place in homes if file.is_relative_to(home))
