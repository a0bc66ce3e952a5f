"""Files and folders that are there as a whole or not at all, also after a power cut.

Bytes survive one when the file was synchronised, its name when its folder was: so whatever gets its name here is
synchronised before, and the folder after. Nothing else in the package renames what has to last.
"""

import errno
import os
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
        if error.errno != errno.EINVAL or not path.is_dir():  # a file system that knows no such thing of folders
            raise
    finally:
        os.close(descriptor)


def rename(made: Path, final: Path, *, durable: bool = True) -> None:
    """Give a finished file or folder its name, at once; what had that name is replaced. OSError.

    Durable, with all its bytes, when this returns; of a folder with the names in it, whose files must be so already.
    """
    if durable and not made.is_symlink():
        sync(made)
    os.replace(made, final)
    if durable:
        sync(final.parent)


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, and those above it, whose names are durable when this returns. OSError."""
    if exist_ok and path.is_dir():
        return
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=exist_ok)
    sync(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names path and reason (disk full, read-only ...)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"cannot write {path}: {reason}; what was committed before is intact"
        raise StorageError(message, key=path.name) from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, beside the file; at the end of the block, unless it failed, that becomes the file, durably.

    Through a link the file is written that it leads to. StorageError, naming ``path``: it cannot be written, or it is
    there and no regular file (a device, a pipe, a folder), which a new file would take the place of.
    """
    try:
        real = path.resolve()
        if real.exists() and not real.is_file():
            raise StorageError(f"cannot write {path}: it exists and is no regular file", key=f"{path.name}.type")
    except (OSError, RuntimeError) as error:  # a loop of links
        message = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        raise StorageError(message, key=path.name) from error
    temporary = real.with_name(f".{real.name}.tmp")
    try:
        yield temporary
        rename(temporary, real)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", key=path.name) from error
    finally:
        with suppress(OSError):  # of the same disk, which has said its word; as a rule it has its name by now
            temporary.unlink(missing_ok=True)
