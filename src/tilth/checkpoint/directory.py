"""Find the checkpoints under a root: complete, newest, best, damaged; remove those that are not kept.

On a local disk a save writes to ``step-000100.tmp-TOKEN`` and renames it to ``step-000100``. An older checkpoint of the
same step is ``step-000100.replaced`` between two renames, and counts until the new one is there. So ``step-000100``
without a manifest is damaged, never a save under way. In a store of objects, which cannot rename, the files go to
``step-000100`` at once, under names with the token of their save; the manifest, put last, makes them a checkpoint.
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
from typing import Any, Literal, NamedTuple, TypeVar

from tilth.checkpoint.manifest import NAME, load_manifest
from tilth.checkpoint.stages import staged
from tilth.checkpoint.storage import Location, Storage, join, split, storage_of
from tilth.core.errors import CheckpointError, StorageError

Place = TypeVar("Place", bound=Location)
BEST = "best.json"
"""File beside the checkpoints: the best one by evaluation ({"step", "metric", "value"})."""
DAMAGED = "DAMAGED"
"""File in a damaged checkpoint, with the reason. Nothing starts from such a checkpoint again."""
HELD = "HELD"
"""File in a checkpoint that others need, such as adapters of it, with a line for each. It is not pruned."""
MISSING = f"{NAME} is missing"
"""Reason of ``bare`` checkpoints."""

State = Literal["complete", "damaged", "replaced", "unfinished"]

_PATTERN = re.compile(r"step-(\d{6,})(\.replaced)?")
_ANY = re.compile(r"step-(\d{6,})(?:\.(?:(tmp)-.*|(replaced)|(damaged)))?")
_REPORTS = ".reports"


def step_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"step-{step:06d}"


def file_name(*words: str) -> str:
    """Return the name of a data file from its group, its part and its token; "" is left out."""
    return ".".join([*filter(None, words), "safetensors"])


def step_of(path: Location) -> int | None:
    """Return the step in a directory's name, or None if it is not the name of a checkpoint."""
    match = _PATTERN.fullmatch(split(path)[1])
    return int(match[1]) if match else None


class FoundCheckpoint(NamedTuple):
    """A checkpoint under a root, or what is left of one; ``reason`` if it is damaged."""

    path: Location
    step: int
    state: State
    reason: str = ""


def listing(root: Location) -> list[FoundCheckpoint]:
    """Return everything under a root, by step and name. ``replaced``: its successor of the same step is in place."""
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
    """True for a folder of ``bare``; False for one that was just removed or put aside."""
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


def bare(root: Place) -> list[Place]:
    """Return folders of steps on a local disk without a manifest, oldest first: only damage leaves such."""
    storage = storage_of(root)
    found = {int(match[1]): name for name in storage.names() if (match := _PATTERN.fullmatch(name)) and not match[2]}
    return [join(root, name) for _, name in sorted(found.items()) if _is_bare(storage, name)]


def _complete(storage: Storage) -> dict[int, str]:
    """Return the names of the complete checkpoints by step."""
    found = {}
    for name in reversed(storage.names()):  # step-000100 comes behind step-000100.replaced and has precedence
        match = _PATTERN.fullmatch(name)
        if match and NAME in (there := storage.names(name)) and DAMAGED not in there:
            found[int(match[1])] = name
    return dict(sorted(found.items()))


def complete(root: Place) -> list[Place]:
    """Return the complete checkpoints under a root, oldest first: paths, or URLs if the root is one."""
    return [join(root, name) for name in _complete(storage_of(root)).values()]


def latest(root: Place) -> Place | None:
    """Return the complete checkpoint of the greatest step, or None. Leftovers of crashed saves are ignored.

    Its bytes are verified when it is read: a damaged newest checkpoint is never passed over in silence.
    """
    found = complete(root)
    return found[-1] if found else None


def mark_best(root: Location, best: Mapping[str, Any] | None) -> None:
    """Record the best checkpoint, {"step", "metric", "value"}, atomically and durably; None removes the record."""
    storage = storage_of(root)
    try:
        if best is None:
            storage.remove(BEST)
        else:
            storage.put(BEST, (json.dumps(dict(best)) + "\n").encode())
    except OSError as error:
        raise StorageError(f"{join(root, BEST)} cannot be written: {error.strerror or error}", key=BEST) from error


def record_best(root: Location, best: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Call ``mark_best`` if there is a checkpoint of that step (its save may have failed). Return the recorded best."""
    if best is not None and best["step"] not in _complete(storage_of(root)):
        best = read_best(root)
    mark_best(root, best)
    return None if best is None else dict(best)


def read_best(root: Location) -> dict[str, Any] | None:
    """Return the record of ``mark_best``, or None without one. CheckpointError for any other contents."""
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
        raise CheckpointError(f"{file} has no metric with its value", key=f"{BEST}.metric")
    return found


def prunable(root: Place, keep: int, every: int = 0, bad: Collection[str] = ()) -> list[Place]:
    """Return the checkpoints that need not be kept.

    Kept are the ``keep`` newest complete ones (at least one), those whose step is a multiple of ``every`` (0: none),
    the best, and those that someone holds. Damaged ones go when they are older than all of the newest, and so do
    complete ones in ``bad`` (paths or URLs, as texts), which are not counted.
    """
    storage, best = storage_of(root), read_best(root)
    found = _complete(storage)
    newest = [step for step, name in found.items() if str(join(root, name)) not in bad][-max(1, keep) :]
    if not newest:
        return []
    kept = {*newest, *([best["step"]] if best else []), *(s for s in found if every and s % every == 0)}
    old = [name for s, name in found.items() if s not in kept and (s < newest[0] or str(join(root, name)) not in bad)]
    old = [name for name in old if HELD not in storage.names(name)]
    old += [name for step, name in _damaged(storage) if step < newest[0]]
    return [join(root, name) for name in old]


def hold(path: Location, user: str) -> None:
    """Keep a checkpoint from being pruned, since ``user`` needs it. StorageError: its folder cannot be written."""
    root, name = split(path)
    storage, file = storage_of(root), f"{name}/{HELD}"
    try:
        users = storage.read(file).decode(errors="replace").splitlines() if HELD in storage.names(name) else []
        if user not in users:
            storage.put(file, "".join(f"{line}\n" for line in [*users, user]).encode())
    except OSError as error:
        message = f"{path} can be pruned though {user} needs it: its file {HELD} cannot be written: {error}"
        raise StorageError(message, key=HELD) from error


def prune(root: Place, keep: int, every: int = 0) -> list[Place]:
    """Remove and return the ``prunable`` checkpoints. StorageError if one cannot be removed."""
    old = prunable(root, keep, every)
    for path in old:
        discard(path)
    return old


def discard(path: Location) -> None:
    """Remove a checkpoint or what is left of one; if interrupted, it is no longer a checkpoint. StorageError."""
    root, name = split(path)
    with staged("retention", str(path)):
        _remove(storage_of(root), name)


def _damaged(storage: Storage) -> Iterator[tuple[int, str]]:
    for name in storage.names():
        match = _ANY.fullmatch(name)
        if match and _state(storage, name, match, set()) == "damaged":
            yield int(match[1]), name


def _remove(storage: Storage, name: str) -> None:
    """Remove a checkpoint; if this is interrupted, the rest is no checkpoint, and the next save removes it."""
    if storage.remote:
        storage.remove(f"{name}/{NAME}")
        storage.remove(name)
    else:
        doomed = f"{name.partition('.')[0]}.tmp-{secrets.token_hex(4)}"
        storage.publish(name, doomed)
        storage.remove(doomed)


def quarantine(path: Place, reason: str) -> Place:
    """Put a damaged checkpoint aside with the reason in it; return its new path. StorageError.

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


@dataclass(frozen=True)
class Attempt:
    """A save under way, and where its files are."""

    root: Location
    step: int
    token: str

    @classmethod
    def new(cls, root: Location, step: int) -> "Attempt":
        """Make an attempt with a token of its own."""
        return cls(root, step, secrets.token_hex(4))

    @classmethod
    def of(cls, folder: Location) -> "Attempt":
        """Return the attempt whose ``place`` this is; CheckpointError if it is none."""
        root, name = split(folder)
        start, _, token = name.partition(".tmp-")
        step = step_of(start)
        if step is None or not token:
            message = f"{folder} is no folder of begin_save: its name is not step-NUMBER.tmp-TOKEN"
            raise CheckpointError(message, key="folder")
        return cls(root, step, token)

    @cached_property
    def storage(self) -> Storage:
        """Storage of the root."""
        return storage_of(self.root)

    @property
    def name(self) -> str:
        """Name of the attempt; on a local disk also of its folder."""
        return f"{step_name(self.step)}.tmp-{self.token}"

    @property
    def place(self) -> Location:
        """Path or URL that all writers get."""
        return join(self.root, self.name)

    @property
    def final(self) -> Location:
        """Path or URL of the checkpoint."""
        return join(self.root, step_name(self.step))

    @property
    def folder(self) -> str:
        """Folder of its data files until it is a checkpoint, relative to the root."""
        return step_name(self.step) if self.storage.remote else self.name

    @property
    def reports(self) -> str:
        """Folder of the ranks' reports, relative to the root."""
        return f"{self.folder}/{_REPORTS}-{self.token}" if self.storage.remote else f"{self.folder}/{_REPORTS}"

    def file(self, group: str, part: str) -> str:
        """Return the name of a data file."""
        return file_name(group, part, self.token if self.storage.remote else "")

    def begin(self) -> None:
        """Make the folders, after removing leftovers of crashed saves. OSError."""
        _remove_leftovers(self.storage)
        if self.storage.remote:  # a trace of the attempt
            self.storage.put(f"{self.reports}/begun", b"", durable=False)
        else:
            self.storage.begin(self.reports)

    def write_manifest(self, manifest: bytes) -> None:
        """Write the manifest durably, in a store not yet under its final name. OSError."""
        self.storage.put(f"{self.reports}/{NAME}" if self.storage.remote else f"{self.folder}/{NAME}", manifest)

    def publish(self) -> None:
        """Make it a checkpoint, durably; replaces one of the same step. OSError."""
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
        """Remove what it wrote, as far as possible; does nothing to a published checkpoint."""
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
    """Remove what crashed saves left; a replaced checkpoint only if its successor is in place. A leftover that cannot
    be removed does not fail this save: ``listing`` shows it, and the next save tries again."""
    taken = set(_complete(storage).values())
    for name in storage.names():
        if match := _ANY.fullmatch(name):
            with suppress(OSError):
                _remove_leftover(storage, name, match, name in taken)


def _remove_leftover(storage: Storage, name: str, match: re.Match[str], taken: bool) -> None:
    _, temporary, replaced, damaged = match.groups()
    if taken:
        if storage.remote:
            _remove_foreign_files(storage, name)
    elif temporary or replaced or (storage.remote and not damaged and storage.size(f"{name}/{NAME}") is None):
        storage.remove(name)


def _remove_foreign_files(storage: Storage, name: str) -> None:
    """In a store, remove files of other saves beside those of a checkpoint, where a save left its reports."""
    there = storage.names(name)
    if not any(file.startswith(_REPORTS) for file in there):
        return
    with suppress(CheckpointError):  # what cannot be read is left as it is
        known = {NAME, DAMAGED, *load_manifest(storage, name).files}
        for file in sorted(set(there) - known, key=lambda file: file.startswith(_REPORTS)):
            storage.remove(f"{name}/{file}")
