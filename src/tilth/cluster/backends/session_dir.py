"""The private folder of a local cluster: socket, payload, phase board, stacks, logs, where collectives meet."""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tilth.cluster.backends.capacity import advice
from tilth.core.errors import StorageError

SHARED_MEMORY = Path("/dev/shm")
ROOM = 2**30
"""Bytes that must be free there; else the folder is made in the temporary directory."""
_ALIVE, _KEY = "alive", "key"
_SOCKET_PATH = 107  # bytes that a Unix socket's address holds


class SessionDir:
    """Mode 0700, locked by the controller that made it, with the key that a worker needs to connect."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    @classmethod
    def create(cls, name: str = "") -> "SessionDir":
        """A new one; those that dead controllers left behind are removed. StorageError if none can be made.

        name: one that others can find it by; "": a name of its own.
        """
        root, prefix = _root(), f"tilth-{os.getuid()}-"
        for path in root.glob(f"{prefix}*"):
            _remove_if_left(path)
        try:
            folder = cls(_named(root / f"{prefix}{name}") if name else Path(tempfile.mkdtemp(prefix=prefix, dir=root)))
            folder.payload.mkdir()
            folder._lock = _locked(folder.path)
            with open(os.open(folder.path / _KEY, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
        except OSError as error:
            raise StorageError(
                f"cluster.backend=local needs a folder in {root}: {error.strerror}{advice(error)}",
                key="session_dir",
            ) from None
        if len(os.fsencode(folder.control(99_999))) > _SOCKET_PATH:
            folder.remove()
            message = f"{folder.socket} is too long for the name of a socket; set TMPDIR to a shorter path"
            raise StorageError(message, key="session_dir.socket")
        return folder

    @classmethod
    def find(cls, name: str) -> "SessionDir | None":
        """The folder that another process has created under this name, if it is there."""
        places = (root / f"tilth-{os.getuid()}-{name}" for root in (SHARED_MEMORY, Path(tempfile.gettempdir())))
        return next((cls(path) for path in places if path.exists()), None)

    @property
    def key(self) -> bytes:
        """What both ends of a connection must know."""
        return (self.path / _KEY).read_bytes()

    @property
    def socket(self) -> str:
        """Where the controller listens while the workers start."""
        return str(self.path / "socket")

    @property
    def payload(self) -> Path:
        """Columns of the store."""
        return self.path / "payload"

    @property
    def board(self) -> Path:
        """What each worker does."""
        return self.path / "board"

    @property
    def init_method(self) -> str:
        """``init_method`` of torch.distributed: a file, so that nothing listens for strangers."""
        return f"file://{self.path}/meeting"

    def log(self, rank: int) -> Path:
        """What a worker printed."""
        return self.path / f"log-{rank}"

    def stack(self, rank: int) -> Path:
        """Stacks of a worker, appended when it gets SIGUSR1."""
        return self.path / f"stack-{rank}"

    def control(self, rank: int) -> str:
        """Where a worker answers control messages."""
        return str(self.path / f"control-{rank}")

    def remove(self) -> None:
        """Remove it with all that is in it. Twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _root() -> Path:
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > ROOM:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _named(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def _locked(path: Path) -> IO[bytes]:
    """The lock gets its name when it is held, so that nobody finds it free."""
    lock = open(path / f"{_ALIVE}.new", "wb")  # noqa: SIM115 - held as long as the folder
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(lock.name, path / _ALIVE)
    return lock


def _remove_if_left(path: Path) -> None:
    """The lock of a controller goes with its process, however that ended.

    Anybody can make such a name in a folder that all may write to, and put a pipe there that would be waited for.
    """
    try:
        with _opened(path, os.O_DIRECTORY) as place, _opened(_ALIVE, os.O_NONBLOCK, place) as lock:
            if not (_is_ours(place, stat.S_ISDIR) and _is_ours(lock, stat.S_ISREG)):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:  # in use, or just being made by another controller
        return


@contextmanager
def _opened(path: Path | str, flags: int, within: int | None = None) -> Iterator[int]:
    """A descriptor for reading of a name that is no link, in an open folder if one is given. OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int, kind: Callable[[int], bool]) -> bool:
    found = os.fstat(descriptor)
    return found.st_uid == os.getuid() and kind(found.st_mode)
