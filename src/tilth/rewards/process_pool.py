"""Pool of processes that score completions, with a time limit for each call.

The processes are separate programs (``python -c``) connected by pipes, so that the pool works from a notebook, from a
script without a ``__main__`` guard and from standard input. A function given by value travels by cloudpickle through
the pipe: both ends trust each other, since the child runs the user's code and nobody else can write to its pipes.

``concurrent.futures`` and ``multiprocessing.Pool`` cannot kill one hanging call and keep the others.
"""

import math
import os
import pickle
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import cloudpickle

from tilth.core.errors import RewardError
from tilth.process.by_value import dumps
from tilth.process.child import ChildPool, PipedChild, death, ready
from tilth.process.output import Prints
from tilth.rewards.functions import Reward, describe, is_importable, load_reward, member_names
from tilth.rewards.process import ScoringProgress

Status = Literal["ok", "error", "invalid", "timeout", "died"]
Item = tuple[Hashable, str, str, dict[str, Any]]
"""id, prompt, completion, info."""

START_SECONDS = 120.0
"""Time limit for a process to become ready, or to begin its work."""
BITE_SECONDS = 0.002
"""Minimum work in a chunk, so that messages do not slow down quick functions."""
IN_CHILD = "TILTH_REWARD_CHILD"
CORRECT = "correct"
"""Part of a reward that is 1 for a right answer; without it the reward itself counts."""


@dataclass(frozen=True)
class Outcome:
    """Result of one item. Plain values only, so that ``Outcome(**dataclasses.asdict(o)) == o``."""

    value: float | None
    """None: the reward is missing."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named numbers beside the reward; NaN if a part was no number."""
    reason: str = ""
    """Why the reward is missing, in one line."""
    seconds: float = 0.0
    status: Status = "ok"
    """ok; error: the function raised; invalid: it returned no finite number; timeout; died: with its process."""

    @property
    def verdict(self) -> float:
        """The part ``correct``, else the reward; NaN: missing."""
        return math.nan if self.value is None else self.parts.get(CORRECT, self.value)


def commonest(reasons: Iterable[str]) -> str:
    """Return the reason that occurs most often; of equally frequent ones the first."""
    return Counter(reasons).most_common(1)[0][0]


class RewardPool:
    """Reward processes, each of which scores one call at a time.

    Args:
        function: ``FILE.py:function``, ``module:function``, a built-in verifier, several of these with their weights,
            or any callable ``(prompt, completion, info) -> float | dict``, including lambdas and functions of the
            running script.
        workers: number of processes. timeout: limit of one call in seconds.
        quiet: keep the function's output until ``print_to`` names its file; False: standard error.
        wait: return only when every process is ready; otherwise ``ready`` or the first ``score`` waits.
        start: False: start no process before ``ready`` or the first ``score``. A pickled pool is rebuilt like that.

    Raises: RewardError if the function cannot be loaded, sent or rebuilt.

    A call that raises, returns no finite number, exceeds the limit or ends its process makes only its own reward
    missing, with a reason. The parent enforces the limit: a call that holds the GIL is killed too.
    """

    def __init__(
        self,
        function: str | Mapping[str, float] | Reward,
        *,
        workers: int = 1,
        timeout: float = 10.0,
        quiet: bool = False,
        wait: bool = True,
        start: bool = True,
    ) -> None:
        if os.environ.get(IN_CHILD):
            message = "the reward's file starts training when it is imported: guard that by __name__"
            raise RewardError(message, key="__name__")
        if workers < 1 or not timeout > 0:
            message = f"a reward pool needs workers >= 1 and timeout > 0, got {workers} and {timeout}"
            raise RewardError(message, key="workers" if workers < 1 else "timeout")
        self.timeout = timeout
        self._function = function
        greeting = cloudpickle.dumps(_travelling(function))
        self._members = member_names(function)
        self._workers = workers
        self._prints = Prints() if quiet else None
        self._lock = threading.Lock()
        self._pool = ChildPool(partial(ScoringProcess, greeting), self._prints)
        self._children = self._pool.children
        self._failure: RewardError | None = None
        self._proven = False
        if start:
            self._fill()
        if start and wait:
            self.ready()

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(
            RewardPool, workers=self._workers, timeout=self.timeout, quiet=self._prints is not None, start=False
        )
        return again, (self._function,)

    def print_to(self, path: Path) -> None:
        """Append the function's earlier and later output to this file, if the pool is ``quiet``."""
        if self._prints is not None:
            self._prints.to(path)

    def ready(self) -> None:
        """Wait until every process has the function. Close the pool and raise RewardError if one cannot load it."""
        with self._lock:
            self._failure = None
            self._fill()
            for child in self._children:  # it gets its function from now on only, maybe long after its start
                if child.state == "starting":
                    child.progress.put(time.monotonic(), -1)
            job = Job([], {}, self._workers)
            while any(child.state == "starting" for child in self._children) and not self._failure:
                self._turn(job)
        if self._failure:
            self.close()
            raise self._failure
        self._proven = True

    def score(self, items: Sequence[Item], known: Mapping[Any, Outcome] | None = None) -> list[Outcome]:
        """Score items ``(id, prompt, completion, info)``; return their outcomes in order.

        known: id -> outcome of an earlier attempt; these items are not scored again.
        """
        if not self._proven:
            self.ready()
        with self._lock:
            job = Job(items, known or {}, self._workers)
            try:
                self._failure = None
                self._fill()
                while job.open:
                    self._turn(job)
            finally:
                self._abandon()
            return job.done()

    def close(self) -> None:
        """End all processes and wait for their end. May be called twice."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _fill(self) -> None:
        if not self._pool.alive:
            raise RewardError("the reward pool is closed", key="closed")
        for _ in range(self._workers - len(self._children)):
            self._pool.start()

    def _abandon(self) -> None:
        """End processes that still work for an interrupted call of ``score``."""
        for child in [c for c in self._children if c.state == "busy"]:
            self._children.remove(child)
            child.kill()

    def _turn(self, job: "Job") -> None:
        """Hand out work, wait for a message or a deadline, and handle it."""
        for child in self._children:
            while child.state == "idle" and (chunk := job.take()):
                child.give(chunk, job)
        if not self._children:
            job.give_up(str(self._failure))
        if all(child.state == "idle" for child in self._children):
            return
        happened = ready(self._children, self._first_deadline() - time.monotonic())
        for child in list(self._children):
            if child in happened:
                self._listen(child, job)
            if child.state != "lost" and (work := child.overdue(self.timeout)):
                self._lose(child, job, "timeout", work)

    def _first_deadline(self) -> float:
        first = min(child.deadline(self.timeout) for child in self._children)
        if any(child.state == "busy" for child in self._children):
            first = min(first, time.monotonic() + self.timeout)  # an item that begins now cannot be late earlier
        return first

    def _listen(self, child: "ScoringProcess", job: "Job") -> None:
        """Handle a child's messages; the end of its pipe means that it died."""
        alive = child.write() and child.read()
        for message in child.messages():
            child.take_in(message, job)
        if not alive or child.failure:
            self._lose(child, job, "died", child.progress.get())

    def _lose(self, child: "ScoringProcess", job: "Job", status: Status, work: tuple[float, int]) -> None:
        """End a child that hangs or died, blame its current item, queue the rest of its chunk, start another child."""
        begun, place = work
        who = f"{self._members[child.progress.member]}: " if self._members and place >= 0 else ""
        starting, code = child.state == "starting", child.kill()
        for message in child.messages():  # finished while it was being killed
            child.take_in(message, job)
        self._children.remove(child)
        if starting:  # would fail again, so this call does not retry
            why = f"not ready after {START_SECONDS:g} s" if status == "timeout" else death(code)
            self._failure = child.failure or RewardError(f"the reward process {why}", key=f"reward.start.{status}")
            return
        seconds = time.monotonic() - begun
        reason = f"took longer than {self.timeout:g} s" if status == "timeout" else f"its process {death(code)}"
        job.lost(child.chunk, child.finished, place, Outcome(None, {}, who + reason, seconds, status))
        self._fill()


class Job:
    """State of one call of ``score``: items, outcomes and the queue."""

    def __init__(self, items: Sequence[Item], known: Mapping[Any, Outcome], workers: int) -> None:
        self.items = items
        self.outcomes: list[Outcome | None] = [known.get(item[0]) for item in items] if known else [None] * len(items)
        self.queue = deque(i for i, outcome in enumerate(self.outcomes) if outcome is None)
        self.open = len(self.queue)
        self.workers = workers
        self.scored, self.seconds = 0, 0.0
        self.alone: set[int] = set()

    def take(self) -> list[int]:
        """Return the next chunk: the whole queue for one worker, a share of it for several; suspects one by one."""
        if self.queue and self.queue[0] in self.alone:
            return [self.queue.popleft()]
        share = len(self.queue) / (2 * self.workers if self.workers > 1 else 1)
        size = max(math.ceil(share), int(self.scored * BITE_SECONDS / self.seconds) if self.scored else 0)
        chunk: list[int] = []
        while self.queue and len(chunk) < size and self.queue[0] not in self.alone:
            chunk.append(self.queue.popleft())
        return chunk

    def settle(self, i: int, outcome: Outcome) -> None:
        """Record the outcome of item i."""
        self.outcomes[i] = outcome
        self.open -= 1
        self.scored += 1
        self.seconds += outcome.seconds + 1e-9

    def lost(self, chunk: list[int], finished: int, place: int, outcome: Outcome) -> None:
        """Settle the item at ``place`` of a lost process unless it is finished; queue the other items again."""
        left = chunk[finished:]
        if place >= finished:
            self.settle(chunk[place], outcome)
            left.remove(chunk[place])
        elif place < 0:
            self.suspect(left, outcome)
            return
        self.queue.extendleft(reversed(left))

    def suspect(self, left: list[int], outcome: Outcome) -> None:
        """Retry each of these items alone, since any may be at fault; an item that was alone gets the outcome."""
        if len(left) == 1 and left[0] in self.alone:
            self.settle(left[0], outcome)
            return
        self.alone.update(left)
        self.queue.extendleft(reversed(left))

    def give_up(self, reason: str) -> None:
        """Settle all queued items as died, since no process can be started."""
        while self.queue:
            self.settle(self.queue.popleft(), Outcome(None, {}, f"no process to score it: {reason}", 0.0, "died"))

    def done(self) -> list[Outcome]:
        """Return all outcomes, in order."""
        return [outcome for outcome in self.outcomes if outcome is not None]


class ScoringProcess(PipedChild):
    """One process and its current chunk."""

    def __init__(self, greeting: bytes, output: int | None) -> None:
        if not sys.executable:
            message = "sys.executable is empty: without the path of this Python no reward process can be started"
            raise RewardError(message, key="sys.executable")
        self.state: Literal["starting", "idle", "busy", "lost"] = "starting"
        self.failure: RewardError | None = None
        self.chunk: list[int] = []
        self.finished = 0
        with tempfile.TemporaryFile() as shared:
            shared.truncate(ScoringProgress.NBYTES)
            fd = shared.fileno()
            self.progress = ScoringProgress(fd)
            own = {IN_CHILD: "1"}
            super().__init__("tilth.rewards.process:main", [fd], greeting, output, variables=own, pass_fds=(fd,))
        self.progress.put(time.monotonic(), -1)

    @property
    def idle(self) -> bool:
        """True if it ends by itself once its requests end."""
        return self.state == "idle"

    def deadline(self, timeout: float) -> float:
        """Return when (time.monotonic) the current item, or the start of work, exceeds its limit."""
        begun, place = self.progress.get()
        if self.state == "idle":
            return math.inf
        return begun + (timeout if place >= 0 else START_SECONDS)

    def overdue(self, timeout: float) -> tuple[float, int] | None:
        """Return the work that exceeds its limit as (begun, place), or None; also None if it changed meanwhile."""
        work = self.progress.get()
        late = time.monotonic() > self.deadline(timeout)
        return work if late and work == self.progress.get() else None

    def give(self, chunk: list[int], job: Job) -> None:
        """Send a chunk of items; what cannot be sent is settled as an error, one by one."""
        try:
            body = cloudpickle.dumps([job.items[i][1:] for i in chunk])
        except Exception as error:  # noqa: BLE001  (pickling runs the user's objects)
            job.suspect(chunk, Outcome(None, {}, f"cannot be sent to its process: {describe(error)}", 0.0, "error"))
            return
        self.state, self.chunk, self.finished = "busy", chunk, 0
        self.progress.put(time.monotonic(), -1)
        self.send(body)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """Yield the complete messages received so far."""
        yield from map(pickle.loads, self.bodies())

    def take_in(self, message: tuple[Any, ...], job: Job) -> None:
        """Handle one message: ready, failed, unreadable or results."""
        kind, *rest = message
        if kind == "ready":
            self.state = "idle"
        elif kind == "failed":
            self.failure = RewardError(rest[0], key=rest[1])
        elif kind == "unreadable":
            self.state = "idle"
            job.suspect(self.chunk, Outcome(None, {}, f"cannot be rebuilt in its process: {rest[0]}", 0.0, "error"))
        else:
            self._results(rest[0], job)

    def _results(self, results: list[Any], job: Job) -> None:
        for i, (value, parts, reason, status, seconds) in zip(self.chunk[self.finished :], results):
            job.settle(i, Outcome(value, parts, reason, seconds, status))
        self.finished += len(results)
        if self.finished == len(self.chunk):
            self.state = "idle"

    def kill(self) -> int:
        """Kill the process and its children, read its last messages, return its exit code (-n: by signal n)."""
        self.state = "lost"
        code = super().kill()
        self.progress.close()
        return code


def _travelling(function: str | Mapping[str, float] | Reward) -> tuple[str, Any]:
    """Return ("spec", names) for a specification, ("value", pickle) for a callable. Raises RewardError."""
    if isinstance(function, str):
        return "spec", function
    if isinstance(function, Mapping):
        return "spec", dict(function)
    if not callable(function):
        message = f"the reward is a {type(function).__name__}, neither a function nor the name of one"
        raise RewardError(message, key="function")
    load_reward(function)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not is_importable(module.__name__)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return "value", dumps(function)
    except Exception as error:
        hint = "give it as FILE.py:function"
        message = f"the reward cannot be sent to its process ({hint}): {describe(error)}"
        raise RewardError(message, key="function.pickle") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
