"""torch's profiler in this process: what it saw of some steps, as a Chrome trace that Perfetto opens.

It never ends a run: whatever goes wrong with it becomes a text. torch is imported when a capture begins, never before.
"""

import gzip
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from tilth.core.target import make_folder, rename
from tilth.trace.overlay import ClockMark, head_with_spans
from tilth.trace.spans import recorder

SUFFIX = ".json.gz"
_LEVEL = 1  # of compression: the run waits for it, and 1 takes a fifth of the time of 9 for a file a third larger
_CHUNK = 1 << 20


class Captured(NamedTuple):
    """What became of a capture: a file of so many bytes, or why there is none."""

    path: str = ""
    bytes: int = 0
    error: str = ""


class Capture:
    """One capture at a time, begun and ended in the same thread."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._since: ClockMark | None = None

    def start(self, memory: bool = False) -> str:
        """Record every operation, with its shapes, from now on; memory: each allocation too. "" or what went wrong."""
        if self._profiler is not None:
            return "this process is being profiled already"
        self._since = ClockMark.now() if recorder.recording else None
        try:
            self._profiler = _started(memory)
        except Exception as error:  # noqa: BLE001 - whatever torch raises (another profiler is running, no CUPTI)
            return _told(error)
        return ""

    def stop(self, stem: str, folder: str = "", rank: int = 0) -> Captured:
        """End it and write ``stem.json.gz``, as a whole or not at all; an empty stem: write nothing.

        folder: where the recorder of this process writes, as ``rank``; its spans are laid over the operations.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return Captured(error="nothing is being profiled")
        target = Path(stem + SUFFIX)
        try:
            profiler.__exit__(None, None, None)
            spans = (Path(folder), rank, self._since) if folder and self._since else None
            return Captured(str(target), _write(profiler, target, spans) if stem else 0)
        except Exception as error:  # noqa: BLE001 - whatever torch raises, a full disk
            return Captured(error=_told(error))

    def drop(self) -> None:
        """End it and forget what it saw; without one nothing happens."""
        self.stop("")

    def named(self, name: str) -> AbstractContextManager[Any]:
        """The block is shown under this name, above the operations inside."""
        if self._profiler is None:
            return nullcontext()
        from torch.autograd.profiler import record_function

        return record_function(name)


def _started(memory: bool) -> Any:
    """torch.autograd.profiler and not torch.profiler: the same events by Kineto, without the latter's import of the
    compiler (seconds) at the first start."""
    import torch
    from torch.autograd.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read at the first start: else it prints its stages to stderr
    device = "cuda" if torch.cuda.is_available() else None
    found = profile(use_cpu=True, use_device=device, use_kineto=True, record_shapes=True, profile_memory=memory)
    return found.__enter__()


def _write(profiler: Any, target: Path, spans: tuple[Path, int, ClockMark] | None) -> int:
    """The trace as a compressed file; its size in bytes."""
    plain, packed = (target.with_name(f".{target.name}.{kind}") for kind in ("json", "tmp"))
    make_folder(target.parent)
    try:
        profiler.export_chrome_trace(str(plain))
        if not plain.exists() or not plain.stat().st_size:
            raise OSError(f"torch has written nothing to {target.parent}")
        with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=_LEVEL) as sink:
            head = source.read(_CHUNK)
            sink.write(head if spans is None else head_with_spans(head, *spans))
            shutil.copyfileobj(source, sink, _CHUNK)
        rename(packed, target)
    finally:
        for left in (plain, packed):
            left.unlink(missing_ok=True)
    return target.stat().st_size


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
