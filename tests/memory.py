"""Memory of Python by tracemalloc."""

import threading
import tracemalloc

import pytest


def start_tracing():
    """Start tracemalloc; skip the test in a process with threads of the SDK ``tinker``, which last and allocate without
    the GIL: ``tracemalloc.stop`` frees what such a thread may be writing to, and the process dies (CPython 3.11)."""
    if any("_background_thread_func" in thread.name for thread in threading.enumerate()):
        pytest.skip("threads of another library allocate in this process")
    tracemalloc.start()
