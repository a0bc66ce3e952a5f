"""The directory of a run: everything that is kept, written so that nothing committed is ever lost.

    recipe.toml  run.json  metrics.jsonl  metrics_schema.json  trajectories/  events/  checkpoints/  rewards.jsonl
    scores.jsonl  log.txt  reward.log  report.html, and where asked for profiles/

A step is committed by one line of ``metrics.jsonl``. Trajectories follow in files of several steps, at the latest when
the flow makes a checkpoint (``flush``). On resume ``rewind(step)`` drops what lies behind the checkpoint's step; the
journal of rewards stays, so that a step that runs again has the same ones.
"""

import os
import time
import traceback
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from tilth.cluster.controller.group import WorkerGroup
from tilth.config.load import dump_toml
from tilth.config.schema import Recipe
from tilth.core.errors import StorageError, TilthError
from tilth.core.target import make_folder, writing
from tilth.data.trajectories import TRAJECTORIES, TrajectoryFiles
from tilth.runs.environment import environment
from tilth.runs.files import Lines, Lock, replace, to_json
from tilth.runs.identity import Identity, claim
from tilth.runs.journal import Journal
from tilth.runs.metrics import resident, schema
from tilth.runs.readers import checkpoints_of, read_metrics, read_state, read_trajectories, summarise
from tilth.runs.signals import Interrupted

__all__ = ["RunDir", "State", "read_metrics", "read_state", "read_trajectories", "summarise"]

State = Literal["running", "finished", "interrupted", "failed"]
FORMAT = 1
REWARD_LOG = "reward.log"
"""What the reward function prints: the newest 8 to 16 MB, those before the last 8 in ``reward.log.1``."""


class RunDir:
    """A run's directory while this process writes it. As a context manager it records how the run ended."""

    def __init__(self, path: Path, who: Identity, name: str, lock: Lock) -> None:
        """Use ``create``. ``lock`` is held until ``close``."""
        self.path, self.recipe, self.name, self._lock = path, who.recipe, name, lock
        self.digest, self.inputs = who.digest, dict(who.inputs)
        self.events = path / "events"
        before = read_state(path) if (path / "run.json").exists() else {}
        self.resumed = bool(before)
        changed = before.get("digest", self.digest) != self.digest
        self.changes: dict[str, str] = who.changes(path, before) if changed else {}
        """In which keys it goes on as another recipe than it began with, in words."""
        self.attempt: int = before.get("attempt", 0) + 1
        self._began = time.monotonic()
        self._last = _last_step(path) if self.resumed else 0
        self.before = _ending(path, before, self._last)
        """How the attempt before this one ended, in words; "": there was none."""
        self._earlier = 0.0
        """Seconds of earlier attempts, up to the step that this one continues from."""
        with writing(path):
            make_folder(self.events)
        self._metrics = Lines(path / "metrics.jsonl")
        self.journal = Journal(path, who.reward, replay=not who.allows("reward.function"))
        self._log = Lines(path / "log.txt")
        self.trajectories: TrajectoryFiles | WorkerGroup = TrajectoryFiles(path / TRAJECTORIES)
        """Who writes the trajectories: a worker, once there is one."""
        self._state = self._begin(before)
        self._announce()

    @classmethod
    def create(
        cls, recipe: Recipe, name: str, inputs: Mapping[str, str] | None = None, allow: tuple[str, ...] = ()
    ) -> "RunDir":
        """The run that this recipe goes on with, or a new one: see ``continuing.claim`` for which, and what it raises.

        inputs: key -> fingerprint of what the recipe does not hold (data, reward ...); other inputs, other run.
        allow: keys in which the run that goes on may differ.
        """
        who = Identity(recipe, inputs or {}, allow)
        path, lock = claim(who, name)
        try:
            return cls(path, who, name, lock)
        except BaseException:
            lock.release()
            raise

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints are: a whole path, or a store's URL."""
        return checkpoints_of(self.path)

    @property
    def digests(self) -> list[str]:
        """Of all recipes that it went on as."""
        return list(self._state["digests"])

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint that is known to have been made; 0: none."""
        return int(self._state.get("saved") or 0)

    def accept(self) -> None:
        """The recipe of this attempt is the run's from now on: it could be gone on with."""
        digests = [*(d for d in self.digests if d != self.digest), self.digest]
        self.update(digest=self.digest, digests=digests, inputs=self.inputs)
        replace(self.path / "recipe.toml", dump_toml(self.recipe).encode())

    # ---- what a step leaves ----

    def commit_step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a step: its metrics, keyed (step, attempt), and the trajectories added since the last commit.

        record: ``step``, ``phase`` and metrics. Returns what was written, ``seconds`` of run time so far included.
        """
        seconds = round(self.seconds, 3)
        keys = {"step": record["step"], "attempt": self.attempt, "phase": record.get("phase", ""), "seconds": seconds}
        written = keys | {k: v for k, v in record.items() if k not in keys}
        self._metrics.append(to_json(written))
        self.trajectories.commit(record["step"])
        self.journal.forget(record["step"])
        self._last = record["step"]
        return written

    def flush(self) -> None:
        """Make everything committed durable: bytes and names. Call it before a checkpoint is written."""
        self.trajectories.flush()
        self._metrics.sync()

    def rewind(self, step: int) -> None:
        """Drop everything of steps after ``step``, the last one that the checkpoint holds (0: all)."""
        self.trajectories.rewind(step)
        self.journal.rewind(step)
        self._metrics.close()
        path = self.path / "metrics.jsonl"
        kept = [r for r in read_metrics(self.path) if r["step"] <= step]
        replace(path, "".join(to_json(r) + "\n" for r in kept).encode())
        self._metrics = Lines(path)
        self._last = kept[-1]["step"] if kept else 0
        self._earlier = kept[-1].get("seconds", 0.0) if kept else 0.0
        self._began = time.monotonic()
        now = self._state["attempts"][-1] | {"from_step": step, "from_seconds": self._earlier}
        warnings = [said for said in self._state.get("warnings", []) if said["step"] <= step]
        self.update(attempts=[*self._state["attempts"][:-1], now], warnings=warnings)

    @property
    def seconds(self) -> float:
        """Run time in seconds: of this attempt, and of earlier ones up to where it continues."""
        return self._earlier + time.monotonic() - self._began

    # ---- the state ----

    def log(self, text: str) -> None:
        """A line, with the time, in log.txt."""
        self._log.append(f"{_now()} {text}")

    def warn(self, step: int, text: str) -> None:
        """Keep, for the report, what a person should know of the run after this step."""
        self.update(warnings=[*self._state.get("warnings", []), {"step": step, "text": text}])

    def update(self, **fields: Any) -> None:
        """Set fields of run.json, which is replaced as a whole."""
        self._state.update(fields)
        replace(self.path / "run.json", (to_json(self._state) + "\n").encode())

    def note_checkpoint(self, step: int, best: Mapping[str, Any] | None) -> None:
        """The checkpoint of this step is complete; best: the best evaluation of those that are kept."""
        if 0 < self.saved < step:
            self.journal.trim(self.saved)  # a resume may still go back to the one before
        self.update(best=best, saved=step)

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Keep the plan; its ``memory_peak`` is the predicted memory that the peak is shown beside."""
        self.update(plan=dict(plan), memory={"predicted": plan.get("memory_peak"), "peak": None})

    def end(self, state: State, error: str | None = None, *, why: str = "", **fields: Any) -> None:
        """The run ended: log it, flush, and write state, time, peak memory and summary.

        why: of an end that is no error. Further fields as in ``update``.
        """
        self.log(
            f"attempt {self.attempt} {state} after step {self._last}" + (f": {error or why}" if error or why else "")
        )
        self.flush()
        memory = self._state.get("memory") or {"predicted": None}
        last = self._state["attempts"][-1] | {"ended": _now(), "state": state, "why": error or why}
        self._state.update(
            state=state,
            error=error,
            ended=_now(),
            seconds=round(self.seconds, 3),
            memory={**memory, "peak": resident()[1]},
            attempts=[*self._state["attempts"][:-1], last],
            **fields,
        )
        self.update()
        self.update(summary=summarise(self.path))

    def close(self) -> None:
        """Release the files and the lock; the state stays as it is."""
        for file in (self._metrics, self.journal, self._log):
            file.close()
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._state["state"] == "running":
                self._end_with(error)
        except StorageError:
            # The disk that ended the run cannot say so; readers see a state "running" without a process: interrupted.
            if not isinstance(error, StorageError):
                raise
        finally:
            self.close()

    def _end_with(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, Interrupted)):
            self.end("interrupted", why=str(error or "") or ("Ctrl-C" if error is not None else ""))
            return
        if not isinstance(error, TilthError):  # a fault of the program: the log keeps its place
            self.log("".join(traceback.format_exception(error)).rstrip())
        self.end("failed", f"{type(error).__name__}: {error}")

    def _begin(self, before: dict[str, Any]) -> dict[str, Any]:
        """Fields of run.json for a new attempt."""
        now, place = _now(), _place(self.recipe, self.path, before)
        if place:
            from tilth.runs.checkpoint_owner import take  # it imports torch, which those who only read do without

            take(self.path, place, fresh=place != before.get("checkpoints"))
        silent = {"state": "interrupted", "why": self.before}
        attempts = [a if a.get("ended") else a | silent for a in before.get("attempts", [])]
        return {
            "format": FORMAT,
            "recipe": self.name,
            "flow": self.recipe.flow,
            "plan": None,
            "memory": None,
            "digest": self.digest,
            "digests": [self.digest],
            "inputs": self.inputs,
            **before,
            "checkpoints": place,
            "state": "running",
            "error": None,
            "pid": os.getpid(),
            "pid_started": psutil.Process().create_time(),
            "host": os.uname().nodename,
            "attempt": self.attempt,
            "attempts": [*attempts, self._attempt(now)],
            "started": before.get("started", now),
            "ended": None,
            "seconds": None,
            "environment": environment(),
        }

    def _attempt(self, now: str) -> dict[str, Any]:
        changed = {"changed": list(self.changes.values())} if self.changes else {}
        return {"attempt": self.attempt, "started": now, "ended": None, "state": "running", **changed}

    def _announce(self) -> None:
        if not self.resumed:
            replace(self.path / "recipe.toml", dump_toml(self.recipe).encode())
        replace(self.path / "metrics_schema.json", (to_json(schema()) + "\n").encode())
        self.update()
        self.log(f"attempt {self.attempt} {'continues' if self.resumed else 'starts'}, process {os.getpid()}")


def _last_step(path: Path) -> int:
    """The newest committed step; 0: none."""
    return max((record["step"] for record in read_metrics(path)), default=0)


def _ending(path: Path, before: Mapping[str, Any], last: int) -> str:
    """How the newest attempt of a run's state ended, in words; "": there was none."""
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
        cause = "the machine has been started anew since"
    else:
        cause = "killed, machine lost, or out of memory"
    return f"{name} ended without a word after step {last} ({cause})"


def _place(recipe: Recipe, path: Path, before: Mapping[str, Any]) -> str:
    """Where checkpoints of the run in this folder go, a place of its own; "": there, so that it can be moved.

    It stays where it is once there are some, also where a kill came between one and the note of it. StorageError.
    """
    from tilth.runs.checkpoint_owner import holds_some  # it imports torch, which those who only read do without

    given, known = recipe.run.checkpoints.rstrip("/"), before.get("checkpoints", "")
    wanted = given if "://" in given or not given else str(Path(given).resolve())
    same = known.rpartition("/")[0] == wanted
    if before and (same or before.get("saved") or holds_some(str(known or path / "checkpoints"))):
        return str(known)
    if not given:
        return ""
    name = f"{path.name}-{uuid.uuid4().hex[:8]}"  # other folders of runs may share the store
    return f"{wanted}/{name}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
