"""Profile chosen steps and ranks of a run, as planned in ``run.profile`` or requested while it is active.

    RUN/profiles/.request.json    a request: written by ``ask``, taken by the run between two steps
    RUN/profiles/captures.jsonl   one line when a capture begins and one when it has ended
    RUN/profiles/steps-A-B-rank-R.json.gz    a Chrome trace

The run checks for a request once a step, in about a microsecond. A failed capture is logged and does not end the run.
Recorded steps take longer; their numbers do not change.
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
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, StorageError
from tilth.core.files import create, writing
from tilth.core.lines import read_lines
from tilth.flows.callbacks import Callback, RunView, Say
from tilth.runs.files import append_line
from tilth.runs.readers import read_state
from tilth.runs.signals import StopRequest
from tilth.runs.trust import load_recipe_of

FOLDER = "profiles"
REQUEST = ".request.json"
LOG = "captures.jsonl"
TOO_LATE = "the run came to its end before the next step"
PERIOD = 0.2
"""Seconds between two reads of the log in ``follow``."""


@dataclass(frozen=True)
class ProfileRequest:
    """Capture this many steps on these ranks. memory: record allocations; attempt: the attempt it is valid for."""

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
    """An active capture. first, last: its steps; done: newest recorded step; errors: message by rank."""

    request: ProfileRequest
    ranks: list[int]
    first: int
    last: int
    errors: dict[int, str]
    done: int = 0

    def line(self, state: str, **more: Any) -> dict[str, Any]:
        """Return a line of the log; its last step is the newest recorded one unless the capture is active."""
        last = self.last if state == "capturing" else self.done
        where = {"first": self.first, "last": last, "ranks": list(self.request.ranks), "memory": self.request.memory}
        return {"id": self.request.id, "state": state, **where, "errors": self.errors, **more}


class Profiling(Callback):
    """Start and stop torch's profiler in the workers of a run between two steps."""

    def __init__(self, cluster: Cluster, recipe: Recipe, directory: Path, attempt: int, stop: StopRequest) -> None:
        self._cluster, self._recipe, self._attempt, self._stop = cluster, recipe, attempt, stop
        self._folder = directory / FOLDER
        self._asked = str(self._folder / REQUEST)
        self._planned = profiled(recipe)
        self._now: PendingCapture | None = None
        self._step = 0
        self._say: Say = print

    def on_run_start(self, run: RunView) -> None:
        """Begin a capture that is planned or requested from the first step on."""
        self._say, self._step = run.say, run.state.step
        self._look(self._step + 1)

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """End the active capture if this was its last step; begin the next one."""
        self._step = step
        if self._now is not None:
            self._now.done = step
            if step >= self._now.last or self._stop.requested:
                self._end(self._now)
        if self._now is None and not self._stop.requested:
            self._look(step + 1)

    def conclude(self) -> None:
        """End the active capture and answer an open request: no further step follows."""
        if self._now is not None:
            self._end(self._now)
        if os.access(self._asked, os.F_OK) and (request := self._take()) is not None:
            self._note({"id": request.id, "state": "failed", "error": TOO_LATE})
        if self._planned and self._step < self._planned.start:
            self._say(f"run.profile = {self._recipe.run.profile}: the run came to its end after step {self._step}")

    def _look(self, step: int) -> None:
        """Begin a capture that is planned or requested, from this step on."""
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
        """Return and remove the request; None if it is invalid, which is logged, or for an earlier attempt."""
        path = Path(self._asked)
        try:
            text = path.read_text(encoding="utf-8")
            path.unlink()
            request = _request(json.loads(text))
            return request if request.attempt == self._attempt else None
        except FileNotFoundError:  # taken back
            return None
        except (OSError, ValueError, RecursionError, DataError) as error:
            self._say(f"{path} is no request of tilth trace capture: {error}")
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"cannot remove {path}: {error.strerror}; this run cannot be asked for profiles")
            self._asked = ""
        return None

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
        """Append a line to the log; a full disk is reported and does not end the run."""
        path = self._folder / LOG
        try:
            with writing(path):
                self._folder.mkdir(exist_ok=True)
                append_line(path, line)
        except StorageError as error:
            self._say(str(error))


def steps_in_words(first: int, last: int) -> str:
    """``steps 3 to 5``, or ``step 3``."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _request(found: Any) -> ProfileRequest:
    """Return the request in JSON that any program may have written; DataError if it is not valid."""
    if not isinstance(found, dict) or set(found) != {field.name for field in fields(ProfileRequest)}:
        raise DataError("it must have id, steps, ranks, memory and attempt, and nothing else", key=REQUEST)
    steps, ranks, attempt = found["steps"], found["ranks"], found["attempt"]
    if not isinstance(ranks, list) or not all(type(n) is int for n in [steps, attempt, *ranks]):
        raise DataError("steps and attempt must be integers and ranks a list of them", key=f"{REQUEST}.ranks")
    return ProfileRequest(str(found["id"])[:64], steps, tuple(dict.fromkeys(ranks)), bool(found["memory"]), attempt)


# ---- requests from outside ----


def ask(run: Path, steps: int, ranks: Sequence[int], memory: bool = False) -> ProfileRequest:
    """Request a capture of an active run's next steps.

    DataError if it is not active, has no such ranks, or has another request; StorageError if its folder is not
    writable.
    """
    attempt = running_attempt(run)
    request = ProfileRequest(uuid.uuid4().hex[:12], steps, tuple(dict.fromkeys(ranks)), memory, attempt)
    request.check(load_recipe_of(run))
    folder = run / FOLDER
    with writing(folder):
        folder.mkdir(exist_ok=True)
        if not create(folder / REQUEST, json.dumps(asdict(request)).encode()):
            raise DataError(f"{run} is asked for another capture already; ask again when that has begun", key=REQUEST)
    return request


def running_attempt(run: Path) -> int:
    """Return the number of the active attempt; DataError if there is none."""
    state = read_state(run)
    if state["state"] != "running":
        raise DataError(
            f"{run} is {state['state']}: only steps of an active run can be profiled; to profile a run that begins or "
            "resumes, set run.profile=A:B",
            key="run.json.state",
        )
    return int(state["attempt"])


def take_back(run: Path, request: ProfileRequest) -> bool:
    """Remove a request; False if the run has taken it already."""
    path = run / FOLDER / REQUEST
    try:
        mine = json.loads(path.read_text(encoding="utf-8")).get("id") == request.id
    except (FileNotFoundError, ValueError):
        return False
    if mine:
        path.unlink(missing_ok=True)
    return mine


def follow(run: Path, request: ProfileRequest) -> Iterator[dict[str, Any]]:
    """Yield the lines of the log about this request: "capturing" when it begins, then "done" or "failed".

    DataError if the run ends before that.
    """
    seen = 0
    while True:
        state = read_state(run)
        running = state["state"] == "running" and state["attempt"] == request.attempt
        lines = [line for line in read_lines(run / FOLDER / LOG) if line.get("id") == request.id]
        for line in lines[seen:]:
            yield line
            if line["state"] != "capturing":
                return
        seen = len(lines)
        if not running:
            take_back(run, request)
            raise DataError(f"{run} has ended before its steps were profiled", key=LOG)
        time.sleep(PERIOD)
