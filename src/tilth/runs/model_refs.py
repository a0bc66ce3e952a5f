"""References to checkpoints: RUN, RUN@best, RUN@STEP, a checkpoint or a folder of checkpoints, by path or URL."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from tilth.checkpoint import open_checkpoint, read_best
from tilth.checkpoint.directory import complete, hold, latest, step_of
from tilth.checkpoint.manifest import NAME as MANIFEST
from tilth.checkpoint.storage import Location, is_url, join, split, storage_of
from tilth.core.errors import CheckpointError, DataError, ModelError, StorageError
from tilth.core.files import make_folder
from tilth.models.hub import fetched
from tilth.runs.readers import checkpoints_of, read_state

EMA = "ema"


class Named(NamedTuple):
    """A checkpoint that a reference leads to."""

    path: Location
    group: str = "model"
    """Group of tensors to load as a model."""
    run: Path | None = None
    """Directory of its run, if known."""

    def __str__(self) -> str:
        step = step_of(self.path)
        return str(self.path) if self.run is None or step is None else f"{self.run}@{step}"


def find_checkpoint(spec: str) -> Named | None:
    """Return the checkpoint of a reference; None for any other path, such as a Hugging Face directory.

    ``RUN``: the newest; ``RUN@best``: the best by evaluation; ``RUN@STEP``: that step; ``RUN@ema``: the newest, with
    the moving average of the weights. In place of RUN, a folder of checkpoints or its URL. ModelError if there is no
    such checkpoint, naming those that there are; StorageError if a store cannot be reached.
    """
    where, which = split_spec(spec)
    with reaching(where):
        if is_run(where):
            run = Path(where)
            return _chosen(root_of(run), which, run, f"run {run}")
        if is_checkpoint(where) and not which:
            return Named(where, run=_run_of(where))
        if not is_checkpoint(where) and complete(where):
            return _chosen(where, which, None, str(where))
    if which:
        raise ModelError(f"{str(where)!r} is no run, so it has no @{which}", key="run.json")
    if is_url(where):
        raise ModelError(f"{where} is neither a checkpoint nor a folder of checkpoints", key=MANIFEST)
    return None


def identity(spec: str) -> str:
    """Return the model that a reference leads to now, with a fingerprint of its weights.

    The fingerprint covers a checkpoint's manifest, which has checksums of all tensors, or the bytes of all files.
    """
    named, found = find_checkpoint(spec), fingerprint(spec)
    return f"{spec} (files {found})" if named is None else f"{named} (step {step_of(named.path)}, weights {found})"


def pinned(spec: str) -> dict[str, str]:
    """Return where the model of a reference is now, as plain data: ``path``, absolute, of its checkpoint or directory,
    ``group``, and ``weights``, its fingerprint."""
    named = find_checkpoint(spec)
    path, group = (fetched(spec), "") if named is None else (named.path, named.group)
    where = str(path) if is_url(path) else os.path.abspath(path)
    return {"path": where, "group": group, "weights": fingerprint(spec)}


def hold_pinned(base: Mapping[str, str], user: str) -> None:
    """Keep the model that ``pinned`` described from being pruned, if it is a checkpoint. StorageError."""
    if base["group"]:
        hold(base["path"] if is_url(base["path"]) else Path(base["path"]), user)


def check_pinned(base: Mapping[str, str], user: str) -> None:
    """Raise ModelError unless the model that ``pinned`` described is there unchanged; user: what needs it."""
    path = base["path"]
    message = f"{user} holds adapters of {path}, "
    if not is_url(path) and not Path(path).is_dir():
        raise ModelError(f"{message}which is not there: bring it back, its weights are nowhere else", key="base.path")
    if (found := fingerprint(path)) != base["weights"]:
        raise ModelError(f"{message}whose weights were {base['weights']} and are {found} now", key="base.weights")


def fingerprint(spec: str) -> str:
    """Return a hash of the weights of a reference; see ``identity``."""
    named = find_checkpoint(spec)
    if named is not None:
        with explained(named):
            checkpoint = open_checkpoint(named.path)
        return hashlib.blake2b(checkpoint.manifest.dump(), digest_size=8).hexdigest()
    files = sorted(file for pattern in ("*.safetensors", "*.json") for file in Path(fetched(spec)).glob(pattern))
    with reaching(spec):
        listed = " ".join(f"{file.name} {_bytes_hash(file)}" for file in files)
    return hashlib.blake2b(listed.encode(), digest_size=8).hexdigest()


def _bytes_hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def split_spec(spec: str) -> tuple[Location, str]:
    """Split a reference into place and what follows its last ``@``; the name of a folder may contain ``@``."""
    before, at, which = spec.rpartition("@")
    if not at or "/" in which or (not is_url(spec) and Path(spec).exists()):
        return _place(spec), ""
    if not which:
        raise ModelError(f"model {spec!r} ends in @; add best, ema or a step, as in {before}@best", key="@")
    return _place(before), which


def is_run(where: Location) -> bool:
    """True for the directory of a run."""
    return not is_url(where) and (Path(where) / "run.json").is_file()


def is_checkpoint(where: Location) -> bool:
    """True for the directory or URL of one checkpoint."""
    return storage_of(where).size(MANIFEST) is not None


def root_of(run: Path) -> Location:
    """Return the path or URL of a run's checkpoints, relative if ``run`` is and they are in its folder.

    ModelError for a copy of a run whose checkpoints are elsewhere and belong to the original; StorageError.
    """
    found, own = checkpoints_of(run), run / "checkpoints"
    if found == str(own.resolve()):
        return own
    with reaching(found):
        owner = original(run, found)
    if owner:
        message = f"{run} is a copy of {owner}, whose checkpoints are in {found}; name {owner}"
        raise ModelError(message, key="owner.json.folder")
    return _place(found)


def lost(run: Path | None, root: Location) -> str:
    """Return ``all_lost`` for a run that has saved checkpoints on disk, or ""; to call if there is none now."""
    saved = read_state(run).get("saved") if run is not None else None
    return "" if not saved or str(root).startswith("memory://") else all_lost(root, saved)


def all_lost(root: Location, saved: int) -> str:
    """Return the message for a run that has saved checkpoints up to this step, if none of them is found."""
    return f"there is no valid checkpoint in {root}, but this run saved one of step {saved} there: is its disk mounted?"


@contextmanager
def reaching(where: Location) -> Iterator[None]:
    """Turn the error of a store that does not answer, or whose client is not installed, into a StorageError."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise StorageError(f"cannot read {where}: {error}", key=split(where)[1]) from error


@contextmanager
def explained(named: Named) -> Iterator[None]:
    """Add to a CheckpointError which command lists all damage, and which checkpoint is the previous one."""
    try:
        with reaching(named.path):
            yield
    except CheckpointError as error:
        older = one_before(named.path)
        instead = "there is none before it" if older is None else f"the one before it is {named._replace(path=older)}"
        message = f"{error}; 'tilth ckpt verify {named}' lists all damage; {instead}"
        raise CheckpointError(message, key=error.key) from error


def one_before(checkpoint: Location) -> Location | None:
    """Return the previous complete checkpoint under the same root; None if there is none."""
    step = step_of(checkpoint)
    older = [path for path in complete(split(checkpoint)[0]) if step is not None and (step_of(path) or 0) < step]
    return older[-1] if older else None


def foreign(objects: Mapping[str, Any], digests: Collection[str]) -> str:
    """Return a message if a run with these digests did not make the checkpoint with these objects, else ""."""
    digest = objects.get("digest")
    return "" if digest in digests else f"is not of this run: it was made by one of other work (digest {digest})"


def _place(text: str) -> Location:
    return text.rstrip("/") if is_url(text) else Path(text)


def _run_of(checkpoint: Location) -> Path | None:
    """Return the run whose folder has the checkpoint, relative if the reference was; None if there is none."""
    if is_url(checkpoint):
        return None
    root, given = Path(checkpoint).resolve().parent, Path(checkpoint).parent.parent
    if root.name != "checkpoints" or not is_run(root.parent):
        return None
    return given if given.resolve() == root.parent else root.parent


def _chosen(root: Location, which: str, run: Path | None, who: str) -> Named:
    """Return the checkpoint under a root that ``which`` selects: newest, best, a step, or the newest's ema."""
    kept = {step_of(path) or 0: path for path in complete(root)}
    if not kept:
        if message := lost(run, root):
            raise ModelError(message, key="checkpoints")
        if str(root).startswith("memory://"):
            message = f"{who} has none: checkpoints in memory:// are gone when their process ends"
            raise ModelError(message, key="run.checkpoints")
        message = f"{who} has no checkpoint yet; let it reach its first save (run.save_every)"
        raise ModelError(message, key="run.save_every")
    newest = list(kept.values())[-1]
    if which in ("", EMA):
        return Named(newest, which or "model", run)
    if which == "best":
        return Named(kept[_best_step(root, kept, who)], run=run)
    if not which.isdecimal():
        message = f"{who.removeprefix('run ')}@{which}: after @ use best, ema or a step ({_steps(kept)})"
        raise ModelError(message, key=f"@{which}")
    if int(which) not in kept:
        message = f"{who} keeps no checkpoint of step {int(which)}; it has {_steps(kept)} (run.keep)"
        raise ModelError(message, key=f"@{which}")
    return Named(kept[int(which)], run=run)


def _best_step(root: Location, kept: Mapping[int, Location], who: str) -> int:
    best = read_best(root)
    if best is None:
        message = f"{who} has no best checkpoint: none was evaluated yet (run.eval_every); leave out @best"
        raise ModelError(message, key="best.json")
    step = int(best["step"])
    if step not in kept:
        message = f"the best checkpoint of {who}, step {step}, is gone; it has {_steps(kept)}"
        raise ModelError(message, key="best.json.step")
    return step


def _steps(kept: Iterable[int]) -> str:
    return "steps " + ", ".join(map(str, kept))


# ---- owners of checkpoint directories outside a run's folder ----
#
# The name of a directory is random, and ``run.json`` holds it. If two run folders claim the same directory, the one
# that the marker in it does not name is a copy. If the named folder is gone, or claims another directory, the run was
# moved.

MARK = "owner.json"
"""File in the checkpoint directory: {"folder": absolute path of the run}."""


def original(run: Path, place: str) -> Path | None:
    """Return the run that owns the checkpoints in ``place`` if the folder ``run`` is a copy of it. Raises OSError."""
    owner = _owner(place)
    if owner is None or not (owner / "run.json").is_file() or owner.samefile(run):
        return None
    try:
        theirs = read_state(owner).get("checkpoints")
    except DataError:  # no longer a run
        return None
    return owner if theirs == place else None


def take(run: Path, place: str, *, fresh: bool) -> None:
    """Make this run the owner of ``place`` if it is new or its former owner is gone. fresh: the place is new.

    CheckpointError if this run is a copy, which would write among the checkpoints of the original; StorageError.
    """
    try:
        owner = original(run, place)
        if owner is not None:
            raise CheckpointError(
                f"{run} is a copy of {owner}, and the checkpoints in {place} belong to {owner}: resume that one; or "
                f"begin a new run with its weights (run.name=NAME model.path={owner}); or, to resume the copy, copy "
                f'{place} too and write the new path to "checkpoints" in {run / "run.json"}',
                key=f"{MARK}.folder",
            )
        there = fresh or bool(storage_of(place).names())  # a disk that is not mounted is not written to
        if there and _owner(place) != run.resolve():
            _mark(run, place)
    except OSError as error:
        raise StorageError(f"{join(place, MARK)}: {error.strerror or error}", key=MARK) from error


def holds_some(place: str) -> bool:
    """True if there is a checkpoint in ``place``; StorageError if it cannot be read."""
    try:
        return latest(place) is not None
    except OSError as error:
        message = f"the checkpoints of this run may be in {place}, which cannot be read: {error}"
        raise StorageError(message, key="checkpoints") from error


def _owner(place: str) -> Path | None:
    """Return the folder that the marker names; None without a valid marker."""
    try:
        return Path(json.loads(storage_of(place).read(MARK))["folder"])
    except (FileNotFoundError, ValueError, RecursionError, TypeError, KeyError):
        return None


def _mark(run: Path, place: str) -> None:
    if not is_url(place):
        make_folder(Path(place))
    storage_of(place).put(MARK, (json.dumps({"folder": str(run.resolve())}) + "\n").encode())
