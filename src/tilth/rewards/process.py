"""Reward process: reads chunks of items from a pipe, calls the reward function, writes results to another pipe.

Imports no torch. Messages are pickled; both ends are this program, and only they have the pipes.
"""

import os
import pickle
import time
from collections.abc import Callable
from contextlib import closing
from mmap import mmap
from typing import Any, BinaryIO

from tilth.config.imports import uncollected
from tilth.core.errors import RewardError
from tilth.process.frames import frame, read_frame
from tilth.process.program import end_fork
from tilth.rewards.functions import Reward, Weighted, called, describe, load_reward, normalise

PLACES = 1 << 20
"""Exceeds the number of items in a chunk."""
FLUSH_SECONDS = 0.005
"""Maximum time a result waits for others before it is sent: a hang loses no more finished work than that."""

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


def main(requests: BinaryIO, replies: BinaryIO, progress_fd: int) -> None:
    """Serve until the pipe from the parent is closed."""
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


def receive_function(requests: BinaryIO) -> Reward:
    """Receive the function, as a specification or by value. Raises RewardError of one line."""
    greeting = read_frame(requests)
    if greeting is None:
        os._exit(0)  # the parent has ended
    kind, body = pickle.loads(greeting)
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

    while (body := read_frame(requests)) is not None:
        try:
            chunk: list[Item] = pickle.loads(body)
        except Exception as error:  # noqa: BLE001  (an item may hold the user's objects)
            send(replies, ("unreadable", describe(error)))
            continue
        score_chunk(function, chunk, progress, reply)


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
