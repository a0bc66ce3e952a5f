"""The stages of a save: each is timed, and what fails in one is told with its name."""

from collections.abc import Iterator
from contextlib import contextmanager

from tilth.core.errors import StorageError
from tilth.trace.spans import span

STAGES = ("begin", "snapshot", "checksum", "write", "sync", "report", "manifest", "publish", "retention")


class StageError(StorageError):
    """A stage of a save failed at a path; key: ``save.STAGE``, with ``.rankN`` behind it where a rank is at fault."""

    def __init__(self, message: str, stage: str = "", path: str = "", reason: str = "", *, key: str = "") -> None:
        super().__init__(message, key=key)
        self.stage, self.path, self.reason = stage, path, reason


def stage(name: str, path: str) -> None:
    """Called as a stage begins, and while writing before each part. It does nothing: a test fails or ends it here."""


@contextmanager
def staged(name: str, path: str, nbytes: int = 0) -> Iterator[span]:
    """A span ``save.NAME`` around a stage; StageError where the disk, a store or the memory refuses."""
    try:
        with span(f"save.{name}", bytes=nbytes) as timed:
            stage(name, path)
            yield timed
    except OSError as error:
        raise failed(name, str(error.filename or path), error.strerror or str(error)) from error
    except MemoryError as error:
        raise failed(name, path, "out of memory") from error


def failed(stage: str, path: str, reason: str) -> StageError:
    """The error of a stage, before it is known of which save."""
    return StageError(f"{stage} of {path} failed: {reason}", stage, path, reason, key=f"save.{stage}")
