"""Save checkpoints of a run: when they are due, one at a time in the background, and how many may fail.

A save stalls the run only for a copy in host memory. Workers write the copies while training continues, and the
checkpoint is complete when all have reported (two phases; ByteCheckpoint, arXiv 2407.20143, section 4.2). Workers
return errors instead of raising them, so that a full disk does not end them.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tilth.checkpoint import Commit, abandon_save, begin_save, latest, prune, record_best
from tilth.checkpoint.directory import step_of
from tilth.checkpoint.stages import StageError
from tilth.checkpoint.storage import Location
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.schema import Recipe
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Mesh
from tilth.runs.directory import RunDir
from tilth.runs.metrics import Metrics
from tilth.trace.spans import span

Say = Callable[[str], None]
GRACE = 5.0
"""Seconds that a save under way gets when the run fails."""


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
        """Consecutive failed saves."""
        self.error: StorageError | CheckpointError | None = None
        """Error of the last failed save."""
        self.then: Callable[[int, str], None] = lambda step, path: None
        """Called with step and path of a complete checkpoint."""
        self._under_way: Commit | None = None
        self._step, self._path = 0, ""
        self._best: Mapping[str, Any] | None = None
        self._began = self._durable = time.monotonic()

    def due(self, step: int) -> bool:
        """True if a checkpoint is due at the end of this step, by steps or by minutes."""
        late = self.section.save_minutes and time.monotonic() - self._began >= 60 * self.section.save_minutes
        return step % self.section.save_every == 0 or bool(late)

    def begin(self, step: int, objects: Mapping[str, Any], best: Mapping[str, Any] | None, mesh: Mesh) -> None:
        """Start a save after the previous one has ended. A failure is logged; StorageError after too many in a row."""
        self.finish()
        self._began, self._step, self._best = time.monotonic(), step, best
        try:
            folder = begin_save(self.root, step)
            self._snapshot(folder)
        except (StorageError, CheckpointError) as error:
            self._fail(error)
            return
        ranks = {group: role.mesh.ranks for role in self.stateful_roles.values() for group in role.kept()}
        self._under_way = Commit(folder, self.root, step, ranks, objects, mesh, then=self._tidy)
        if not self.section.save_background:
            self.finish()

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
        self.failed = 0
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
        self.failed, self.error = self.failed + 1, error
        self.metrics.add("save/failed", 1.0)
        if self.failed > self.section.save_failures:
            self.directory.log(f"the checkpoint of step {self._step} failed, {self.failed} in a row: {error}")
            raise error
        more = self.section.save_failures - self.failed
        self.say(
            f"the checkpoint of step {self._step} failed ({self.failed} in a row; "
            f"the run stops after {more + 1} more): {error}"
        )
