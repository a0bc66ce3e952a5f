"""Folders of a training service: sessions, models, samplers and checkpoints, as JSON and safetensors."""

import hashlib
import hmac
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tilth.core.errors import CheckpointError, DataError
from tilth.core.files import atomic_write, make_folder
from tilth.runs.files import Lock
from tilth.serve.tinker.bodies import LoadBody

ABOUT = "about.json"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Part of a path -> type of checkpoint, as Tinker names them."""
SCHEME = "tinker://"
SECONDS = 3600
"""Time for which a link is valid."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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


class CheckpointPath(NamedTuple):
    """Path of a checkpoint as clients write it: ``tinker://RUN/KIND/NAME``. ``str`` gives it back."""

    run: str
    kind: str
    name: str

    @classmethod
    def read(cls, path: str) -> "CheckpointPath":
        """Return the parts of a path. DataError: it is none."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not parts[0]:
            right = f"{SCHEME}RUN/{{{','.join(KINDS)}}}/NAME"
            raise DataError(f"{path!r} is no path of a checkpoint; it must be {right}", key="path")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{SCHEME}{'/'.join(self)}"


class ServiceFolder:
    """Files of a training service, below one folder that belongs to one base model.

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
        if not self.of_base(held):
            message = f"{root} holds models of the base {held['base_model']!r}, which has other weights than {base!r}"
            raise CheckpointError(f"{message}; give this one a folder of its own", key="service.state")
        self.lock = Lock(root / "service.lock")

    def of_base(self, held: Mapping[str, Any]) -> bool:
        """True if facts on disk are of this folder's base."""
        written = str(held["fingerprint"])
        return written.removesuffix(")").rpartition(" ")[2] == self.fingerprint  # some end as "weights HASH)"

    def entry(self, kind: str, name: str) -> Path:
        """Return the folder of a session, model or sampler."""
        return self.root / kind / name

    def entries(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield names and facts, oldest first."""
        files = (self.root / kind).glob(f"*/{ABOUT}")
        yield from sorted(((file.parent.name, read_json(file)) for file in files), key=lambda one: one[1]["time"])

    # ---- checkpoints ----

    def checkpoint(self, path: CheckpointPath) -> Path:
        """Return the folder of a checkpoint. DataError: no checkpoint has such a path; CheckpointError: none has it."""
        folder = self.place(path)
        if path.kind not in KINDS or not (folder / ABOUT).exists() or self._expired(folder):
            message = f"there is no checkpoint {str(path)!r}: it was never saved, deleted or is expired"
            raise CheckpointError(message, key="path.missing")
        return folder

    def place(self, path: CheckpointPath) -> Path:
        """Return the folder that a checkpoint has or will have. DataError: a part of its path is no name."""
        check_name(path.name)
        return self.root / "checkpoints" / _safe(path.run) / path.kind / path.name

    def loadable(self, body: LoadBody) -> Path:
        """Return the folder of a checkpoint that a model can begin at. DataError, CheckpointError."""
        if body.weights_access_token is not None:
            message = "weights_access_token: this server has one account; leave it out"
            raise DataError(message, key="weights_access_token")
        folder = self.checkpoint(CheckpointPath.read(body.path))
        about = read_json(folder / ABOUT)
        if not self.of_base(about):
            message = f"{body.path} is an adapter of another base, {about['base_model']!r}"
            raise CheckpointError(f"{message}; this server has {self.base!r}", key="path.base")
        if body.optimizer and not about["optimizer"]:
            message = f"{body.path} was saved for sampling: it has no optimizer state; load it without"
            raise CheckpointError(message, key="path.optimizer")
        if about["kind"] == "external_weights":
            raise DataError(f"{body.path} was saved for other programs; load one of save_state", key="path.kind")
        return folder

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

    # ---- links to files, signed, so that a program without the server's token can follow them for a while ----

    def links(self, base: str, path: CheckpointPath) -> dict[str, Any]:
        """Return file -> URL of a checkpoint, and when these end. base: URL of the server."""
        folder, expires, urls = self.checkpoint(path), int(time.time()) + SECONDS, {}
        for file in sorted(one.name for one in folder.iterdir() if one.name != ABOUT):
            asked = f"expires={expires}&signature={self._signature(path, file, expires)}"
            urls[file] = f"{base.rstrip('/')}/api/v1/files/{quote('/'.join(path))}/{quote(file)}?{asked}"
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}

    def linked(self, path: CheckpointPath, file: str, expires: int, signature: str) -> Path:
        """Return the file of a link. CheckpointError: it is not this server's, or no longer valid."""
        if not hmac.compare_digest(signature.encode(), self._signature(path, file, expires).encode()):
            raise CheckpointError("the link's signature is wrong; ask for a new one", key="link.signature")
        if expires < time.time():
            raise CheckpointError("the link is no longer valid; ask for a new one", key="link.expired")
        return self.checkpoint(path) / file

    def _signature(self, path: CheckpointPath, file: str, expires: int) -> str:
        text = f"{'/'.join(path)}\n{file}\n{expires}"
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()


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
