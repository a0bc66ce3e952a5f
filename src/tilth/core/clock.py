"""The time as runs write it, and what happens every second."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime


def utc_now(timespec: str = "milliseconds") -> str:
    """Return the time as ISO 8601 in UTC, such as 2026-01-31T12:00:00.000Z. timespec: that of ``isoformat``."""
    return datetime.now(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


@contextmanager
def periodically(name: str, seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in a thread of this name, which its error ends, every N seconds while the body runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
