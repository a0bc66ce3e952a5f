"""The stages of a save: each is timed, and an error names the stage that failed."""

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
    """Do nothing; called as a stage begins and before each part is written, so that a test can fail or kill it here."""


@contextmanager
def staged(name: str, path: str, nbytes: int = 0) -> Iterator[span]:
    """Record a span ``save.NAME`` around a stage; StageError if the disk, a store or the memory fails."""
    try:
        with span(f"save.{name}", bytes=nbytes) as timed:
            stage(name, path)
            yield timed
    except OSError as error:
        raise failed(name, str(error.filename or path), error.strerror or str(error)) from error
    except MemoryError as error:
        raise failed(name, path, "out of memory") from error


def failed(stage: str, path: str, reason: str) -> StageError:
    """Make the error of a stage; ``saver`` adds step and rank."""
    return StageError(f"{stage} of {path} failed: {reason}", stage, path, reason, key=f"save.{stage}")
