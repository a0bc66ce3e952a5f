"""The directory of a run: everything that is kept, written so that nothing committed is ever lost.

    recipe.toml  run.json  metrics.jsonl  metrics_schema.json  trajectories/  events/  checkpoints/  rewards.jsonl
    log.txt  report.html

A step is committed by one line of ``metrics.jsonl``. Trajectories follow in files of several steps, at the latest when
the flow makes a checkpoint (``flush``). On resume ``rewind(step)`` drops what lies behind the checkpoint's step; the
reward journal stays, so that a time-out is the same missing reward when its step runs again.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import pyarrow as pa

from tilth.config.load import differences, digest, dump_toml, load_recipe
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, RecipeError, StorageError
from tilth.flows.environment import environment
from tilth.flows.files import Lines, Lock, read_lines, replace, to_json, writing
from tilth.flows.metrics import resident, schema
from tilth.flows.readers import read_metrics, read_state, read_trajectories, summarise
from tilth.flows.signals import Interrupted
from tilth.flows.trajectories import TrajectoryFiles

__all__ = ["RunDir", "State", "read_metrics", "read_state", "read_trajectories", "summarise"]

State = Literal["running", "finished", "interrupted", "failed"]
FORMAT = 1


class RunDir:
    """A run's directory while this process writes it. As a context manager it records how the run ended."""

    def __init__(self, path: Path, recipe: Recipe, name: str, digest: str, lock: Lock) -> None:
        """Use ``create``. ``lock`` is held until ``close``."""
        self.path, self.recipe, self.name, self._lock = path, recipe, name, lock
        self.digest = digest
        self.events, self.checkpoints = path / "events", path / "checkpoints"
        before = read_state(path) if (path / "run.json").exists() else {}
        self.resumed = bool(before)
        self.attempt: int = before.get("attempt", 0) + 1
        self._began = time.monotonic()
        self._earlier = 0.0
        """Seconds of earlier attempts, up to the step that this one continues from."""
        with writing(path):
            for folder in (self.events, self.checkpoints):
                folder.mkdir(exist_ok=True)
        self._metrics = Lines(path / "metrics.jsonl")
        self._journal = Lines(path / "rewards.jsonl")
        self._log = Lines(path / "log.txt")
        self._trajectories = TrajectoryFiles(path / "trajectories")
        self._state = self._begin(before)
        self._outcomes = self._read_journal(0)
        self._announce()

    @classmethod
    def create(cls, recipe: Recipe, name: str, inputs: str = "") -> "RunDir":
        """The newest unfinished run of exactly this recipe in ``run.dir``, to continue, or else a new numbered folder.

        inputs: fingerprint of what the recipe does not hold (data, a reward by value); other inputs, other run.

        With ``run.name`` it is that folder, new or unfinished. A folder that another process is writing is passed over;
        named, it is a StorageError that says who writes it. RecipeError if the named run is finished or another's.
        """
        root = Path(recipe.run.dir)
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
        mine = _digest(recipe, inputs)
        if recipe.run.name:
            path, lock = _named(root / recipe.run.name, mine)
        else:
            path, lock = _unfinished(root, name, mine) or _numbered(root, name)
        try:
            return cls(path, recipe, name, mine, lock)
        except BaseException:
            lock.release()
            raise

    # ---- what a step leaves ----

    def commit_step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a step: its metrics, keyed (step, attempt), and the trajectories added since the last commit.

        record: ``step``, ``phase`` and metrics. Returns what was written, ``seconds`` of run time so far included.
        """
        seconds = round(self.seconds, 3)
        keys = {"step": record["step"], "attempt": self.attempt, "phase": record.get("phase", ""), "seconds": seconds}
        written = keys | {k: v for k, v in record.items() if k not in keys}
        self._metrics.append(to_json(written))
        self._trajectories.commit()
        for step in [s for s in self._outcomes if s < record["step"] - 1]:
            del self._outcomes[step]  # on disk, and not asked for again before a rewind
        return written

    def add_trajectories(self, table: pa.Table) -> None:
        """Trajectories of the step under way (columns of ``trajectories.COLUMNS``); kept once the step is committed."""
        self._trajectories.add(table)

    def flush(self) -> None:
        """Make everything committed durable. Call it before a checkpoint is written."""
        self._trajectories.flush()
        self._metrics.sync()

    def rewind(self, step: int) -> None:
        """Drop everything of steps after ``step``, the last one that the checkpoint holds (0: all)."""
        self._trajectories.rewind(step)
        self._outcomes = self._read_journal(step)
        self._metrics.close()
        path = self.path / "metrics.jsonl"
        kept = [r for r in read_metrics(self.path) if r["step"] <= step]
        replace(path, "".join(to_json(r) + "\n" for r in kept).encode())
        self._metrics = Lines(path)
        self._earlier = kept[-1].get("seconds", 0.0) if kept else 0.0
        self._began = time.monotonic()
        now = self._state["attempts"][-1] | {"from_step": step, "from_seconds": self._earlier}
        self.update(attempts=[*self._state["attempts"][:-1], now])

    @property
    def seconds(self) -> float:
        """Run time in seconds: of this attempt, and of earlier ones up to where it continues."""
        return self._earlier + time.monotonic() - self._began

    # ---- the journal of rewards ----

    def log_outcomes(self, step: int, outcomes: Mapping[int, Any]) -> None:
        """Write down outcomes (dataclasses or mappings of JSON) by trajectory id, durably, before they are used: they
        are replayed if the step runs again. A second outcome of one trajectory is ignored."""
        known = self._outcomes.setdefault(step, {})
        fresh = {i: asdict(o) if is_dataclass(o) else dict(o) for i, o in outcomes.items() if i not in known}  # type: ignore[arg-type]
        if not fresh:
            return
        lines = [to_json({"step": step, "trajectory": i, "outcome": o}) for i, o in fresh.items()]
        self._journal.append("\n".join(lines), sync=True)
        known.update(fresh)

    def journal(self, step: int) -> dict[int, dict[str, Any]]:
        """Outcomes of a step by trajectory id, as far as an earlier attempt got."""
        return dict(self._outcomes.get(step, {}))

    def _read_journal(self, step: int) -> dict[int, dict[int, dict[str, Any]]]:
        """Outcomes of this step and later ones, by step and trajectory id."""
        found: dict[int, dict[int, dict[str, Any]]] = {}
        for entry in read_lines(self.path / "rewards.jsonl"):
            if entry["step"] < step:
                continue
            found.setdefault(entry["step"], {}).setdefault(entry["trajectory"], entry["outcome"])
        return found

    # ---- the state ----

    def log(self, text: str) -> None:
        """A line, with the time, in log.txt."""
        self._log.append(f"{_now()} {text}")

    def update(self, **fields: Any) -> None:
        """Set fields of run.json, which is replaced as a whole."""
        self._state.update(fields)
        replace(self.path / "run.json", (to_json(self._state) + "\n").encode())

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Keep the plan; its ``memory_peak`` is the predicted memory that the peak is shown beside."""
        self.update(plan=dict(plan), memory={"predicted": plan.get("memory_peak"), "peak": None})

    def end(self, state: State, error: str | None = None, **fields: Any) -> None:
        """The run ended: flush, and write state, time, peak memory and summary. Further fields as in ``update``."""
        self.flush()
        memory = self._state.get("memory") or {"predicted": None}
        last = self._state["attempts"][-1] | {"ended": _now(), "state": state}
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
        for file in (self._metrics, self._journal, self._log):
            file.close()
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._state["state"] == "running":
                stopped = error is None or isinstance(error, (KeyboardInterrupt, Interrupted))
                self.end(
                    "interrupted" if stopped else "failed", None if stopped else f"{type(error).__name__}: {error}"
                )
        except StorageError:
            # The disk that ended the run cannot say so; readers see a state "running" without a process: interrupted.
            if not isinstance(error, StorageError):
                raise
        finally:
            self.close()

    def _begin(self, before: dict[str, Any]) -> dict[str, Any]:
        """Fields of run.json for a new attempt."""
        now = _now()
        attempts = [a if a.get("ended") else a | {"state": "interrupted"} for a in before.get("attempts", [])]
        return {
            "format": FORMAT,
            "recipe": self.name,
            "digest": self.digest,
            "flow": self.recipe.flow,
            "plan": None,
            "memory": None,
            **before,
            "state": "running",
            "error": None,
            "pid": os.getpid(),
            "pid_started": psutil.Process().create_time(),
            "host": os.uname().nodename,
            "attempt": self.attempt,
            "attempts": [*attempts, {"attempt": self.attempt, "started": now, "ended": None, "state": "running"}],
            "started": before.get("started", now),
            "ended": None,
            "seconds": None,
            "environment": environment(),
        }

    def _announce(self) -> None:
        replace(self.path / "recipe.toml", dump_toml(self.recipe).encode())
        replace(self.path / "metrics_schema.json", (to_json(schema()) + "\n").encode())
        self.update()
        self.log(f"attempt {self.attempt} {'continues' if self.resumed else 'starts'}, process {os.getpid()}")


def find(recipe: Recipe, name: str, inputs: str = "") -> Path | None:
    """The folder that ``RunDir.create`` would go on in, as things stand; None if it would make a new one."""
    root, mine = Path(recipe.run.dir), _digest(recipe, inputs)
    if recipe.run.name:
        path = root / recipe.run.name
        state = read_state(path) if (path / "run.json").exists() else None
        return path if state and state["digest"] == mine else None
    found = _unfinished(root, name, mine) if root.is_dir() else None
    if found is None:
        return None
    found[1].release()
    return found[0]


def _digest(recipe: Recipe, inputs: str) -> str:
    return digest(recipe) + (f"-{inputs}" if inputs else "")


def _named(path: Path, mine: str) -> tuple[Path, Lock]:
    with writing(path):
        path.mkdir(exist_ok=True)
    lock = Lock(path / "run.lock")
    state = read_state(path) if (path / "run.json").exists() else None
    if state and (state["digest"] != mine or state["state"] == "finished"):
        lock.release()
        raise RecipeError(f"run.name={path.name}: {path} is finished or another run; choose another name")
    return path, lock


def check_name(recipe: Recipe, inputs: str = "") -> None:
    """RecipeError, before anything is started, if ``run.name`` is taken by a run that this one cannot go on with."""
    path = Path(recipe.run.dir) / recipe.run.name
    if not recipe.run.name or not (path / "run.json").exists():
        return
    state, name = read_state(path), f"run.name={recipe.run.name}: {path}"
    if state["digest"] == _digest(recipe, inputs):
        if state["state"] == "finished":
            raise RecipeError(f"{name} is finished; choose another name")
        return
    changed = differences(load_recipe(str(path / "recipe.toml")), recipe) if (path / "recipe.toml").exists() else []
    what = "; ".join(changed[:3]) or "its data, reward or template is another one"
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    raise RecipeError(
        f"{name} is another run: {what}{more}. Give the same values to go on with it, or choose another name"
        f" (model.path={path} would begin with its weights)"
    )


def _unfinished(root: Path, name: str, mine: str) -> tuple[Path, Lock] | None:
    for _, path in reversed(_runs(root, name)):
        try:
            state = read_state(path)
        except DataError:  # no run, or a broken one: nothing to continue
            continue
        if state["digest"] != mine or state["state"] == "finished":
            continue
        try:
            return path, Lock(path / "run.lock")
        except StorageError:  # somebody is writing it
            continue
    return None


def _numbered(root: Path, name: str) -> tuple[Path, Lock]:
    number = max((n for n, _ in _runs(root, name)), default=0) + 1
    while True:
        path = root / f"{name}-{number:03d}"
        with writing(path):
            try:
                path.mkdir()
                return path, Lock(path / "run.lock")
            except FileExistsError:
                number += 1


def _runs(root: Path, name: str) -> list[tuple[int, Path]]:
    """Folders ``name-N`` with their numbers, in order."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    return sorted((int(m[1]), p) for p in root.iterdir() if p.is_dir() and (m := pattern.fullmatch(p.name)))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
