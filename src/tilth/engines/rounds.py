"""The loop over a generation engine: rounds that take requests, end others, work a while and report what has ended."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tilth.core.errors import DataError, TilthError
from tilth.core.trajectory import Trajectory
from tilth.engines.request import Progress, Request, SamplingParams

if TYPE_CHECKING:
    from tilth.engines.protocol import GenerationEngine


class RoundLimits(NamedTuple):
    """Length of a round. steps: of the engine at most; early: after which it ends as soon as something has finished;
    seconds: after which no step begins. Ranks of one engine end their rounds alike, so they count steps alone."""

    steps: int = 1
    early: int = 1
    seconds: float = math.inf


STEP = RoundLimits()


class Round(NamedTuple):
    """Result of one round. finished: also those that were aborted; failed: why a new request is not served; progress:
    newest tokens of requests in flight, where somebody asks for them."""

    finished: list[Trajectory]
    failed: dict[int, TilthError]
    progress: dict[int, Progress]


class RequestSource(Protocol):
    """Requests that follow from what has finished, such as turns of episodes."""

    @property
    def open(self) -> bool:
        """True while requests may follow."""

    def requests(self, *, wait: bool) -> tuple[list[Request], list[int], list[tuple[Trajectory, SamplingParams]]]:
        """Return new requests, ids of those that nobody wants any more, and partial trajectories to go on with. wait: a
        while for the first one, since the engine has nothing to do."""

    def take(self, finished: Iterable[Trajectory]) -> list[Trajectory]:
        """Take what has finished; return what has ended with it, and what is not its own."""

    def drop(self) -> None:
        """Forget all that is open."""


class EngineRounds:
    """Rounds of one engine, whose only driver it is. Calls of the engine, such as new weights, are allowed between two
    rounds. source: of further requests."""

    def __init__(
        self, engine: "GenerationEngine", limits: RoundLimits = STEP, source: RequestSource | None = None
    ) -> None:
        self.engine, self.limits, self.source = engine, limits, source
        self._seen: dict[int, int] = {}
        """Request in flight -> number of its tokens that ``progress`` has returned."""

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[int]:
        return iter(self._seen)

    @property
    def busy(self) -> bool:
        """True while something is in flight."""
        return bool(self._seen) or (self.source is not None and self.source.open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, or none of them and raise the engine's error if it cannot serve one."""
        self.engine.check_served(requests)
        self.engine.submit(requests)
        self._seen.update((request.id, 0) for request in requests)

    def resume(self, trajectory: Trajectory, params: SamplingParams) -> None:
        """Go on with a partial trajectory. Raises DataError."""
        self.engine.resume(trajectory, params)  # type: ignore[attr-defined]  # of engines that were checked at start
        self._seen[trajectory.id] = trajectory.completion_length

    def advance(self, new: Sequence[Request] = (), aborted: Iterable[int] = ()) -> Round:
        """Take and end requests, then do a bounded piece of work on those in flight."""
        failed = self._admit(new) if new else {}
        finished = [self.engine.abort(id) for id in aborted if self._seen.pop(id, None) is not None]
        if self.source is not None:
            finished = self.source.take(finished)
        begin = time.monotonic()
        for step in range(1, self.limits.steps + 1):
            if not self.busy:
                break
            idle = not self._seen
            finished += self._step()
            # It has waited for the source in vain, and no clock ends the round.
            if idle and not self._seen and self.limits.seconds == math.inf:
                break
            if (finished and step >= self.limits.early) or time.monotonic() - begin > self.limits.seconds:
                break
        return Round(finished, failed, {})

    def progress(self) -> dict[int, Progress]:
        """Return the tokens of requests in flight that were chosen since the last look."""
        found = self.engine.progress(self._seen)
        for id, newest in found.items():
            self._seen[id] += len(newest.tokens)
        return found

    def pause(self, ids: Iterable[int] | None = None) -> list[Trajectory]:
        """End these requests, those of them that are in flight (None: all), and return each as far as it is, for
        ``resume``; the source stays as it is."""
        chosen = [id for id in (self._seen if ids is None else ids) if id in self._seen]
        for id in chosen:
            del self._seen[id]
        return [self.engine.abort(id) for id in chosen]

    def drain(self, requests: Sequence[Request] = ()) -> Iterator[Trajectory]:
        """Take requests, and yield all that ends until nothing is in flight. Raises as ``submit``."""
        self.submit(requests)
        while self.busy:
            yield from self.advance().finished

    def discard(self, ids: Iterable[int]) -> None:
        """End those of these requests that are in flight, and forget their tokens."""
        for id in ids:
            if self._seen.pop(id, None) is not None:
                self.engine.abort(id)

    def drop(self) -> None:
        """End all that is in flight."""
        seen, self._seen = self._seen, {}
        for id in seen:
            with suppress(DataError):  # an engine that has failed may have forgotten it
                self.engine.abort(id)
        if self.source is not None:
            self.source.drop()

    def _admit(self, new: Sequence[Request]) -> dict[int, TilthError]:
        """Take requests, each but those that the engine cannot serve; return why."""
        try:
            self.submit(new)
        except TilthError as error:
            if len(new) == 1:
                return {new[0].id: error}
            return {id: why for one in new for id, why in self._admit([one]).items()}
        return {}

    def _step(self) -> list[Trajectory]:
        """Ask the source, do one step of the engine, and return what has ended."""
        if self.source is not None:
            new, unwanted, partial = self.source.requests(wait=not self._seen)
            for id in unwanted:
                del self._seen[id]
                self.engine.abort(id)
            self.submit(new)
            for trajectory, params in partial:
                self.resume(trajectory, params)
        finished = self.engine.poll() if self._seen else []
        for trajectory in finished:
            if self._seen.pop(trajectory.id, None) is None:
                message = f"request {trajectory.id} has finished, which was not submitted to these rounds"
                raise DataError(f"{message}; one EngineRounds drives an engine", key="rounds.id")
        return finished if self.source is None else self.source.take(finished)
