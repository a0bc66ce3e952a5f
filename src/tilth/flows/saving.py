"""Save checkpoints of a run: when they are due, one at a time in the background, and how many may fail.

A save stalls the run only for a copy in host memory. Workers write the copies while training continues, and the
checkpoint is complete when all have reported (two phases; ByteCheckpoint, arXiv 2407.20143, section 4.2). Workers
return errors instead of raising them, so that a full disk does not end them. A save that fails is tried again after
one of the next steps.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilth.checkpoint import Commit, abandon_save, begin_save, latest, prune, record_best
from tilth.checkpoint.directory import step_of
from tilth.checkpoint.stages import StageError
from tilth.checkpoint.storage import Location, is_url
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.schema import Recipe
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Mesh
from tilth.core.write_queue import LATEST, SOONEST, Trouble
from tilth.runs.directory import RunDir
from tilth.runs.metrics import Metrics
from tilth.trace.spans import span

Say = Callable[[str], None]
GRACE = 5.0
"""Seconds that a save under way gets when the run fails."""
NEXT = 10.0
"""Seconds that the next save waits for the one under way; then training goes on, and it is made after a later step."""
LOOK = 0.1
"""Seconds between two looks at a save that is waited for."""


class Saving:
    """Saver of one run's checkpoints."""

    def __init__(
        self, recipe: Recipe, directory: RunDir, stateful_roles: Mapping[str, WorkerGroup], metrics: Metrics, say: Say
    ) -> None:
        """stateful_roles: the roles whose state a checkpoint holds."""
        self.section, self.timeout = recipe.run, recipe.cluster.timeout
        self.directory, self.stateful_roles, self.metrics, self.say = directory, stateful_roles, metrics, say
        self.root = directory.checkpoints
        self.failed = 0
        """Consecutive failed saves, those that were tried again included."""
        self._missed = 0
        """Checkpoints that were due since the last complete one and failed."""
        self._again, self._pause = math.inf, SOONEST
        """When a failed save is tried again, and how long after it failed."""
        self.error: StorageError | CheckpointError | None = None
        """Error of the last failed save."""
        self.then: Callable[[int, str], None] = lambda step, path: None
        """Called with step and path of a complete checkpoint."""
        self._under_way: Commit | None = None
        self._step, self._path = 0, ""
        self._best: Mapping[str, Any] | None = None
        self._began = self._durable = time.monotonic()

    def due(self, step: int) -> bool:
        """True if a checkpoint is due at the end of this step: by steps, by minutes, or after one that failed."""
        return self._planned(step) or time.monotonic() >= self._again

    @property
    def wanted(self) -> bool:
        """True if a checkpoint that was due is not made yet."""
        return self._again < math.inf

    @property
    def pause(self) -> float:
        """Seconds until it is tried again."""
        return max(0.0, self._again - time.monotonic()) if self.wanted else 0.0

    def _planned(self, step: int) -> bool:
        late = self.section.save_minutes and time.monotonic() - self._began >= 60 * self.section.save_minutes
        return step % self.section.save_every == 0 or bool(late)

    def begin(
        self,
        step: int,
        objects: Mapping[str, Any],
        best: Mapping[str, Any] | None,
        mesh: Mesh,
        trouble: Trouble = MappingProxyType({}),
    ) -> None:
        """Start a save after the previous one has ended. A failure is logged, and the save is due again soon.

        While a slow disk still takes the previous one, training does not wait longer than ``NEXT``. trouble: what the
        checkpoint refers to and is not on disk yet. StorageError after too many failures in a row.
        """
        if not self._ended(0.0 if self.wanted else NEXT) or trouble.get("slow"):
            self._again = time.monotonic() + self._pause
            return
        self._missed += step != self._step and (self._planned(step) or not self.failed)
        self._again, self._began, self._step, self._best = math.inf, time.monotonic(), step, best
        try:
            if trouble:
                path, reason = trouble["path"], trouble["reason"]
                raise StorageError(f"{path} is not on disk yet: {reason}", key=Path(path).name)
            if self.directory.saved and not is_url(self.root) and not Path(self.root).is_dir():
                message = f"{self.root} is not there any more, and it had checkpoints: is its disk mounted?"
                raise StorageError(message, key="checkpoints")  # a new folder would hide a missing disk
            folder = begin_save(self.root, step)
            self._snapshot(folder)
        except (StorageError, CheckpointError) as error:
            self._fail(error)
            return
        ranks = {group: role.mesh.ranks for role in self.stateful_roles.values() for group in role.kept()}
        self._under_way = Commit(folder, ranks, objects, mesh, then=self._tidy)
        if not self.section.save_background:
            self.finish()

    def _ended(self, seconds: float) -> bool:
        """Finish the save under way if it ends within these seconds; return True if there is none any more."""
        until = time.monotonic() + seconds
        while self._under_way is not None:
            with suppress(TimeoutError, StorageError, CheckpointError):  # ``look`` reports the error
                self._under_way.wait(LOOK)
            self.look()
            if time.monotonic() >= until:
                break
        return self._under_way is None

    def look(self) -> None:
        """Finish a save that has ended or failed, without waiting for one that is under way."""
        if self._under_way is not None and (self._under_way.done() or any(self._problems(wait=False))):
            self.finish()

    def finish(self) -> None:
        """Wait until the save under way has ended. A failure is logged; StorageError after too many in a row."""
        commit, self._under_way = self._under_way, None
        if commit is None:
            return
        try:
            with span("save.wait"):
                problems = self._problems(wait=True)  # after this, no worker has a copy left
                if problems and not commit.done():
                    commit.cancel()
                    raise StorageError(problems[0], key=f"step-{self._step:06d}")
                commit.wait(self.timeout)
        except TimeoutError:
            commit.cancel()
            self._fail(
                StorageError(
                    f"not complete {self.timeout:g} s after all workers wrote their parts", key="cluster.timeout"
                )
            )
        except (StorageError, CheckpointError) as error:
            if not isinstance(error, StageError) or error.stage != "retention":
                self._fail(error)
                return
            self.say(str(error))  # the checkpoint is complete; removing older ones failed
            self._succeed()
        else:
            self._succeed()

    def _succeed(self) -> None:
        if self.failed:
            self.say(f"the checkpoint of step {self._step} is complete, after {self.failed} that failed")
        self.failed = self._missed = 0
        self._again, self._pause = math.inf, SOONEST
        self.directory.note_checkpoint(self._step, self._best)
        self.metrics.add("save/seconds", self._durable - self._began)
        self.then(self._step, self._path)

    def give_up(self, grace: float = GRACE) -> None:
        """Give the save under way some seconds to complete and then cancel it, when the run fails."""
        commit, self._under_way = self._under_way, None
        if commit is None:
            return
        with suppress(TimeoutError, StorageError, CheckpointError):  # report the error of the run instead
            commit.wait(grace)
        commit.cancel()

    def _snapshot(self, folder: Any) -> None:
        """Let every worker copy its state; StorageError with the first problem, after all copies are dropped."""
        found = [role.save(str(folder), self.section.save_background) for role in self.stateful_roles.values()]
        if problem := next((text for texts in found for text in texts if text), ""):
            self._problems(wait=True)
            abandon_save(folder)
            raise StorageError(problem, key=f"step-{self._step:06d}")

    def _problems(self, *, wait: bool) -> list[str]:
        """Return the error messages of the workers' threads; wait: until the threads are done."""
        found = [role.saving(wait) for role in self.stateful_roles.values()]
        return [text for texts in found for text in texts if text]

    def _tidy(self, path: Location) -> None:
        self._durable, self._path = time.monotonic(), str(path)
        self._best = record_best(self.root, self._best)
        if step_of(latest(self.root) or "") == self._step:  # else another run's, which would count as kept
            prune(self.root, self.section.keep, self.section.keep_every)

    def _fail(self, error: StorageError | CheckpointError) -> None:
        self.failed, known, self.error = self.failed + 1, str(self.error or ""), error
        self._again, self._pause = time.monotonic() + self._pause, min(2 * self._pause, LATEST)
        self.metrics.add("save/failed", 1.0)
        if self._missed > self.section.save_failures > 0:
            self.directory.log(f"the checkpoint of step {self._step} failed, {self._missed} in a row: {error}")
            raise error
        if self.failed == 1 or _reason(known) != _reason(str(error)):
            self.say(f"the checkpoint of step {self._step} failed, and is tried again: {error}")


def _reason(text: str) -> str:
    """Return a message without its numbers, which differ from step to step."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "", text)
