"""Files that a person names to be written: as a whole or not at all, and never in the place of something else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilth.core.errors import StorageError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, beside the file; at the end of the block, unless it failed, that becomes the file.

    Through a link the file is written that it leads to. StorageError, naming ``path``: it cannot be written, or it is
    there and no regular file (a device, a pipe, a folder), which a new file would take the place of.
    """
    try:
        real = path.resolve()
        if real.exists() and not real.is_file():
            raise StorageError(f"cannot write {path}: it is there and is no regular file")
    except (OSError, RuntimeError) as error:  # a loop of links
        raise StorageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    temporary = real.with_name(f".{real.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, real)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # of the same disk, which has said its word; as a rule it has its name by now
            temporary.unlink(missing_ok=True)
