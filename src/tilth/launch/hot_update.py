"""Hot updates of a run, from the side of its controller: when it leaves, and what became of an update.

step commits, an update is due --> state in memory, everything flushed --> the controller leaves (``HandOver``)
the next controller --> the state from memory --> first commit: in force | fails before: the next one goes on without
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from tilth.config.axes import over
from tilth.config.checks import pools
from tilth.config.load import all_differences, digest, dump_value, given, load_recipe
from tilth.config.roles import roles_of
from tilth.config.schema import LayoutConfig, Recipe
from tilth.core.clock import utc_now
from tilth.core.errors import RecipeError, TilthError, WorkerLost
from tilth.core.write_queue import PROMPT
from tilth.flows.run import Run
from tilth.launch.supervisor import Inherited
from tilth.rewards.fingerprint import files_fingerprint
from tilth.runs.directory import RunDir
from tilth.runs.identity import Identity, of_command
from tilth.runs.readers import read_state
from tilth.runs.signals import HandOver
from tilth.runs.trust import check_trust
from tilth.runs.updates import (
    LATEST,
    RecipeChange,
    State,
    Update,
    allowed,
    keep_code,
    path_of,
    read_updates,
    request,
    shrunk,
    tries,
    waiting,
)

UNREPLACED = ("cluster.start", "guard.spares")
"""Keys of the errors of a worker that no other takes the place of."""
BY = "guard"
"""Who asks for fewer workers, and for all again."""
GROWS = 600.0
"""Seconds after which a controller with fewer workers tries to have those back that are lost, twice as long after each
try that fails."""


def leave_for_updated(handed: Inherited, who: Identity, name: str) -> None:
    """Leave (HandOver) to a controller with the updates of the run that this command resumes, if it has some."""
    path = None if handed.run else of_command(who, name)
    if path is None or (who.same(path, read_state(path)) and not waiting(path)):
        return
    for change in (RecipeChange.of(read_state(path)["change"]), *(one.change for one in waiting(path))):
        check_trust(path, given(str(path / "recipe.toml"), change.overrides))  # a folder may come from anybody
    handed.enter(path)
    raise HandOver(f"another controller goes on with the updates of {path}", key="guard.update")


class HotUpdates:
    """Updates of one run while this controller has it."""

    def __init__(
        self, handed: Inherited, directory: RunDir, plugins: Sequence[str], has_room: Callable[[int], bool]
    ) -> None:
        """plugins: of the recipe, which are kept for the way back from an update; has_room: returns False if so many
        workers surely find no place."""
        self._has_room, self._began = has_room, time.monotonic()
        self._handed, self._directory = handed, directory
        self._attempt, self._step, self._told = directory.attempt, 0, False
        self._taken = not handed.tried or bool(handed.undone)
        """True once a step is committed with the update that is tried, if one is."""
        self._modules = {name: files_fingerprint([name]) for name in plugins if not name.endswith(".py")}
        """Plugins that are named as modules, and what is in them."""
        supervisor = psutil.Process(os.getppid())
        owner = {"pid": supervisor.pid, "started": supervisor.create_time()}
        directory.update(supervisor=owner)
        self._facts = {"plugins": list(keep_code(directory.path, plugins)), "change": asdict(handed.change)}
        """What the next command goes on with, once it is in force."""
        if not handed.change.overrides:
            began = {"recipe": digest(directory.recipe), "inputs": dict(directory.inputs)}
            directory.update(began=began, **self._facts)
        self._known: list[Update] = []

    def begin(self, step: int) -> None:
        """Report, after the state is restored, which update is tried or undone."""
        self._step, why, tried = step, self._handed.undone, self._handed.tried
        if why:
            self._directory.update(**self._facts)
        for one in self._waiting():
            if why and one.renews_tilth and one.number <= tried:
                self._set(one, "in force", step, why)
                self._directory.say(f"{one.title()} stays, and what came with it is undone: {why}")
            elif why:
                built = "" if one.number <= tried else f"it was built on update {tried}: "
                self._set(one, "undone", step, built + why)
                self._directory.say(f"{one.title()} is undone: {built}{why}")
            elif one.number <= tried:
                self._directory.say(f"going on after step {step} with {one.title()}, asked for by {one.by}")

    def after_step(self, run: Run) -> None:
        """Take note of the first commit with an update; leave the run (HandOver) if the next one is due.

        After the last step nothing is due: another controller would have nothing to do.
        """
        self.finish()
        if run.at_end:
            return
        restarted, self._attempt = self._directory.attempt != self._attempt, self._directory.attempt
        waits = self.waiting()
        if not waits and self._grow(run.recipe):
            waits = self.waiting()
        if not any(one.urgent or restarted or one.age > LATEST for one in waits) or self._refused(run, waits):
            return
        if trouble := self._directory.flush(PROMPT):
            if not self._told:
                run.say(f"{waits[-1].title()} waits for {trouble['path']}: {trouble['reason']}")
            self._told = True
            return
        lasts = run.snapshots is not None and str(run.snapshots.folder) == self._handed.folder
        # Nothing goes back to the former code of Tilth: the state must outlive the supervisor too.
        if lasts and run.kept_in_memory and not any(one.renews_tilth for one in waits):
            run.saving.finish()
        else:
            run.secure()
        self.leave()

    def _refused(self, run: Run, waits: Sequence[Update]) -> bool:
        """Refuse updates that come with a module which nothing can go back from."""
        changed = [name for name, was in self._modules.items() if files_fingerprint([name]) != was]
        if not changed:
            return False
        why = (
            f"{changed[0]} of plugins has changed since this run imported it, and a module is not kept to go back to: "
            "restore it, or end the run and resume it with --allow plugins"
        )
        for one in waits:
            self._set(one, "undone", run.state.step, why)
            run.say(f"{one.title()} is not taken: {why}")
        return True

    def finish(self) -> None:
        """Take note that the updates of this controller have their first commit, or that the run ended without one."""
        if self._taken:
            return
        self._taken = True
        self._directory.update(**self._facts)
        for one in self._waiting():
            if one.number <= self._handed.tried:
                self._set(one, "in force", self._step)
        self._handed.take()

    def leave(self) -> None:
        """Leave the run to the next controller: HandOver."""
        title = ", ".join(one.title() for one in self.waiting())
        raise HandOver(f"another controller goes on with {title}", key="guard.update")

    def instead_of(self, error: TilthError, recipe: Recipe, lost: Collection[int]) -> None:
        """Leave (HandOver) instead of ending by this error, if an update waits or fewer workers can go on.

        lost: workers that are to be replaced.
        """
        if self.waiting():
            self.leave()
        self._shrink(recipe, error, lost)

    def _shrink(self, recipe: Recipe, error: TilthError, lost: Collection[int]) -> None:
        """Leave for fewer workers (HandOver) if these cannot be replaced and a smaller layout works."""
        unreplaced = isinstance(error, WorkerLost) and error.key in UNREPLACED
        if not (unreplaced and lost and self._taken and recipe.guard.shrink):
            return
        overrides, changes, back = smaller(self._directory.path, recipe, lost)
        if not overrides:
            self._directory.say("no smaller layout works without the workers that are lost")
            return
        ranks = ", ".join(map(str, sorted(lost)))
        self._directory.say(f"worker{'s' * (len(lost) > 1)} {ranks} cannot be replaced, and fewer go on: {error}")
        self._request(recipe, overrides, changes, back=tuple(back))
        self.leave()

    def _grow(self, recipe: Recipe) -> bool:
        """Ask for the workers back that an update for fewer has taken away, if it is time; return True then."""
        lost = shrunk(self._known)
        if lost is None:
            return False
        if time.monotonic() - self._began < GROWS * 2 ** tries(self._known, lost):
            return False
        after = load_recipe(str(self._directory.path / "recipe.toml"), lost.back)
        if not self._has_room(sum(pools(after).values())):
            return False
        self._directory.say(f"the workers that {lost.title()} has taken away are asked for again")
        self._request(recipe, lost.back, all_differences(recipe, after), grows=lost.number)
        return True

    def _request(self, recipe: Recipe, overrides: Sequence[str], changes: Mapping[str, str], **more: Any) -> None:
        """Ask for other numbers of workers, at once."""
        whole = (*self._handed.change.overrides, *overrides)
        allow = tuple(dict.fromkeys((*self._handed.change.allow, *allowed(changes))))
        change, guard = RecipeChange(0, whole, allow), recipe.guard
        made = Update(change, changes, guard.restarts, True, BY, utc_now(), hang_after=guard.hang_after, **more)
        request(self._directory.path, made)

    def waiting(self) -> list[Update]:
        """Return the updates that wait; none before the first commit with earlier ones."""
        return self._waiting() if self._taken else []

    def _waiting(self) -> list[Update]:
        """Read requests that are new, and return those that wait."""
        number = self._known[-1].number if self._known else 0
        if path_of(self._directory.path, number + 1).exists():
            self._known += read_updates(self._directory.path)[len(self._known) :]
        return [one for one in self._known if one.state == "waiting"]

    def _set(self, update: Update, state: State, step: int, why: str = "") -> None:
        new = replace(update, state=state, step=step, why=why)
        self._known[self._known.index(update)] = new
        self._directory.store(path_of(self._directory.path, new.number), new.dump())


# ---- the largest layout for the workers that are left ----
#
# Model axes (pp, ep, hdp, cp, tp) stay, since fewer ranks along them would each need more memory. Rows are divided over
# fewer ranks (dp, fsdp), so a rank has more rows, and steps have the batch, the data and the order that they had.

ROWS = over("rows", without=("experts", "tokens"))
"""Axes that shrink: of replicas, and of the ranks that shard one's parameters."""
_REPLICAS, _SHARDS = ROWS


def smaller(run: Path, recipe: Recipe, lost: Collection[int]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return overrides for the largest layout without these ranks, key -> message, and the overrides that lead back;
    all empty if none works."""
    before, left = pools(recipe), _left(recipe, lost)
    changed = [pool for pool in before if left[pool] < before[pool]]
    while changed and all(left[pool] for pool in changed):
        overrides, back = _overrides(recipe, left, changed)
        if overrides:
            try:
                after = load_recipe(str(run / "recipe.toml"), overrides)
            except RecipeError:  # a layout that another check refuses
                overrides = []
            else:
                return overrides, all_differences(recipe, after), back
        largest = max(changed, key=lambda pool: left[pool])
        left[largest] -= 1
    return [], {}, []


def _left(recipe: Recipe, lost: Collection[int]) -> dict[str, int]:
    """Return pool -> workers that are left."""
    found = [pool for pool, workers in pools(recipe).items() for _ in range(workers)]
    gone = Counter(found[rank] for rank in lost)
    return {pool: workers - gone[pool] for pool, workers in pools(recipe).items()}


def _overrides(recipe: Recipe, left: Mapping[str, int], changed: Collection[str]) -> tuple[list[str], list[str]]:
    """Return overrides for these workers, and those that lead back; none if a role's model axes do not fit them."""
    first, found, before = next(iter(left)), dict[str, int](), dict[str, int]()
    for spec in roles_of(recipe).values():
        section = spec.section(recipe) if spec.section else spec.key
        placed = recipe.section(section)
        pool = placed.pool or first if hasattr(placed, "pool") else first
        if spec.mesh not in ("layout", "engines") or pool not in changed:
            continue
        sizes = _fit(placed.layout, pools(recipe)[pool], left[pool])
        if sizes is None:
            return [], []
        found |= {f"{section}.layout.{axis}": size for axis, size in sizes.items()}
        before |= {f"{section}.layout.{axis}": getattr(placed.layout, axis) for axis in sizes}
    return [*_workers(recipe, left), *_words(found)], [*_workers(recipe, pools(recipe)), *_words(before)]


def _words(sizes: Mapping[str, int]) -> list[str]:
    return [f"{key}={size}" for key, size in sizes.items()]


def _workers(recipe: Recipe, of: Mapping[str, int]) -> list[str]:
    """Return overrides for pools of these workers."""
    if not recipe.cluster.pools:
        return [f"cluster.workers={next(iter(of.values()))}"]
    return [f"cluster.pools={dump_value(dict(of))}", "cluster.workers=1"]  # else their former sum


def _fit(layout: LayoutConfig, before: int, workers: int) -> dict[str, int] | None:
    """Return the sizes of ``ROWS`` that differ over fewer workers; None if the other axes do not fit them."""
    sizes = layout.sizes(before)
    model = math.prod(size for axis, size in sizes.items() if axis not in ROWS)
    if workers % model:
        return None
    rows = workers // model
    wanted = sizes[_SHARDS]
    shards = wanted if rows % wanted == 0 else rows if wanted > 1 else 1
    found = {_REPLICAS: rows // shards if getattr(layout, _REPLICAS) else 0, _SHARDS: shards}
    return {axis: size for axis, size in found.items() if size != getattr(layout, axis)}
