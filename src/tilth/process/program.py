"""Life of a child that speaks by frames, seen from within. Imports no torch."""

import ctypes
import io
import os
import pkgutil
import signal
import sys
from typing import Any, BinaryIO

from tilth.config.imports import end_uncollected

_PDEATHSIG = 1
"""PR_SET_PDEATHSIG: the signal that a process gets when its parent ends."""


def run(parent: int, main: str, *arguments: Any) -> None:
    """Call "module:function" with streams of requests and replies, and arguments, in a child of this process."""
    die_with(parent)
    outlive_signals()
    requests, replies = take_pipes()
    end_uncollected()
    pkgutil.resolve_name(main)(requests, replies, *arguments)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the parent dies, even if something holds the GIL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def outlive_signals() -> None:
    """Ignore signals that a terminal or a launcher sends to all processes: the run saves and ends.

    Uses a handler, because processes that this one starts would inherit SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol away from file descriptors 0 and 1, which user code and its child processes may use.

    The pipes stay open until the process ends, so that the parent sees its end.
    """
    requests, replies = os.fdopen(os.dup(0), "rb", closefd=False), os.fdopen(os.dup(1), "wb", closefd=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a crash loses no message
    return requests, replies


def end_fork(process: int) -> None:
    """End a fork of this process that the user's code made and that came back from it: only the process answers."""
    if os.getpid() != process:
        os._exit(0)
