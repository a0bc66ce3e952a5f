"""Imports and the end of a process without garbage collections."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Put off Python's garbage collections during a block, of imports mostly.

    Modules make some hundred thousand objects that all stay. While they are made, collections look at them again and
    again: a fifth of the time that importing torch and the roles takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def end_uncollected() -> None:
    """Skip the garbage collections with which Python ends this process: a second or more once torch is imported.

    For processes that are nothing but Tilth. What must be closed or written is closed by its owner.
    """
    atexit.register(gc.freeze)
