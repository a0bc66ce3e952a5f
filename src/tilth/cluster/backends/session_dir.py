"""Session directory of a local cluster: sockets, payload, status board, stacks, logs, rendezvous of collectives."""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tilth.cluster.backends.capacity import advice
from tilth.core.errors import StorageError

SHARED_MEMORY = Path("/dev/shm")
ROOM = 2**30
"""Bytes that must be free there; else the temporary directory is used."""
_ALIVE, _KEY = "alive", "key"
_SOCKET_PATH = 107  # bytes that a Unix socket's address holds


class SessionDir:
    """A folder of mode 0700, locked by its controller, with the key that a worker needs to connect.

    socket: address on which the controller listens at start; payload: folder of the store; board: file of the status
    board; scratch: for what outlives a worker; init_method: of torch.distributed, a file, so that no port is open.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.payload, self.board = path, path / "payload", path / "board"
        self.scratch = path / "scratch"
        self.socket, self.init_method = str(path / "socket"), f"file://{path}/meeting"
        self._lock: IO[bytes] | None = None

    @classmethod
    def create(cls, name: str = "", former: str = "") -> "SessionDir":
        """Create a directory and remove those of dead controllers. Raises StorageError.

        name: lets other processes ``find`` it; "": a random name. former: of a directory that stays, for ``inherit``.
        """
        root, prefix = _root(), f"tilth-{os.getuid()}-"
        for path in root.glob(f"{prefix}*"):
            if not former or path.name != f"{prefix}{former}":
                _remove_if_left(path)
        try:
            folder = cls(_named(root / f"{prefix}{name}") if name else Path(tempfile.mkdtemp(prefix=prefix, dir=root)))
            folder.payload.mkdir()
            folder.scratch.mkdir()
            folder._lock = _locked(folder.path)
            with open(os.open(folder.path / _KEY, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
        except OSError as error:
            raise StorageError(
                f"workers of this machine need a folder in {root}: {error.strerror}{advice(error)}", key="session_dir"
            ) from None
        if len(os.fsencode(folder.control(99_999))) > _SOCKET_PATH:
            folder.remove()
            message = f"{folder.socket} is too long for the name of a socket; set TMPDIR to a shorter path"
            raise StorageError(message, key="session_dir.socket")
        return folder

    @classmethod
    def find(cls, name: str) -> "SessionDir | None":
        """Return the directory that another process created under this name; None if there is none."""
        places = (root / f"tilth-{os.getuid()}-{name}" for root in (SHARED_MEMORY, Path(tempfile.gettempdir())))
        return next((cls(path) for path in places if path.exists()), None)

    @classmethod
    def at(cls, path: Path) -> "SessionDir | None":
        """Return the directory with this path, which another process may have written anywhere; None unless it is one
        of this user on this machine."""
        named = path.name.startswith(f"tilth-{os.getuid()}-")
        if not named or path.parent not in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            return None
        try:
            with _opened(path, os.O_DIRECTORY) as place:
                return cls(path) if _is_ours(place, stat.S_ISDIR) else None
        except OSError:
            return None

    def inherit(self, former: "SessionDir", seconds: float) -> None:
        """Take the scratch folder of a directory whose owner is dead, or dies within some seconds, and remove it. The
        folder of one that lives stays where it is."""
        until = time.monotonic() + seconds
        while True:
            try:
                with _opened(former.path, os.O_DIRECTORY) as place, _opened(_ALIVE, os.O_NONBLOCK, place) as lock:
                    if _is_ours(place, stat.S_ISDIR) and _is_ours(lock, stat.S_ISREG):
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.rename(former.scratch, self.scratch)  # an empty folder gives way
                        shutil.rmtree(former.path, ignore_errors=True)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    return
                time.sleep(0.05)  # it is being killed by Ray: nothing to wait on
            except FileNotFoundError:
                return

    @property
    def key(self) -> bytes:
        """Secret that both ends of a connection must have."""
        return (self.path / _KEY).read_bytes()

    def log(self, rank: int) -> Path:
        """Output of a worker."""
        return self.path / f"log-{rank}"

    def stack(self, rank: int) -> Path:
        """Stacks of a worker, appended at each SIGUSR1."""
        return self.path / f"stack-{rank}"

    def control(self, rank: int) -> str:
        """Address at which a worker answers control messages."""
        return str(self.path / f"control-{rank}")

    @property
    def health(self) -> Path:
        """Health of the workers, written every second."""
        return self.path / "health.json"

    def remove(self) -> None:
        """Remove it with its contents; idempotent."""
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
    """Create and hold the lock; it is renamed when held, so that no other process finds it free."""
    lock = open(path / f"{_ALIVE}.new", "wb")  # noqa: SIM115 - held as long as the folder
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(lock.name, path / _ALIVE)
    return lock


def _remove_if_left(path: Path) -> None:
    """Remove the directory of a dead controller, whose lock ended with its process.

    Opens only directories and regular files of this user: others may create such names, even pipes, in a shared folder.
    """
    try:
        with _opened(path, os.O_DIRECTORY) as place, _opened(_ALIVE, os.O_NONBLOCK, place) as lock:
            if not (_is_ours(place, stat.S_ISDIR) and _is_ours(lock, stat.S_ISREG)):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:  # in use, or another controller is creating it
        return


@contextmanager
def _opened(path: Path | str, flags: int, within: int | None = None) -> Iterator[int]:
    """Open a path that is no link for reading, relative to an open folder if given; yield its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int, kind: Callable[[int], bool]) -> bool:
    found = os.fstat(descriptor)
    return found.st_uid == os.getuid() and kind(found.st_mode)
