"""The directory of a run, written so that no committed step is ever lost.

    recipe.toml  run.json  metrics.jsonl  metrics_schema.json  trajectories/  events/  checkpoints/  rewards.jsonl
    scores.jsonl  log.txt  reward.log  report.html, experience.jsonl of an asynchronous run, profiles/ if requested,
    environments-RANK.log of environments that print, and recoveries.jsonl after a failure, warnings.jsonl after a
    warning of guard's watches, costs.jsonl of a run that balances by costs, loaders.jsonl of one with data.loaders

One line of ``metrics.jsonl`` commits a step. Trajectories follow in files of several steps, at the latest with the next
checkpoint (``flush``). On resume ``rewind(step)`` drops everything after the checkpoint's step, except the journal of
rewards, so that a step that runs again gets the same rewards.
"""

import os
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from tilth.cluster.controller.group import WorkerGroup
from tilth.config.load import dump_toml
from tilth.config.schema import Recipe
from tilth.core.clock import utc_now
from tilth.core.errors import CallTimeout, StorageError, TilthError, WorkerLost
from tilth.core.files import make_folder, rename, writing
from tilth.core.lines import Lines, replace
from tilth.core.write_queue import PATIENCE, PROMPT, SLOW, SOONEST, Trouble, WriteQueue, described, lost
from tilth.data.trajectories import TRAJECTORIES, TrajectoryFiles
from tilth.rollout import prefixes
from tilth.runs.environment import environment
from tilth.runs.events import EVENTS, OBSERVATIONS, AsyncLog, RunReplay
from tilth.runs.files import Lock, append_line, to_json
from tilth.runs.identity import Identity, claim
from tilth.runs.journal import Journal
from tilth.runs.metrics import resident, schema
from tilth.runs.progress import StepProgress
from tilth.runs.readers import RECOVERIES, WARNINGS, read_metrics, read_state, summarise
from tilth.runs.signals import HandOver, Interrupted

State = Literal["running", "finished", "interrupted", "failed"]
FORMAT = 1
PARTIAL = "partial"
"""Folder of trajectories that are in flight at the end of a step (``rollout.prefixes``)."""
RECENT = 8
"""Steps that a recovery in this process goes back at most, unless to a checkpoint."""
REWARD_LOG = "reward.log"
"""Output of the reward function: the newest 8 to 16 MB, the older part in ``reward.log.1``."""


class RunDir:
    """A run's directory while this process writes it. As a context manager it records how the run ended."""

    def __init__(self, path: Path, who: Identity, name: str, lock: Lock, replay: RunReplay | None = None) -> None:
        """Call ``create`` instead. lock: held until ``close``."""
        self.path, self.recipe, self.name, self._lock = path, who.recipe, name, lock
        self.digest, self.data, self.inputs = who.digest, who.data, dict(who.inputs)
        self.events, self.progress = path / "events", StepProgress(path)
        before = read_state(path) if (path / "run.json").exists() else {}
        self.resumed = bool(before)
        changed = before.get("digest", self.digest) != self.digest
        self.changes: dict[str, str] = who.changes(path, before) if changed else {}
        """Key -> message for each difference from the recipe that the run began with."""
        self.attempt: int = before.get("attempt", 0) + 1
        self._began = self._committed = time.monotonic()
        self._earlier = 0.0
        """Seconds of earlier attempts, up to the step that this one resumes from."""
        self._spent: dict[int, float] = {}
        """Step -> seconds of run time, of the newest steps."""
        with writing(path):
            make_folder(self.events)
            make_folder(path / TRAJECTORIES)
        self._queue = queue = WriteQueue()
        self._metrics = Lines(path / "metrics.jsonl", queue)
        self._last = _last_step(path) if self.resumed else 0
        self.before = _ending(before, self._last)
        """How the previous attempt ended; "" if there was none."""
        if lines := self._metrics.dropped.count(b"\n"):
            dropped = f"{lines} lines at the end of metrics.jsonl are no record of a step, and are dropped"
            self.before = "; ".join(filter(None, (self.before, dropped)))
        self._experience: AsyncLog | None = None
        self.journal = Journal(path, who.reward, replay=not who.allows("reward.function"), queue=queue)
        self.replay = replay
        if replay is not None:
            self.journal.replay(replay.path.parent)
        self._log = Lines(path / "log.txt", queue, text=True)
        self.trajectories: TrajectoryFiles | WorkerGroup = TrajectoryFiles(path / TRAJECTORIES)
        """Writer of the trajectories: a worker once the roles are built."""
        self.say: Callable[[str], None] = self.log
        """Called with a line about trouble of the disk."""
        self._answer: Mapping[str, Any] = {}
        """Trouble of the trajectories' disk, as of their last commit."""
        self._told: tuple[Trouble, Trouble] = {}, {}
        """Trouble of this process and of the trajectories' disk that was reported."""
        self._state = self._begin(before)
        self._announce()

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        name: str,
        inputs: Mapping[str, str] | None = None,
        allow: tuple[str, ...] = (),
        folder: Path | None = None,
        replay: RunReplay | None = None,
    ) -> "RunDir":
        """Open the unfinished run that this recipe resumes, or a new one: see ``identity.claim``.

        inputs: key -> fingerprint of data, reward and models; allow: keys whose values may have changed; folder: as of
        ``Identity``; replay: what the run repeats.
        """
        who = Identity(recipe, inputs or {}, allow, folder)
        path, lock = claim(who, name)
        try:
            return cls(path, who, name, lock, replay)
        except BaseException:
            lock.release()
            raise

    @property
    def checkpoints(self) -> str:
        """Absolute path or URL of its checkpoints."""
        return self._state["checkpoints"] or str((self.path / "checkpoints").resolve())

    def experience_log(self) -> AsyncLog:
        """Return the log of asynchronous experience, opened anew, for one attempt."""
        if self._experience is not None:
            self._experience.close()
        recipes = [*(digest for digest in self.digests if digest != self.digest), self.digest]
        self._experience = AsyncLog(self.path / EVENTS, recipes, replay=self.replay, queue=self._queue)
        return self._experience

    def observations(self) -> Path:
        """Return the folder of what environments say, with what they said in the run that this one repeats.
        StorageError."""
        folder = self.path.resolve() / OBSERVATIONS
        if self.replay is not None and not folder.exists():
            with writing(folder):
                made = shutil.copytree(self.replay.path.parent / OBSERVATIONS, f"{folder}.new", dirs_exist_ok=True)
                rename(Path(made), folder)
        return folder

    @property
    def digests(self) -> list[str]:
        """Digests of every recipe that this run has had."""
        return list(self._state["digests"])

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint on record; 0: none."""
        return int(self._state.get("saved") or 0)

    def accept(self) -> None:
        """Make the recipe of this attempt the run's own, once the attempt has resumed from its checkpoint."""
        digests = [*(d for d in self.digests if d != self.digest), self.digest]
        self.update(digest=self.digest, digests=digests, inputs=self.inputs)
        replace(self.path / "recipe.toml", dump_toml(self.recipe).encode(), self._queue)

    # ---- steps ----

    def commit_step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a step: its metrics, keyed (step, attempt), and the trajectories added since the last commit.

        record: ``step``, ``phase`` and metrics. Return the record as written, with ``seconds`` of run time.
        """
        seconds = round(self.seconds, 3)
        keys = {"step": record["step"], "attempt": self.attempt, "phase": record.get("phase", ""), "seconds": seconds}
        written = keys | {k: v for k, v in record.items() if k not in keys}
        self._metrics.append(to_json(written))
        self._last, self._committed = record["step"], time.monotonic()
        self._spent = {step: spent for step, spent in self._spent.items() if step > self._last - RECENT}
        self._spent[self._last] = seconds
        before, self._answer = self._answer, self.trajectories.commit(record["step"])
        self.journal.forget(record["step"])
        self._tell(dict(before))
        return written

    def settle(self) -> Trouble:
        """Wait until the writer has the trajectories of the committed step, and return its trouble; ``alone`` if they
        would be lost with it. Raises as any call if it is lost."""
        return dict(self._answer)

    def _tell(self, elsewhere: Trouble) -> None:
        """Report trouble that has begun or ended, also in run.json. elsewhere: that of the trajectories."""
        before, self._told = self._told, (self._queue.status(), elsewhere)
        for text in filter(None, map(described, before, self._told)):
            self.say(text)
        if self._told != before:
            self.update(storage=[one for one in self._told if one])

    def flush(self, seconds: float = SLOW) -> Trouble:
        """Flush everything committed to disk; to call before a checkpoint is written. Return what cannot be written
        within these seconds, or at once if the disk refuses."""
        elsewhere = self._answer = self.trajectories.flush(seconds)
        self._metrics.sync()
        trouble = self._queue.settle(seconds)
        self._tell(elsewhere)
        return trouble or elsewhere

    def rewind(self, step: int) -> None:
        """Drop everything after ``step``, the step of the checkpoint (0: everything)."""
        self.trajectories.rewind(step)
        self._answer = {}
        self.journal.rewind(step)
        prefixes.rewind(self.path / PARTIAL, step)
        if self._last != step or step not in self._spent:
            self._metrics.rewrite(lambda record: bool(record["step"] <= step))
        if step not in self._spent:
            if trouble := self._queue.settle(PATIENCE):
                raise lost(trouble, f"the metrics up to step {step} cannot be read")
            kept = [r for r in read_metrics(self.path) if r["step"] <= step]
            step, spent = (kept[-1]["step"], kept[-1].get("seconds", 0.0)) if kept else (0, 0.0)
            self._spent = {step: spent}
        self._last, self._earlier = step, self._spent[step]
        self._began = time.monotonic()
        place = {"from_step": step, "from_seconds": self._earlier, "resumed": utc_now()}
        now = self._state["attempts"][-1] | place
        warnings = [one for one in self._state.get("warnings", []) if one["step"] <= step]
        self.update(attempts=[*self._state["attempts"][:-1], now], warnings=warnings)

    @property
    def seconds(self) -> float:
        """Run time in seconds: of this attempt, and of earlier ones up to the step it resumed from."""
        return self._earlier + time.monotonic() - self._began

    # ---- the state ----

    def log(self, text: str) -> None:
        """Write a line with the time to log.txt."""
        self._log.append(f"{utc_now()} {text}")

    def warn(self, step: int, text: str) -> None:
        """Store a warning for the report."""
        self.update(warnings=[*self._state.get("warnings", []), {"step": step, "text": text}])

    def update(self, **fields: Any) -> None:
        """Set fields of run.json and write it atomically."""
        self._state.update(fields)
        replace(self.path / "run.json", (to_json(self._state) + "\n").encode(), self._queue)

    def store(self, path: Path, data: bytes) -> None:
        """Write a file of the run atomically; it waits while the disk refuses it."""
        replace(path, data, self._queue)

    def note_checkpoint(self, step: int, best: Mapping[str, Any] | None) -> None:
        """Record a complete checkpoint; best: the best evaluation among the kept checkpoints."""
        if 0 < self.saved < step:
            self.journal.trim(self.saved)  # a resume may still fall back to the previous checkpoint
        self.update(best=best, saved=step)

    def note_finding(self, record: Mapping[str, Any]) -> None:
        """Append a warning of a watch to ``warnings.jsonl``; any thread may call it. Raises StorageError."""
        self._append(WARNINGS, {"attempt": self.attempt, **record})

    def recover(self, record: Mapping[str, Any]) -> None:
        """End this attempt, which a failure has ended, and begin the next one in this process.

        record: of the recovery, for ``recoveries.jsonl``; ``evidence`` is why the attempt ended, ``seconds`` how long
        the recovery took. The time since the last commit is added as ``lost``.
        """
        now = utc_now()
        self.break_off(record)
        before, self.attempt = self._state["attempts"], self.attempt + 1
        self.changes = {}
        attempts = [*before[:-1], before[-1] | _recovered(record, now), self._attempt(now)]
        self.update(attempt=self.attempt, attempts=attempts)

    def break_off(self, record: Mapping[str, Any]) -> None:
        """Record a recovery that another failure broke off; this attempt goes on to the next recovery. record: as of
        ``recover``."""
        spent = time.monotonic() - self._committed - float(record["seconds"])
        self._append(RECOVERIES, {"attempt": self.attempt, **record, "lost": round(max(spent, 0.0), 3)})
        self._committed = time.monotonic()

    def note_replaced(self, record: Mapping[str, Any]) -> None:
        """Record that a worker was replaced beside the others, which cost the run no time. record: as of ``recover``;
        ``beside``: seconds until the worker was new. Any thread may call it."""
        self._append(RECOVERIES, {"attempt": self.attempt, **record, "seconds": 0.0, "lost": 0.0})

    def note_late(self, record: Mapping[str, Any]) -> None:
        """Record a failure after the end of the run, which lost nothing. record: as of ``recover``."""
        self._append(RECOVERIES, {"attempt": self.attempt, **record, "lost": 0.0})
        self._queue.settle(SLOW)
        self.update(summary=summarise(self.path))

    def survive(self, record: Mapping[str, Any]) -> None:
        """Record that this attempt goes on where the former one's controller was killed. record: as of
        ``recover``, with ``lost``."""
        *earlier, current = self._state["attempts"]
        former = [one | _recovered(record, current["started"]) for one in earlier[-1:]]  # none: it had made no run yet
        self._append(RECOVERIES, {"attempt": (former or [current])[0]["attempt"], **record})
        self.update(attempts=[*earlier[:-1], *former, current])

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a record with the time to a file."""
        path, entry = self.path / name, {"time": utc_now(), **record}
        self._queue.put(path, partial(append_line, path, entry), len(to_json(entry)))

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Store the plan; its ``memory_peak`` is the predicted peak memory."""
        self.update(plan=dict(plan), memory={"predicted": plan.get("memory_peak"), "peak": None})

    def end(self, state: State, error: str | None = None, *, why: str = "", **fields: Any) -> None:
        """Log the end of the run, flush, and write state, time, peak memory, summary and ``fields`` to run.json.

        error: message of a failure; why: reason of another end.
        """
        why = error or why
        self.log(f"attempt {self.attempt} {state} after step {self._last}" + (f": {why}" if why else ""))
        try:
            trouble = self._wait(PATIENCE if state == "finished" else SLOW)
        except (WorkerLost, CallTimeout):
            if state == "finished":
                raise
            self.trajectories = TrajectoryFiles(self.path / TRAJECTORIES)  # the writer's rows end with it
            trouble = self._wait(SLOW)
        memory = self._state.get("memory") or {"predicted": None}
        last = self._state["attempts"][-1] | {"ended": utc_now(), "state": state, "why": why}
        self._state.update(
            state=state,
            error=error,
            ended=utc_now(),
            seconds=round(self.seconds, 3),
            memory={**memory, "peak": resident()[1]},
            attempts=[*self._state["attempts"][:-1], last],
            storage=[],
            **fields,
        )
        self.update()
        if trouble or (trouble := self._queue.settle(SLOW)):
            raise lost(trouble, "the run has ended")
        self.update(summary=summarise(self.path))
        if trouble := self._queue.settle(SLOW):
            raise lost(trouble, "the run has ended")

    def _wait(self, seconds: float) -> Trouble:
        """Wait for the disk at the end of the run; return what cannot be written within these seconds."""
        until, waits = time.monotonic() + seconds, False
        while (trouble := self.flush(PROMPT)) and time.monotonic() < until:
            if not waits and seconds > SLOW:
                self.say(f"waiting {seconds:g} s at most for {trouble['path']}: {trouble['reason']}")
            waits = True
            time.sleep(SOONEST)
        return trouble

    def close(self) -> None:
        """Close the files and release the lock; the state is not changed. What still waits to be written is lost."""
        self._queue.close()
        for file in (self._metrics, self.journal, self._log):
            file.close()
        if self._experience is not None:
            self._experience.close()
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._state["state"] == "running":
                self._end_with(error)
        except StorageError:
            # A full disk cannot record the end; readers take "running" without a process for interrupted.
            if not isinstance(error, StorageError):
                raise
        finally:
            self.close()

    def _end_with(self, error: BaseException | None) -> None:
        if isinstance(error, HandOver):
            self._leave(str(error))
            return
        if error is None or isinstance(error, (KeyboardInterrupt, Interrupted)):
            self.end("interrupted", why=str(error or "") or ("Ctrl-C" if error is not None else ""))
            return
        if not isinstance(error, TilthError):  # a bug: log its traceback
            self.log("".join(traceback.format_exception(error)).rstrip())
        self.end("failed", f"{type(error).__name__}: {error}")

    def _leave(self, why: str) -> None:
        """End this attempt; the run goes on in the next controller."""
        self.log(f"attempt {self.attempt} left after step {self._last}: {why}")
        self._wait(SLOW)
        last = self._state["attempts"][-1] | {"ended": utc_now(), "state": "left", "why": why}
        self.update(attempts=[*self._state["attempts"][:-1], last])

    def _begin(self, before: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of run.json for a new attempt."""
        now, place = utc_now(), _place(self.recipe, self.path, before)
        if place:
            from tilth.runs.model_refs import take  # imports torch, which readers do not need

            take(self.path, place, fresh=place != before.get("checkpoints"))
        silent = {"state": "interrupted", "why": self.before}
        attempts = [a if a.get("ended") else a | silent for a in before.get("attempts", [])]
        return {
            "format": FORMAT, "recipe": self.name, "flow": self.recipe.flow, "plan": None, "memory": None,
            "sweep": self.recipe.run.sweep,
            "digest": self.digest, "digests": [self.digest], "inputs": self.inputs, **before, "folder": os.getcwd(),
            "checkpoints": place,
            "state": "running", "error": None, "pid": os.getpid(), "pid_started": psutil.Process().create_time(),
            "host": os.uname().nodename, "attempt": self.attempt, "attempts": [*attempts, self._attempt(now)],
            "started": before.get("started", now), "ended": None, "seconds": None, "environment": environment(),
        }  # fmt: skip

    def _attempt(self, now: str) -> dict[str, Any]:
        changed = {"changed": list(self.changes.values())} if self.changes else {}
        return {"attempt": self.attempt, "started": now, "ended": None, "state": "running", **changed}

    def _announce(self) -> None:
        if not self.resumed:
            replace(self.path / "recipe.toml", dump_toml(self.recipe).encode())
        replace(self.path / "metrics_schema.json", (to_json(schema()) + "\n").encode())
        self.update()
        self.log(f"attempt {self.attempt} {'continues' if self.resumed else 'starts'}, process {os.getpid()}")


def note_failed(run: Path, record: Mapping[str, Any]) -> None:
    """Record a recovery that has failed, of a run that no process writes. record: as of ``RunDir.recover``, with
    ``lost``. Raises StorageError and DataError."""
    append_line(run / RECOVERIES, {"time": utc_now(), "attempt": read_state(run)["attempt"], **record})


def _recovered(record: Mapping[str, Any], ended: str) -> dict[str, Any]:
    """Return how an attempt ended from which the run recovered."""
    return {"ended": ended, "state": "recovered", "why": str(record["evidence"]).partition("\n")[0]}


def _last_step(path: Path) -> int:
    """Return the newest committed step; 0: none."""
    return max((record["step"] for record in read_metrics(path)), default=0)


def _ending(before: Mapping[str, Any], last: int) -> str:
    """Return how the newest attempt in a run's state ended; "" if there was none."""
    if not before.get("attempts"):
        return ""
    attempt = before["attempts"][-1]
    name = f"attempt {attempt['attempt']}"
    if attempt.get("ended"):
        how = {"interrupted": "was interrupted"}.get(attempt["state"], attempt["state"])
        return f"{name} {how} after step {last}" + (f": {attempt['why']}" if attempt.get("why") else "")
    if before.get("host") != os.uname().nodename:
        cause = f"its machine was {before.get('host')}"
    elif before.get("pid_started", 0) < psutil.boot_time():
        cause = "the machine has been rebooted since"
    else:
        cause = "killed, machine lost, or out of memory"
    return f"{name} ended without a word after step {last} ({cause})"


def _place(recipe: Recipe, path: Path, before: Mapping[str, Any]) -> str:
    """Return the checkpoint directory or URL of the run in this folder; "" for one in the folder, which can be moved.

    It never changes once it has a checkpoint, even one that a kill kept out of run.json. StorageError.
    """
    from tilth.runs.model_refs import holds_some  # imports torch, which readers do not need

    given, known = recipe.run.checkpoints.rstrip("/"), before.get("checkpoints", "")
    wanted = given if "://" in given or not given else str(Path(given).resolve())
    same = known.rpartition("/")[0] == wanted
    if before and (same or before.get("saved") or holds_some(str(known or path / "checkpoints"))):
        return str(known)
    if not given:
        return ""
    name = f"{path.name}-{uuid.uuid4().hex[:8]}"  # several folders of runs may share the store
    return f"{wanted}/{name}"
