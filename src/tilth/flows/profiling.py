"""Profiles of chosen steps and ranks of a run: as ``run.profile`` says, or as asked for while it goes on.

    RUN/profiles/.request.json    what is asked for: written by ``ask``, taken by the run between two steps
    RUN/profiles/captures.jsonl   what became of each capture, a line when it begins and one when it has ended
    RUN/profiles/steps-A-B-rank-R.json.gz    a Chrome trace

A run looks once a step whether something is asked for, which takes about a microsecond. A profile that cannot be had is
told and the run goes on; none of its numbers depend on it, but its steps take longer while they are recorded.
"""

import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tilth.cluster.controller.cluster import Cluster
from tilth.config.checks import MOST_PROFILED, profiled, unknown_ranks
from tilth.config.load import load_recipe
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, StorageError
from tilth.core.target import writing
from tilth.flows.callbacks import Callback, RunView, Say
from tilth.runs.files import Lines, read_lines, to_json
from tilth.runs.readers import read_state
from tilth.runs.signals import StopRequest

FOLDER = "profiles"
REQUEST = ".request.json"
LOG = "captures.jsonl"
TOO_LATE = "the run came to its end before the next step"
PERIOD = 0.2
"""Seconds between two looks of who waits."""


@dataclass(frozen=True)
class ProfileRequest:
    """So many steps on these ranks; memory: with every allocation; attempt: of the run, another one's is void."""

    id: str
    steps: int
    ranks: tuple[int, ...]
    memory: bool = False
    attempt: int = 0

    def check(self, recipe: Recipe) -> None:
        """Raise DataError for a number of steps or a rank that a run of this recipe cannot profile."""
        if not 1 <= self.steps <= MOST_PROFILED:
            raise DataError(f"--steps {self.steps}: 1 to {MOST_PROFILED} steps can be profiled at once", key="--steps")
        for problem in unknown_ranks(recipe, self.ranks):
            raise DataError(f"--ranks: {problem}", key="--ranks")


@dataclass
class PendingCapture:
    """One that is under way. last: the step it shall end with; done: the newest that has been recorded."""

    request: ProfileRequest
    ranks: list[int]
    first: int
    last: int
    errors: dict[int, str]
    done: int = 0

    def line(self, state: str, **more: Any) -> dict[str, Any]:
        """Of the log. The last step is that it has come to, once it has ended."""
        last = self.last if state == "capturing" else self.done
        where = {"first": self.first, "last": last, "ranks": list(self.request.ranks), "memory": self.request.memory}
        return {"id": self.request.id, "state": state, **where, "errors": self.errors, **more}


class Profiling(Callback):
    """Let the workers of a run record what they do from the end of one step to that of another."""

    def __init__(self, cluster: Cluster, recipe: Recipe, directory: Path, attempt: int, stop: StopRequest) -> None:
        self._cluster, self._recipe, self._attempt, self._stop = cluster, recipe, attempt, stop
        self._folder = directory / FOLDER
        self._asked = str(self._folder / REQUEST)
        self._planned = profiled(recipe)
        self._now: PendingCapture | None = None
        self._step = 0
        self._say: Say = print

    def on_run_start(self, run: RunView) -> None:
        """Begin what is planned or asked for from the first step on."""
        self._say, self._step = run.say, run.state.step
        self._look(self._step + 1)

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """End the capture under way if this was its last step, and begin another."""
        self._step = step
        if self._now is not None:
            self._now.done = step
            if step >= self._now.last or self._stop.requested:
                self._end(self._now)
        if self._now is None and not self._stop.requested:
            self._look(step + 1)

    def conclude(self) -> None:
        """No further step follows: end what is under way, and answer who still asks."""
        if self._now is not None:
            self._end(self._now)
        if os.access(self._asked, os.F_OK) and (request := self._take()) is not None:
            self._note({"id": request.id, "state": "failed", "error": TOO_LATE})
        if self._planned and self._step < self._planned.start:
            self._say(f"run.profile = {self._recipe.run.profile}: the run came to its end after step {self._step}")

    def _look(self, step: int) -> None:
        """Begin what is planned or asked for, from this step on."""
        if step in self._planned:
            request = ProfileRequest("recipe", self._planned.stop - step, self._recipe.run.profile_ranks)
        elif not os.access(self._asked, os.F_OK) or (found := self._take()) is None:
            return
        else:
            request = found
        try:
            request.check(self._recipe)
        except DataError as error:
            self._note({"id": request.id, "state": "failed", "error": str(error)})
            return
        self._begin(request, step)

    def _take(self) -> ProfileRequest | None:
        """What is asked for, which is no longer asked for then. What is no request is told of; what was asked of an
        earlier attempt is void."""
        path = Path(self._asked)
        try:
            text = path.read_text(encoding="utf-8")
            path.unlink()
            request = _request(json.loads(text))
            return request if request.attempt == self._attempt else None
        except FileNotFoundError:  # who asked has taken it back
            return None
        except (OSError, ValueError, RecursionError, DataError) as error:
            self._say(f"{path} is no request of tilth trace capture: {error}")
            self._discard()
            return None

    def _discard(self) -> None:
        """Remove what is asked for; where that cannot be, nothing can be asked for any more."""
        try:
            Path(self._asked).unlink(missing_ok=True)
        except OSError as error:
            self._say(f"cannot remove {self._asked}: {error.strerror}; this run cannot be asked for profiles")
            self._asked = ""

    def _begin(self, request: ProfileRequest, step: int) -> None:
        errors = self._cluster.profile(request.ranks, request.memory)
        ranks = [rank for rank in request.ranks if rank not in errors]
        now = PendingCapture(request, ranks, step, step + request.steps - 1, errors)
        if not ranks:
            self._failed(now, next(iter(errors.values())))
            return
        self._now = now
        self._note(now.line("capturing"))
        self._say(f"profiling {steps_in_words(now.first, now.last)} on {_ranks(ranks)}; they take longer")

    def _end(self, now: PendingCapture) -> None:
        self._now = None
        if not now.done:
            self._cluster.profiled(now.ranks, None)
            self._failed(now, TOO_LATE)
            return
        stem = self._folder / f"steps-{now.first}-{now.done}"
        found = self._cluster.profiled(now.ranks, stem)
        now.errors |= {rank: made.error for rank, made in found.items() if made.error}
        files = {rank: {"path": made.path, "bytes": made.bytes} for rank, made in found.items() if not made.error}
        if not files:
            self._failed(now, next(iter(now.errors.values())))
            return
        self._note(now.line("done", files=files))
        where = self._folder / f"steps-{now.first}-{now.done}-*"
        self._say(f"profiled {steps_in_words(now.first, now.done)} on {_ranks(list(files))}: {where}")

    def _failed(self, now: PendingCapture, error: str) -> None:
        self._note(now.line("failed", error=error))
        self._say(f"{steps_in_words(now.first, now.last)} could not be profiled: {error}; the run goes on")

    def _note(self, line: dict[str, Any]) -> None:
        """Into the log; a disk that is full keeps no run from going on for this."""
        path = self._folder / LOG
        try:
            with writing(path):
                self._folder.mkdir(exist_ok=True)
                log = Lines(path)
                try:
                    log.append(to_json(line))
                finally:
                    log.close()
        except StorageError as error:
            self._say(str(error))


def steps_in_words(first: int, last: int) -> str:
    """``steps 3 to 5``, or ``step 3``."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _request(found: Any) -> ProfileRequest:
    """DataError for JSON of another kind: anybody may write into a run's folder."""
    if not isinstance(found, dict) or set(found) != {field.name for field in fields(ProfileRequest)}:
        raise DataError("it must have id, steps, ranks, memory and attempt, and nothing else", key=REQUEST)
    steps, ranks, attempt = found["steps"], found["ranks"], found["attempt"]
    if not isinstance(ranks, list) or not all(type(n) is int for n in [steps, attempt, *ranks]):
        raise DataError("steps and attempt must be integers and ranks a list of them", key=f"{REQUEST}.ranks")
    return ProfileRequest(str(found["id"])[:64], steps, tuple(dict.fromkeys(ranks)), bool(found["memory"]), attempt)


# ---- who asks ----


def ask(run: Path, steps: int, ranks: Sequence[int], memory: bool = False) -> ProfileRequest:
    """Ask a run that goes on for its next steps. DataError: it does not go on, has no such ranks, or another request
    waits; StorageError if its folder cannot be written to."""
    attempt = running_attempt(run)
    request = ProfileRequest(uuid.uuid4().hex[:12], steps, tuple(dict.fromkeys(ranks)), memory, attempt)
    request.check(load_recipe(str(run / "recipe.toml")))
    folder = run / FOLDER
    mine = folder / f".{request.id}.json"
    with writing(folder):
        folder.mkdir(exist_ok=True)
        try:
            mine.write_text(json.dumps(asdict(request)), encoding="utf-8")
            os.link(mine, folder / REQUEST)  # as a whole, and never in the place of another's
        except FileExistsError:
            raise DataError(
                f"{run} is asked for another capture already; ask again when that has begun", key=REQUEST
            ) from None
        finally:
            mine.unlink(missing_ok=True)
    return request


def running_attempt(run: Path) -> int:
    """The attempt that is going on. DataError unless one is."""
    state = read_state(run)
    if state["state"] != "running":
        raise DataError(
            f"{run} is {state['state']}: only steps that are still to come can be profiled; run.profile=A:B does so "
            "when a run begins or goes on",
            key="run.json.state",
        )
    return int(state["attempt"])


def take_back(run: Path, request: ProfileRequest) -> bool:
    """Ask no longer. False: it has been taken already."""
    path = run / FOLDER / REQUEST
    try:
        mine = json.loads(path.read_text(encoding="utf-8")).get("id") == request.id
    except (FileNotFoundError, ValueError):
        return False
    if mine:
        path.unlink(missing_ok=True)
    return mine


def follow(run: Path, request: ProfileRequest) -> Iterator[dict[str, Any]]:
    """The lines of the log about this request as they come: when it begins ("capturing") and when it has ended ("done"
    or "failed"). DataError if the run ends without one."""
    told = 0
    while True:
        state = read_state(run)
        running = state["state"] == "running" and state["attempt"] == request.attempt
        lines = [line for line in read_lines(run / FOLDER / LOG) if line.get("id") == request.id]
        for line in lines[told:]:
            yield line
            if line["state"] != "capturing":
                return
        told = len(lines)
        if not running:
            take_back(run, request)
            raise DataError(f"{run} has ended before its steps were profiled", key=LOG)
        time.sleep(PERIOD)
