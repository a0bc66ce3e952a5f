"""Reward process: reads chunks of items from a pipe, calls the reward function, writes results to another pipe.

Imports no torch. Standard output is redirected to standard error, so that the function's prints cannot break the
protocol. Messages are pickled; both ends are this program, and only they have the pipes.
"""

import ctypes
import io
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import closing
from mmap import mmap
from typing import Any, BinaryIO

from tilth.config.imports import end_uncollected, uncollected
from tilth.core.errors import RewardError
from tilth.rewards.functions import Reward, Weighted, called, describe, load_reward, normalise

PLACES = 1 << 20
"""Exceeds the number of items in a chunk."""
FLUSH_SECONDS = 0.005
"""Maximum time a result waits for others before it is sent: a hang loses no more finished work than that."""
PR_SET_PDEATHSIG = 1

Item = tuple[str, str, dict[str, Any]]
Result = tuple[float | None, dict[str, float], str, str, float]
"""value, parts, reason, status, seconds."""


class ScoringProgress:
    """Memory shared by a reward process and its parent: the item being scored and when it began.

    Each of the two words is written atomically. (``struct.pack_into`` writes zeros first; a parent that reads them
    would see an item that began when the machine booted.)
    """

    NBYTES = 16

    def __init__(self, fd: int) -> None:
        self._memory = mmap(fd, self.NBYTES)
        self._words = memoryview(self._memory).cast("q")

    def put(self, begun: float, place: int) -> None:
        """Set the item. begun: time.monotonic, stored in milliseconds; place: index in its chunk, -1: none."""
        self._words[0] = int(begun * 1000) * PLACES + place + 1

    def get(self) -> tuple[float, int]:
        """Return (begun, place) of the last ``put``."""
        milliseconds, place = divmod(self._words[0], PLACES)
        return milliseconds / 1000, place - 1

    @property
    def member(self) -> int:
        """Index of the member of ``Weighted`` that is scoring the item."""
        return self._words[1]

    def enter(self, member: int) -> None:
        """Set ``member``."""
        self._words[1] = member

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._memory.close()


def main(progress_fd: int, parent: int) -> None:
    """Serve until the pipe from the parent is closed."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # launchers signal all processes; the run ends after its step
    requests, replies = take_pipes()
    end_uncollected()
    with closing(ScoringProgress(progress_fd)) as progress:
        try:
            with uncollected():
                function = receive_function(requests)
        except RewardError as error:
            send(replies, ("failed", str(error), error.key))
            return
        if isinstance(function, Weighted):
            function.entered = progress.enter
        send(replies, ("ready",))
        serve(function, requests, replies, progress)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the parent dies, even if the function holds the GIL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol away from file descriptors 0 and 1, which the function and its child processes may use.

    The pipes stay open until the process ends, so that the parent sees its end.
    """
    requests, replies = os.fdopen(os.dup(0), "rb", closefd=False), os.fdopen(os.dup(1), "wb", closefd=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a crash loses no message
    return requests, replies


def receive_function(requests: BinaryIO) -> Reward:
    """Receive the function, as a specification or by value. Raises RewardError of one line."""
    kind, body = receive(requests)
    if kind == "spec":
        return load_reward(body)
    try:
        return pickle.loads(body)
    except Exception as error:
        message = f"the reward function cannot be rebuilt in its process: {describe(error)}"
        raise RewardError(message, key="function.unpickle") from error


def serve(function: Reward, requests: BinaryIO, replies: BinaryIO, progress: ScoringProgress) -> None:
    """Score chunks until end of file, each answered by one or more ``results`` messages in order."""
    process = os.getpid()

    def reply(results: list[Result]) -> None:
        end_fork(process)
        send(replies, ("results", results))

    while (body := receive_bytes(requests)) is not None:
        try:
            chunk: list[Item] = pickle.loads(body)
        except Exception as error:  # noqa: BLE001  (an item may hold the user's objects)
            send(replies, ("unreadable", describe(error)))
            continue
        score_chunk(function, chunk, progress, reply)


def end_fork(process: int) -> None:
    """End a fork of this process that the user's code made and that came back from it: only the process answers."""
    if os.getpid() != process:
        os._exit(0)


def score_chunk(
    function: Reward, chunk: list[Item], progress: ScoringProgress, reply: Callable[[list[Result]], None]
) -> None:
    """Score items in order. ``progress`` holds the current one, so that the parent can blame it."""
    ready: list[Result] = []
    flushed = time.monotonic()
    for place, item in enumerate(chunk):
        begun = time.monotonic()
        progress.put(begun, place)
        value, parts, reason, status = score_item(function, item)
        ended = time.monotonic()
        ready.append((value, parts, reason, status, ended - begun))
        if ended - flushed > FLUSH_SECONDS or place == len(chunk) - 1:
            progress.put(ended, -1)  # no item is blamed while the parent reads
            reply(ready)
            ready, flushed = [], time.monotonic()


def score_item(function: Reward, item: Item) -> tuple[float | None, dict[str, float], str, str]:
    """Call the function once; return (value or None, parts, reason, status) whatever it raises or returns."""
    try:
        value, parts, reason = normalise(called(function, *item))
    except BaseException as error:  # noqa: BLE001  (a call that exits or is cancelled loses only its own reward)
        return None, {}, describe(error), "error"
    return value, parts, reason, "ok" if value is not None else "invalid"


def send(stream: BinaryIO, message: tuple[Any, ...]) -> None:
    """Write one message."""
    stream.write(frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
    stream.flush()


def drain(fd: int, into: bytearray) -> bool:
    """Read what there is from a pipe that does not block; False at the end of the stream."""
    try:
        while received := os.read(fd, 1 << 20):
            into += received
    except BlockingIOError:
        return True
    return False


def frame(body: bytes) -> bytes:
    """Return a message: 8 bytes of length, then the body."""
    return struct.pack("<Q", len(body)) + body


def receive_bytes(stream: BinaryIO) -> bytes | None:
    """Read the body of the next message; None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    size = struct.unpack("<Q", head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def receive(stream: BinaryIO) -> Any:
    """Read and unpickle the next message; end the process if the parent has ended."""
    body = receive_bytes(stream)
    if body is None:
        os._exit(0)
    return pickle.loads(body)
