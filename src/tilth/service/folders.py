"""Folders of a training service: sessions, models, samplers and checkpoints, as JSON and safetensors."""

import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilth.core.errors import CheckpointError, DataError
from tilth.core.files import atomic_write, make_folder
from tilth.runs.files import Lock

ABOUT = "about.json"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Part of a path -> type of checkpoint, as Tinker names them."""
SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def now() -> str:
    """Return the time as ISO 8601."""
    return datetime.now(UTC).isoformat()


def expires_at(seconds: int | None) -> float | None:
    """Return the time at which something ends; None: never."""
    return None if seconds is None else time.time() + seconds


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write facts atomically. StorageError."""
    make_folder(path.parent)
    with atomic_write(path) as made:
        made.write_text(json.dumps(facts))


def read_json(path: Path) -> dict[str, Any]:
    """Return the facts of a file. CheckpointError: it is damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", key=path.name) from error
    return dict(found)


class ServiceFolder:
    """All that a training service keeps, below one folder. It belongs to one base model.

    CheckpointError: the folder is another base's, or damaged. StorageError: another server has it.
    """

    def __init__(self, root: Path, base: str, fingerprint: str) -> None:
        """base: name of the model; fingerprint: of its weights."""
        self.root, self.base, self.fingerprint = root, base, fingerprint
        make_folder(root)
        facts = {"base_model": base, "fingerprint": fingerprint}
        if not (root / ABOUT).exists():
            write_json(root / ABOUT, {**facts, "secret": secrets.token_hex(32)})
        held = read_json(root / ABOUT)
        self.secret = str(held["secret"])
        """Signs URLs of downloads."""
        if held["fingerprint"] != fingerprint:
            message = f"{root} holds models of the base {held['base_model']!r}, which has other weights than {base!r}"
            raise CheckpointError(f"{message}; give this one a folder of its own", key="service.state")
        self.lock = Lock(root / "service.lock")

    def entry(self, kind: str, name: str) -> Path:
        """Return the folder of a session, model or sampler."""
        return self.root / kind / name

    def entries(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield names and facts, oldest first."""
        files = (self.root / kind).glob(f"*/{ABOUT}")
        yield from sorted(((file.parent.name, read_json(file)) for file in files), key=lambda one: one[1]["time"])

    # ---- checkpoints ----

    def checkpoint(self, path: str) -> Path:
        """Return the folder of a tinker path. DataError: it is none; CheckpointError: there is no such checkpoint."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not parts[0]:
            right = f"{SCHEME}RUN/{{{','.join(KINDS)}}}/NAME"
            raise DataError(f"{path!r} is no path of a checkpoint; it must be {right}", key="path")
        check_name(parts[2])
        folder = self.root / "checkpoints" / _safe(parts[0]) / parts[1] / parts[2]
        if not (folder / ABOUT).exists() or self._expired(folder):
            message = f"there is no checkpoint {path!r}: it was never saved, deleted or is expired"
            raise CheckpointError(message, key="path.missing")
        return folder

    def new_checkpoint(self, model: str, kind: str, name: str) -> Path:
        """Return the folder that a checkpoint will have."""
        check_name(name)
        return self.root / "checkpoints" / _safe(model) / kind / name

    def path_of(self, model: str, kind: str, name: str) -> str:
        """Return the tinker path of a checkpoint."""
        return f"{SCHEME}{model}/{kind}/{name}"

    def checkpoints(self, model: str = "") -> Iterator[dict[str, Any]]:
        """Yield the facts of the checkpoints of a model, or of all, oldest first."""
        base = self.root / "checkpoints"
        files = base.glob(f"{_safe(model)}/*/*/{ABOUT}" if model else f"*/*/*/{ABOUT}")
        found = [read_json(file) for file in files if not self._expired(file.parent)]
        yield from sorted(found, key=lambda facts: str(facts["time"]))

    def remove(self, folder: Path) -> None:
        """Delete a checkpoint: its facts first, so that half of one is none."""
        (folder / ABOUT).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _expired(self, folder: Path) -> bool:
        """Return True, and delete it, if a checkpoint has outlived its time."""
        expires = read_json(folder / ABOUT).get("expires")
        if expires is None or expires > time.time():
            return False
        self.remove(folder)
        return True


def check_name(name: str) -> None:
    """Raise DataError unless a name can be that of a file on every system."""
    if not _NAME.fullmatch(name):
        message = f"name={name!r} is no name of a checkpoint; use letters, digits, '.', '_' and '-', at most 128"
        raise DataError(message, key="path.name")


def _safe(name: str) -> str:
    """Return a name as that of a folder. DataError: it leads elsewhere."""
    if "/" in name or name in (".", "..") or "\0" in name:
        raise DataError(f"{name!r} is no training run", key="training_run_id")
    return name
