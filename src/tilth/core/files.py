"""Write files and folders atomically, also under a power cut.

Bytes survive a power cut after fsync of the file, its name after fsync of the folder: so a file is synchronised before
it is renamed, and its folder after. All durable renames of the package are here.
"""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilth.core.errors import StorageError


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, durable. OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems have no fsync of folders
            raise
    finally:
        os.close(descriptor)


def rename(made: Path, final: Path, *, durable: bool = True) -> None:
    """Rename a finished file or folder atomically, replacing an existing one. OSError.

    Durable when this returns: the bytes of a file, or the names in a folder, whose files must be durable already.
    """
    if durable and not made.is_symlink():
        sync(made)
    os.replace(made, final)
    if durable:
        sync(final.parent)


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder and its parents durably. OSError."""
    if exist_ok and path.is_dir():
        return
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=exist_ok)
    sync(path.parent)


def create(path: Path, data: bytes) -> bool:
    """Make a file in one piece; return False if there is one, which stays. OSError."""
    whole = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    whole.write_bytes(data)
    try:
        os.link(whole, path)
    except FileExistsError:
        return False
    finally:
        whole.unlink(missing_ok=True)
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError with path and reason (disk full, read-only ...)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"cannot write {path}: {reason}; what was committed before is intact"
        raise StorageError(message, key=path.name) from error


@contextmanager
def atomic_write(path: Path, *, follow: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside the file, which replaces the file durably if the block succeeds.

    follow: of a link, the target is written; else the link is replaced. StorageError if the file cannot be written, or
    if it exists and is no regular file (a device, a pipe, a folder), which a new file would replace.
    """
    try:
        real = path.resolve() if follow else path
        if follow and real.exists() and not real.is_file():
            raise StorageError(f"cannot write {path}: it exists and is no regular file", key=f"{path.name}.type")
    except (OSError, RuntimeError) as error:  # a loop of links
        message = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        raise StorageError(message, key=path.name) from error
    temporary = real.with_name(f".{real.name}.tmp")
    try:
        with writing(path):
            yield temporary
            rename(temporary, real)
    finally:
        with suppress(OSError):  # of the disk that failed already; after a success there is no such file
            temporary.unlink(missing_ok=True)
