"""torch's profiler in this process, over some steps; written as a Chrome trace, which Perfetto opens.

It never ends a run: every error becomes a text. torch is imported when a capture starts.
"""

import gzip
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from tilth.core.files import make_folder, rename
from tilth.trace.overlay import ClockMark, head_with_spans
from tilth.trace.spans import recorder

SUFFIX = ".json.gz"
_LEVEL = 1  # of gzip: a fifth of the time of level 9, which the run waits for, and a third more bytes
_CHUNK = 1 << 20


class Captured(NamedTuple):
    """Result of a capture: a file and its size, or the error."""

    path: str = ""
    bytes: int = 0
    error: str = ""


class Capture:
    """One capture at a time, started and stopped in the same thread."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._since: ClockMark | None = None

    def start(self, memory: bool = False) -> str:
        """Start recording operations with their shapes; memory: allocations too. Return the error or ""."""
        if self._profiler is not None:
            return "this process is being profiled already"
        self._since = ClockMark.now() if recorder.recording else None
        try:
            self._profiler = _started(memory)
        except Exception as error:  # noqa: BLE001 - errors of torch: another profiler, no CUPTI
            return _text(error)
        return ""

    def stop(self, stem: str, folder: str = "", rank: int = 0) -> Captured:
        """Stop and write ``stem.json.gz`` atomically; an empty stem: write nothing.

        folder, rank: those of this process's recorder, whose spans are merged into the trace.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return Captured(error="nothing is being profiled")
        target = Path(stem + SUFFIX)
        try:
            profiler.__exit__(None, None, None)
            spans = (Path(folder), rank, self._since) if folder and self._since else None
            return Captured(str(target), _write(profiler, target, spans) if stem else 0)
        except Exception as error:  # noqa: BLE001 - errors of torch, a full disk
            return Captured(error=_text(error))

    def drop(self) -> None:
        """Stop without writing; without a capture do nothing."""
        self.stop("")

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Show the block under this name, above its operations."""
        if self._profiler is None:
            return nullcontext()
        from torch.autograd.profiler import record_function

        return record_function(name)


def _started(memory: bool) -> Any:
    """Start torch.autograd.profiler: the events of torch.profiler, without its import of the compiler (seconds)."""
    import torch
    from torch.autograd.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read at the first start; keeps it from printing to stderr
    device = "cuda" if torch.cuda.is_available() else None
    found = profile(use_cpu=True, use_device=device, use_kineto=True, record_shapes=True, profile_memory=memory)
    return found.__enter__()


def _write(profiler: Any, target: Path, spans: tuple[Path, int, ClockMark] | None) -> int:
    """Write the compressed trace and return its size in bytes."""
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


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
