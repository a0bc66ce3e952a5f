"""The process that scores: reads chunks of items from a pipe, calls the reward function, writes results to another.

Imports no torch. Standard output belongs to nobody here (it goes to standard error), so whatever the function prints
cannot break the protocol. Messages are pickled; both ends are this program, over pipes that only they have.
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

from tilth.core.errors import RewardError
from tilth.rewards.functions import Reward, Weighted, describe, load_reward, normalise

PLACES = 1 << 20
"""More items than a chunk has."""
FLUSH_SECONDS = 0.005
"""Results wait at most this long for company: a hang loses no more finished work than that."""
PR_SET_PDEATHSIG = 1

Item = tuple[str, str, dict[str, Any]]
Result = tuple[float | None, dict[str, float], str, str, float]
"""value, parts, reason, status, seconds."""


class ScoringProgress:
    """Memory shared by a process that scores and its parent: what is at work since when.

    Each of the two words is written at once. (``struct.pack_into`` would first write zeros, and a parent that looks
    just then would see an item that has been at work since the machine was started.)
    """

    NBYTES = 16

    def __init__(self, fd: int) -> None:
        self._memory = mmap(fd, self.NBYTES)
        self._words = memoryview(self._memory).cast("q")

    def put(self, begun: float, place: int) -> None:
        """begun: time.monotonic, kept in milliseconds; place: of the item in its chunk, -1: none is at work."""
        self._words[0] = int(begun * 1000) * PLACES + place + 1

    def get(self) -> tuple[float, int]:
        """What was put last."""
        milliseconds, place = divmod(self._words[0], PLACES)
        return milliseconds / 1000, place - 1

    @property
    def member(self) -> int:
        """Which of several rewards is at work on that item, by its place among them."""
        return self._words[1]

    def enter(self, member: int) -> None:
        """Say so."""
        self._words[1] = member

    def close(self) -> None:
        """Give the memory back."""
        self._words.release()
        self._memory.close()


def main(progress_fd: int, parent: int) -> None:
    """Serve until the pipe from the parent is closed."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a launcher sends it to all; the run ends at a step's end
    requests, replies = take_pipes()
    with closing(ScoringProgress(progress_fd)) as progress:
        try:
            function = receive_function(requests)
        except RewardError as error:
            send(replies, ("failed", str(error), error.key))
            return
        if isinstance(function, Weighted):
            function.entered = progress.enter
        send(replies, ("ready",))
        serve(function, requests, replies, progress)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent dies, even if the function hangs and holds the GIL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol away from file descriptors 0 and 1, which belong to the function and the programs it starts.

    The pipes stay open to the very end of the process, so that the parent sees from them when it has ended.
    """
    requests, replies = os.fdopen(os.dup(0), "rb", closefd=False), os.fdopen(os.dup(1), "wb", closefd=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a crash loses no message
    return requests, replies


def receive_function(requests: BinaryIO) -> Reward:
    """The function, given as a specification or by value. Raises RewardError in one line."""
    kind, body = receive(requests)
    if kind == "spec":
        return load_reward(body)
    try:
        return pickle.loads(body)
    except Exception as error:
        message = f"the reward function cannot be rebuilt in its process: {describe(error)}"
        raise RewardError(message, key="function.unpickle") from error


def serve(function: Reward, requests: BinaryIO, replies: BinaryIO, progress: ScoringProgress) -> None:
    """Chunk after chunk until end of file. Each chunk is answered by one or more ``results``, in order."""
    while (body := receive_bytes(requests)) is not None:
        try:
            chunk: list[Item] = pickle.loads(body)
        except Exception as error:  # noqa: BLE001  (an item may hold the user's objects)
            send(replies, ("unreadable", describe(error)))
            continue
        score_chunk(function, chunk, progress, lambda results: send(replies, ("results", results)))


def score_chunk(
    function: Reward, chunk: list[Item], progress: ScoringProgress, reply: Callable[[list[Result]], None]
) -> None:
    """Score items one after another; the one at work is in ``progress``, so that the parent knows whom to blame."""
    ready: list[Result] = []
    flushed = time.monotonic()
    for place, item in enumerate(chunk):
        begun = time.monotonic()
        progress.put(begun, place)
        value, parts, reason, status = score_item(function, item)
        ended = time.monotonic()
        ready.append((value, parts, reason, status, ended - begun))
        if ended - flushed > FLUSH_SECONDS or place == len(chunk) - 1:
            progress.put(ended, -1)  # waiting for the parent to read is nobody's fault
            reply(ready)
            ready, flushed = [], time.monotonic()


def score_item(function: Reward, item: Item) -> tuple[float | None, dict[str, float], str, str]:
    """One call. Whatever the function raises or returns becomes a value, or a missing one with its reason."""
    try:
        value, parts, reason = normalise(function(*item))
    except BaseException as error:  # noqa: BLE001  (a call that exits or is cancelled costs its own reward only)
        return None, {}, describe(error), "error"
    return value, parts, reason, "ok" if value is not None else "invalid"


def send(stream: BinaryIO, message: tuple[Any, ...]) -> None:
    """Length and pickle."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


def receive_bytes(stream: BinaryIO) -> bytes | None:
    """The body of the next message; None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    size = struct.unpack("<Q", head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def receive(stream: BinaryIO) -> Any:
    """The next message, unpickled; ends the process if the parent went away."""
    body = receive_bytes(stream)
    if body is None:
        os._exit(0)
    return pickle.loads(body)
