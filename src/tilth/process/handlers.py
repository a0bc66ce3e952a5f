"""Handlers of signals for the time of a block."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


@contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[bool]:
    """Handle these signals in the block, then as before. Yield False, and change nothing, outside of the main thread,
    which alone can set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
