"""The checkpoints under a root: which are complete, which is the newest or the best, which go, which are damaged.

On a local disk a checkpoint is made as ``step-000100.tmp-TOKEN`` and becomes ``step-000100`` by a rename. Where that
step exists already, the old one is ``step-000100.replaced`` between two renames, and counts until the new one is in
place. So a ``step-000100`` without a manifest is damage, and never a save under way. A store of objects cannot rename:
there the files go to ``step-000100`` at once, under names with the token of their save, and it is a checkpoint when its
manifest is put, which comes last.
"""

import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from tilth.checkpoint.manifest import NAME, load_manifest
from tilth.checkpoint.stages import staged
from tilth.checkpoint.storage import Location, Storage, join, split, storage_of
from tilth.core.errors import CheckpointError, StorageError

BEST = "best.json"
"""Beside the checkpoints: which one did best by evaluation ({"step", "metric", "value"})."""
DAMAGED = "DAMAGED"
"""In a checkpoint that failed: the reason. It is never taken again."""
MISSING = f"{NAME} is missing"
"""What is wrong with ``bare`` ones."""

State = Literal["complete", "damaged", "replaced", "unfinished"]

_PATTERN = re.compile(r"step-(\d{6,})(\.replaced)?")
_ANY = re.compile(r"step-(\d{6,})(?:\.(?:(tmp)-.*|(replaced)|(damaged)))?")
_REPORTS = ".reports"


def step_name(step: int) -> str:
    """The directory of a step."""
    return f"step-{step:06d}"


def step_of(path: Location) -> int | None:
    """The step that a directory's name promises, or None if it is not the name of a checkpoint."""
    match = _PATTERN.fullmatch(split(path)[1])
    return int(match[1]) if match else None


# ---- what is there ----


class FoundCheckpoint(NamedTuple):
    """Something under a root that is a checkpoint, was one or was to become one."""

    path: Location
    step: int
    state: State
    reason: str = ""
    """Why it is damaged."""


def listing(root: Location) -> list[FoundCheckpoint]:
    """All that is there, by step and name. ``replaced``: an old one whose successor of the same step is in place."""
    storage = storage_of(root)
    taken = set(_complete(storage).values())
    found = []
    for name in storage.names():
        if match := _ANY.fullmatch(name):
            state = _state(storage, name, match, taken)
            reason = _reason(storage, name) if state == "damaged" else ""
            found.append(FoundCheckpoint(join(root, name), int(match[1]), state, reason))
    return sorted(found, key=lambda entry: (entry.step, str(entry.path)))


def _state(storage: Storage, name: str, match: re.Match[str], taken: set[str]) -> State:
    _, temporary, replaced, damaged = match.groups()
    if name in taken:
        return "complete"
    if damaged or (not temporary and storage.size(f"{name}/{DAMAGED}") is not None):
        return "damaged"
    if temporary:
        return "unfinished"
    if storage.size(f"{name}/{NAME}") is not None:
        return "replaced" if replaced else "complete"  # complete only since ``taken`` was looked up
    return "damaged" if _is_bare(storage, name) else "unfinished"


def _is_bare(storage: Storage, name: str) -> bool:
    """Whether it is as in ``bare``. One that was just removed or put aside is not."""
    plain = not storage.remote and step_of(Path(name)) is not None and "." not in name
    if not plain or storage.size(f"{name}/{DAMAGED}") is not None:
        return False
    return storage.size(f"{name}/{NAME}") is None and name in storage.names()


def _reason(storage: Storage, name: str) -> str:
    if _is_bare(storage, name):
        return MISSING
    try:
        return storage.read(f"{name}/{DAMAGED}").decode(errors="replace").strip()
    except OSError as error:
        return f"its reason cannot be read: {error.strerror or error}"


@overload
def bare(root: Path) -> list[Path]: ...
@overload
def bare(root: Location) -> list[Any]: ...
def bare(root: Location) -> list[Any]:
    """Folders of steps on a local disk whose manifest is gone, the oldest first: nothing but damage leaves such."""
    storage = storage_of(root)
    found = {int(match[1]): name for name in storage.names() if (match := _PATTERN.fullmatch(name)) and not match[2]}
    return [join(root, name) for _, name in sorted(found.items()) if _is_bare(storage, name)]


def _complete(storage: Storage) -> dict[int, str]:
    """Names of the complete checkpoints by step."""
    found = {}
    for name in reversed(storage.names()):  # step-000100 comes behind step-000100.replaced and has precedence
        match = _PATTERN.fullmatch(name)
        if match and NAME in (there := storage.names(name)) and DAMAGED not in there:
            found[int(match[1])] = name
    return dict(sorted(found.items()))


@overload
def complete(root: Path) -> list[Path]: ...
@overload
def complete(root: Location) -> list[Any]: ...
def complete(root: Location) -> list[Any]:
    """The complete checkpoints under a root, the oldest first; paths, or URLs where the root is one."""
    return [join(root, name) for name in _complete(storage_of(root)).values()]


@overload
def latest(root: Path) -> Path | None: ...
@overload
def latest(root: Location) -> Any: ...
def latest(root: Location) -> Any:
    """The complete checkpoint of the greatest step under ``root``, or None. What a crashed save left is ignored.

    Whether its bytes are intact shows when it is read: a damaged newest checkpoint is never passed over in silence.
    """
    found = complete(root)
    return found[-1] if found else None


# ---- the best ----


def mark_best(root: Location, best: Mapping[str, Any] | None) -> None:
    """Write down which checkpoint did best, {"step", "metric", "value"}, as a whole and durably; None: none did."""
    storage = storage_of(root)
    try:
        if best is None:
            storage.remove(BEST)
        else:
            storage.put(BEST, (json.dumps(dict(best)) + "\n").encode())
    except OSError as error:
        message = f"{join(root, BEST)} cannot be written: {error.strerror or error}"
        raise StorageError(message, key=BEST) from error


def note_best(root: Location, best: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``mark_best``, unless there is no checkpoint of that step (its save failed): then what was marked before stays.

    Returns what is marked now.
    """
    if best is not None and best["step"] not in _complete(storage_of(root)):
        best = read_best(root)
    mark_best(root, best)
    return None if best is None else dict(best)


def read_best(root: Location) -> dict[str, Any] | None:
    """What ``mark_best`` wrote; None if nothing was marked. CheckpointError for a file that says something else."""
    file = join(root, BEST)
    try:
        found = json.loads(storage_of(root).read(BEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", key=BEST) from error
    if not isinstance(found, dict) or type(found.get("step")) is not int or found["step"] < 0:
        raise CheckpointError(f"{file} does not name the step of a checkpoint", key=f"{BEST}.step")
    if not isinstance(found.get("metric"), str) or type(found.get("value")) not in (int, float):
        raise CheckpointError(f"{file} does not say which metric had which value", key=f"{BEST}.metric")
    return found


# ---- what goes ----


@overload
def superfluous(root: Path, keep: int, every: int = 0, bad: Collection[str] = ()) -> list[Path]: ...
@overload
def superfluous(root: Location, keep: int, every: int = 0, bad: Collection[str] = ()) -> list[Any]: ...
def superfluous(root: Location, keep: int, every: int = 0, bad: Collection[str] = ()) -> list[Any]:
    """Checkpoints that need not be kept.

    Those stay: the ``keep`` newest complete ones (at least one), those whose step is a multiple of ``every`` (0: none),
    and the best. Damaged ones go when they are older than all of the newest; so do those that have a manifest but are
    known to be ``bad`` (paths or URLs, as texts), which are not counted.
    """
    storage, best = storage_of(root), read_best(root)
    found = _complete(storage)
    newest = [step for step, name in found.items() if str(join(root, name)) not in bad][-max(1, keep) :]
    if not newest:
        return []
    kept = {*newest, *([best["step"]] if best else []), *(s for s in found if every and s % every == 0)}
    old = [name for s, name in found.items() if s not in kept and (s < newest[0] or str(join(root, name)) not in bad)]
    old += [name for step, name in _damaged(storage) if step < newest[0]]
    return [join(root, name) for name in old]


@overload
def prune(root: Path, keep: int, every: int = 0) -> list[Path]: ...
@overload
def prune(root: Location, keep: int, every: int = 0) -> list[Any]: ...
def prune(root: Location, keep: int, every: int = 0) -> list[Any]:
    """Remove what is ``superfluous``; returns the removed. StorageError if one cannot be removed."""
    old = superfluous(root, keep, every)
    for path in old:
        discard(path)
    return old


def discard(path: Location) -> None:
    """Remove a checkpoint, or what is left of one; interrupted, it is none any more. StorageError."""
    root, name = split(path)
    with staged("retention", str(path)):
        _remove(storage_of(root), name)


def _damaged(storage: Storage) -> Iterator[tuple[int, str]]:
    for name in storage.names():
        match = _ANY.fullmatch(name)
        if match and _state(storage, name, match, set()) == "damaged":
            yield int(match[1]), name


def _remove(storage: Storage, name: str) -> None:
    """Whenever this is interrupted, what is left is no checkpoint and is removed by the next save."""
    if storage.remote:
        storage.remove(f"{name}/{NAME}")
        storage.remove(name)
    else:
        doomed = f"{name.partition('.')[0]}.tmp-{secrets.token_hex(4)}"
        storage.publish(name, doomed)
        storage.remove(doomed)


@overload
def quarantine(path: Path, reason: str) -> Path: ...
@overload
def quarantine(path: Location, reason: str) -> Any: ...
def quarantine(path: Location, reason: str) -> Any:
    """Put a damaged checkpoint out of the way, with the reason in it; where it is now. StorageError.

    On a local disk ``step-000100`` becomes ``step-000100.damaged``; in a store it stays and is marked.
    """
    root, name = split(path)
    storage, aside = storage_of(root), f"{name.partition('.')[0]}.damaged"
    try:
        storage.put(f"{name}/{DAMAGED}", f"{reason}\n".encode())
        if storage.remote:
            return path
        storage.remove(aside)
        storage.publish(name, aside)
    except OSError as error:
        message = f"damaged checkpoint {path} cannot be put aside: {error.strerror or error}"
        raise StorageError(message, key=name) from error
    return join(root, aside)


# ---- a save under way ----


@dataclass(frozen=True)
class Attempt:
    """A save that is not a checkpoint yet: where its files are, relative to the root."""

    root: Location
    step: int
    token: str

    @classmethod
    def new(cls, root: Location, step: int) -> "Attempt":
        """One that never was."""
        return cls(root, step, secrets.token_hex(4))

    @classmethod
    def of(cls, folder: Location) -> "Attempt":
        """The one that ``place`` is of. CheckpointError if it is not such a place."""
        root, name = split(folder)
        start, _, token = name.partition(".tmp-")
        step = step_of(start)
        if step is None or not token:
            message = f"{folder} is no folder of begin_save: its name is not that of a step under way"
            raise CheckpointError(message, key="folder")
        return cls(root, step, token)

    @cached_property
    def storage(self) -> Storage:
        """Of the root."""
        return storage_of(self.root)

    @property
    def name(self) -> str:
        """By which it is known; on a local disk its folder's."""
        return f"{step_name(self.step)}.tmp-{self.token}"

    @property
    def place(self) -> Location:
        """What is handed to all who write."""
        return join(self.root, self.name)

    @property
    def final(self) -> Location:
        """The checkpoint that it will be."""
        return join(self.root, step_name(self.step))

    @property
    def folder(self) -> str:
        """Where its data files are until it is a checkpoint."""
        return step_name(self.step) if self.storage.remote else self.name

    @property
    def reports(self) -> str:
        """Folder of what the ranks report."""
        return f"{self.folder}/{_REPORTS}-{self.token}" if self.storage.remote else f"{self.folder}/{_REPORTS}"

    def file(self, group: str, part: str) -> str:
        """Name of a data file in its folder."""
        words = [group, part, self.token if self.storage.remote else ""]
        return ".".join([*filter(None, words), "safetensors"])

    # ---- its stages ----

    def begin(self) -> None:
        """Make room, after removing what crashed saves left. OSError."""
        _remove_leftovers(self.storage)
        if self.storage.remote:  # so that it is seen that there was an attempt
            self.storage.put(f"{self.reports}/begun", b"", durable=False)
        else:
            self.storage.begin(self.reports)

    def write_manifest(self, manifest: bytes) -> None:
        """Durable, but not yet in its place in a store. OSError."""
        self.storage.put(f"{self.reports}/{NAME}" if self.storage.remote else f"{self.folder}/{NAME}", manifest)

    def publish(self) -> None:
        """Make it a checkpoint, for good when this returns; one of the same step is replaced. OSError."""
        storage, final = self.storage, step_name(self.step)
        if storage.remote:
            storage.publish(f"{self.reports}/{NAME}", f"{final}/{NAME}")
            storage.remove(f"{final}/{DAMAGED}")
        else:
            storage.remove(self.reports)
            if os.path.lexists(self.final):
                storage.publish(final, f"{final}.replaced")
            storage.publish(self.name, final)
        _remove_leftovers(storage)

    def abandon(self) -> None:
        """Remove what it wrote, as far as that works; nothing happens where it was published."""
        with suppress(OSError):
            if not self.storage.remote:
                self.storage.remove(self.name)
                return
            there, mine = self.storage.names(self.folder), f".{self.token}."
            if NAME in there and mine in self.storage.read(f"{self.folder}/{NAME}").decode(errors="replace"):
                return
            for name in there:
                if mine in name or name == f"{_REPORTS}-{self.token}":
                    self.storage.remove(f"{self.folder}/{name}")
            if not self.storage.names(self.folder):  # some stores do have folders
                self.storage.remove(self.folder)


def _remove_leftovers(storage: Storage) -> None:
    """Remove what crashed saves left; a replaced checkpoint only where its successor is in place.

    One that cannot be removed takes room and is seen in ``listing``; the next save tries again. It is no reason to fail
    this one: where nothing can be written, that shows when it makes its own folder.
    """
    taken = set(_complete(storage).values())
    for name in storage.names():
        if match := _ANY.fullmatch(name):
            with suppress(OSError):
                _remove_leftover(storage, name, match, name in taken)


def _remove_leftover(storage: Storage, name: str, match: re.Match[str], taken: bool) -> None:
    _, temporary, replaced, damaged = match.groups()
    if taken:
        if storage.remote:
            _remove_strangers(storage, name)
    elif temporary or replaced or (storage.remote and not damaged and storage.size(f"{name}/{NAME}") is None):
        storage.remove(name)


def _remove_strangers(storage: Storage, name: str) -> None:
    """In a store: files of other saves beside those of a checkpoint; there can be some where a save left its mark."""
    there = storage.names(name)
    if not any(file.startswith(_REPORTS) for file in there):
        return
    with suppress(CheckpointError):  # what cannot be read is left as it is
        known = {NAME, DAMAGED, *load_manifest(storage, name).files}
        for file in sorted(set(there) - known, key=lambda file: file.startswith(_REPORTS)):
            storage.remove(f"{name}/{file}")
