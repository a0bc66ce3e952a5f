"""Survive failures: bring workers and roles back to work in the process of the controller.

A recovery is a resume without a new process: workers that are lost are replaced, the roles are made again on the living
cluster, and the run goes on from its last committed step, with the state from shared memory if it is there and from
disk if not. A training loop does not know of it: ``launch`` begins its phase again, as it does after a restart.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilth.cluster.backends.local import LocalBackend
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.roles import ROLES
from tilth.core.errors import CallTimeout, TilthError, WorkerLost
from tilth.core.write_queue import PATIENCE
from tilth.flows.callbacks import Callback, RunView
from tilth.guard.diagnosis import diagnosed
from tilth.guard.node_check import check_node
from tilth.guard.recovery import EVICTS, NOWHERE, Action, Nodes, Recovery, verdict_of
from tilth.guard.signatures import with_cause
from tilth.guard.snapshots import Snapshots
from tilth.guard.verdict import Verdict
from tilth.launch.build import RunParts
from tilth.launch.loader_plans import follow_recorded
from tilth.launch.supervisor import Death
from tilth.runs.directory import PARTIAL, REWARD_LOG, RunDir
from tilth.trace.spans import recorder

SETTLE = 0.5
"""Seconds without the end of a call, after a failure, in which workers may still end theirs by themselves."""
WEIGHT_SYNC = "weight_sync"


class Survival(Callback):
    """Recoveries of one run. snapshots: None if the backend cannot replace workers."""

    def __init__(self, parts: RunParts, cluster: Cluster, directory: RunDir, say: Callable[[str], None]) -> None:
        self.parts, self.cluster, self.directory, self.say = parts, cluster, directory, say
        able, self.restarts = cluster.repairable, parts.recipe.guard.restarts
        self.recovery = Recovery(self.restarts if able is not None else 0, parts.recipe.guard.on_nan)
        self.snapshots: Snapshots | None = None
        if able is not None and able.scratch and self.restarts:
            writer = 0 if parts.roles.writer is None else parts.roles.writer.mesh.ranks[0]
            self.snapshots = Snapshots(Path(able.scratch), able.files, cluster.workers, writer)
        self._replaced = Counter[int]()
        self._lost, self._new, self._failed = set[int](), set[int](), set[str]()
        """Of recoveries that another failure broke off: workers to replace, new workers and roles that failed, whose
        roles are not made again yet."""
        self._evicted = set[int]()
        """Those of the workers to replace whose nodes are given up."""
        self._doubtful = False
        """True if no role that trains may be kept."""
        self._full: float | None = None
        """When the step that is run again until there is room for it first failed."""
        self._one = threading.Lock()
        """Held by a recovery, and while a worker is replaced beside the others."""
        self._beside: list[str] = []
        """Lines about these, which the next step logs, or the end of the attempt."""
        self._decided: tuple[TilthError, Action] | None = None
        """Failure of a worker beside the others from which the run has to recover, and how."""

    def recover(self, error: TilthError, step: int) -> Action:
        """Recover from a failure after this committed step; return what was done. Raises the error if it is hopeless.

        After a "rollback" the state must come from a checkpoint on disk, also if replacing a worker followed.
        """
        self.cluster.dispatch.apart = ()
        with self._one:
            return self._recover(error, step)

    def _recover(self, error: TilthError, step: int) -> Action:
        rollback = False
        while True:
            if self.cluster.dispatch.failed is not None:  # it was not kept
                raise error
            began, verdict = time.monotonic(), self._judge(error)
            action = self._decide(error, verdict, step, began)
            if verdict is None or action.step == "stop":
                if verdict is not None and verdict.details.get("culprits"):
                    self.say(_first_line(verdict, step))
                if self.restarts and self.snapshots is not None and verdict is not None:
                    error.add_note(f"the run does not go on after it: {action.why}{self._longer(verdict)}")
                raise error
            rollback = rollback or action.step == "rollback"
            try:
                self._carry_out(verdict, action, step, began)
                return replace(action, step="rollback") if rollback else action
            except TilthError as another:  # a second failure during the recovery from the first
                error = another

    def _decide(self, error: TilthError, verdict: Verdict | None, step: int, now: float) -> Action:
        """Return what to do about a failure; it is decided once."""
        known, self._decided = self._decided, None
        if known is not None and known[0] is error:
            return known[1]
        nodes = NOWHERE if self.cluster.repairable is None else Nodes(*self.cluster.repairable.nodes())
        return self.recovery.decide(verdict, step, now, nodes)

    # ---- beside workers that go on (``flows.async_sampler.WorkerRepair``) ----

    def watch(self, ranks: Collection[int]) -> bool:
        """Let the loss of each of these workers concern only who waits for it, until a recovery; False where the run
        has to recover: they have other roles, or no worker of this backend is replaced beside others
        (``RepairableBackend``)."""
        groups = [group.role for group in self.cluster.groups if not set(ranks).isdisjoint(group.mesh.ranks)]
        able = getattr(self.cluster.repairable, "beside", False)
        if not able or not self.restarts or not {*groups} <= {"rollout", WEIGHT_SYNC}:
            return False
        self.cluster.dispatch.apart = frozenset(ranks)
        return True

    def replace(self, error: WorkerLost, step: int) -> None:
        """Replace the worker that was lost after this step, with its roles, while others work, again if the new one
        is lost at once. Raises a loss from which the run has to recover, and what else a new worker raises."""
        noticed = time.monotonic()  # others that were lost with it may be replaced first
        with self._one:
            while (another := self._renew(error, step, noticed)) is not None:
                error, noticed = another, time.monotonic()

    def give_up(self, ranks: Collection[int]) -> None:
        """Kill these workers, which take too long to be replaced beside others; the recovery replaces them. No other
        one is replaced until ``watch``."""
        assert self.cluster.repairable is not None
        self.cluster.dispatch.apart = ()
        self._lost.update(ranks)
        self.cluster.repairable.kill(ranks)

    def _renew(self, error: WorkerLost, step: int, noticed: float) -> WorkerLost | None:
        """Replace a worker; return the loss of the new one, if it is lost at once. After anything else that a new
        worker raises it is half made, and the recovery replaces it. Raises the loss once no such worker is watched."""
        if not set(error.ranks).issubset(self.cluster.dispatch.apart):  # the run recovers, or this was given up
            raise error
        began, verdict = time.monotonic(), verdict_of(error)
        assert verdict is not None
        verdict = with_cause(verdict)
        action = self._decide(error, verdict, step, noticed)
        if action.step != "replace" or action.ranks != error.ranks or len(action.ranks) != 1 or action.evict:
            self._decided = error, action
            raise error
        self._beside.append(_first_line(verdict, step))
        self._replaced.update(action.ranks)
        (rank,), found = action.ranks, None
        try:
            self.cluster.renew(rank)
        except BaseException as another:
            if not isinstance(another, WorkerLost) or another.ranks != action.ranks:
                self._lost.add(rank)
                raise
            found = another
        took = round(time.monotonic() - began, 3)
        made = [group.role for group in self.cluster.groups if rank in group.mesh.ranks and found is None]
        self.directory.note_replaced({**_record(verdict, action, step, [rank], made, began), "beside": took})
        if found is None:
            self.recovery.end(time.monotonic(), action.ranks)
            self._beside.append(f"worker {rank} is new, {took:.1f} s later; the others went on")
        return found

    def _longer(self, verdict: Verdict) -> str:
        """Return what to do if nothing hangs and the limit is below the length of an operation."""
        if verdict.kind != "hang":
            return ""
        limit = self.parts.recipe.guard.hang_after
        more = f"; if nothing hangs there, it takes longer than guard.hang_after = {limit:g}: use more, as "
        return f"{more}guard.hang_after={max(4 * limit, 120.0):g}"

    @property
    def lost(self) -> AbstractSet[int]:
        """Workers that could not be replaced yet."""
        return self._lost

    def _judge(self, error: TilthError) -> Verdict | None:
        """Return the verdict on an error, with what the living workers know."""
        verdict = verdict_of(error)
        return None if verdict is None else with_cause(diagnosed(verdict, error, self.cluster))

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Tell that a step which had no room is complete, and what was replaced beside it."""
        self.tell()
        if self._full is not None:
            self.say(f"there is room again, {time.monotonic() - self._full:.1f} s later: step {step} is complete")
            self._full = None

    def tell(self) -> None:
        """Log what was replaced beside the others since the last step."""
        while self._beside:
            self.say(self._beside.pop(0))

    def _carry_out(self, verdict: Verdict, action: Action, step: int, began: float) -> None:
        if not action.again:
            self.say(_first_line(verdict, step))
        if action.wait and not action.again:
            self._full = began
            self.say(f"the step is run again until there is room, for {PATIENCE:g} s at least")
        time.sleep(action.wait)  # nothing to wait on
        again = any(self._replaced[rank] for rank in action.ranks)
        if again and isinstance(self.cluster.backend, LocalBackend):
            found = check_node()  # of this machine
            self.say(f"{'' if found.sound else 'warning: '}this machine: {found.sentence()}")
            verdict = replace(verdict, details={**verdict.details, "node": found.as_dict()})
        self._lost.update(action.ranks if action.ranks else verdict.details.get("dead", ()))
        if action.evict:
            self.say(
                f"node {action.evict} is given up: its workers failed at {EVICTS} steps, and those of others did not"
            )
            self._evicted.update(action.ranks)
        role = str(verdict.details.get("key", "")).partition(".")[0]
        self._failed.add(role)
        self._doubtful |= not self._has_place(verdict, action, role)
        replaced: list[int] = []
        made: list[str] = []
        try:
            self._repair(replaced, made)
            self.prepare()
        except TilthError:
            self.directory.break_off(_record(verdict, action, step, replaced, made, began))
            raise
        self.recovery.end(time.monotonic())
        record = _record(verdict, action, step, replaced, made, began)
        self._begin_attempt(record)
        new = _named(sorted(self._new), verdict.ranks)
        self._new.clear()
        self._failed.clear()
        self._doubtful = False
        where = "from a checkpoint" if action.step == "rollback" else f"after step {step}"
        if not action.again:
            self.say(f"going on {where}, {new}, {record['seconds']:.1f} s later")

    def _repair(self, replaced: list[int], made: list[str]) -> None:
        """Replace the workers that are lost and make roles again. Adds the new workers to ``replaced``, the roles to
        ``made``."""
        failed = () if self._doubtful else self._failed
        replaced += self.cluster.repair(self._lost, SETTLE, self._evicted, failed)
        self._lost.clear()
        self._evicted.clear()
        self._new.update(replaced)
        self._replaced.update(replaced)
        for group in self._not_kept():
            self.cluster.make(group)
            made.append(group.role)

    def _has_place(self, verdict: Verdict, action: Action, role: str) -> bool:
        """Return True if the failure is one of a known role or worker, and says nothing about the state of others."""
        if action.step == "rollback" or verdict.kind in ("corruption", "not-finite"):
            return False
        known = any(group.role == role for group in self.cluster.groups)
        return known or bool(action.ranks) or verdict.kind == "storage"

    def _not_kept(self) -> list[WorkerGroup]:
        """Return the roles to make again: those that failed, that lost a worker or a process group, or that pass
        weights to one of these."""
        groups = self.cluster.groups
        if self._doubtful:
            return [group for group in groups if not _is_kept(group, self._new, self._failed)]
        broken = {
            rank for group in groups if group.role in self._failed and len(group.mesh) > 1 for rank in group.mesh.ranks
        }
        lost = [
            group
            for group in groups
            if group.role in self._failed
            or not self._new.isdisjoint(group.mesh.ranks)
            or (len(group.mesh) > 1 and not broken.isdisjoint(group.mesh.ranks))
        ]
        passes = [group for group in groups if group.role == WEIGHT_SYNC and group not in lost]
        specs = [ROLES.get(group.role) for group in lost]
        return lost + passes if any(spec is not None and spec.mesh != "one" for spec in specs) else lost

    def _begin_attempt(self, record: dict[str, Any]) -> None:
        """Record the recovery; events and metrics belong to the next attempt."""
        self.directory.recover(record)
        recorder.conclude()
        recorder.start(self.directory.events, self.cluster.rank, self.directory.attempt)
        self.trace()

    def note(self, death: Death) -> None:
        """Record that the run has survived the death of its former controller."""
        record = death.record()
        self.directory.survive(record)
        self.say(f"going on after step {death.step} with a new controller, {record['seconds']:.1f} s later")

    def trace(self) -> None:
        """Record the spans of the workers in this attempt."""
        planned = bool(self.parts.recipe.run.collect_every)
        self.cluster.trace(self.directory.events.resolve(), self.directory.attempt, planned)

    def remake(self) -> None:
        """Construct the roles with a state again: what they have loaded is not whole."""
        for group in self.cluster.groups:
            if not _is_kept(group, frozenset(), frozenset()):
                self.cluster.make(group)
        self.prepare()

    def prepare(self) -> None:
        """Prepare roles that were made: the processes of loaders, rewards and environments, and their output."""
        if (data := self.parts.recipe.data).loaders:
            follow_recorded(self.parts.roles["loader"], data, self.directory.path)
        reward = self.parts.roles.reward
        if reward is not None:
            reward.ready()
            reward.print_to(str(self.directory.path.resolve() / REWARD_LOG))
        rollout = self.parts.roles.rollout
        if rollout is not None and self.parts.recipe.rollout.environment:
            rollout.journal_to(str(self.directory.observations()))
            rollout.print_to(str(self.directory.path.resolve()))
        if rollout is not None and self.parts.recipe.rollout.partial:
            rollout.carry_in(str(self.directory.path.resolve() / PARTIAL))


def close(cluster: Cluster, directory: RunDir, step: int) -> list[str]:
    """End the workers after the last step; return the lines of ``Cluster.close``.

    One that has died, or stands still, since its last call is named and recorded: the run has ended by then.
    """
    try:
        return cluster.close()
    except (WorkerLost, CallTimeout) as error:
        verdict = verdict_of(error)
        assert verdict is not None
        verdict = with_cause(verdict)
        directory.say(_first_line(verdict, step))
        directory.say("nothing is lost with it: the run had come to its end")
        facts = {"step": step, **vars(verdict), "action": "none", "replaced": [], "made": [], "seconds": 0.0}
        directory.note_late(facts)
        return []


def _record(
    verdict: Verdict, action: Action, step: int, replaced: list[int], made: list[str], began: float
) -> dict[str, Any]:
    """Return the line of a recovery."""
    facts = {"step": step, **vars(verdict), "action": action.step}
    facts |= {"evicted": action.evict} if action.evict else {}
    return {**facts, "replaced": replaced, "made": made, "seconds": round(time.monotonic() - began, 3)}


def _named(new: Sequence[int], culprits: Collection[int]) -> str:
    """Return in words which workers are new. culprits: ranks that the verdict names, which may stay as they are."""
    if not new:
        return "with the same workers"
    said = f"worker {new[0]} is new" if len(new) == 1 else f"workers {', '.join(map(str, new))} are new"
    held = culprits and not set(new) & set(culprits)
    return f"{said} (held up in a call with {', '.join(map(str, sorted(culprits)))})" if held else said


def _first_line(verdict: Verdict, step: int) -> str:
    first = verdict.evidence.partition("\n")[0]
    return f"after step {step}: {verdict.kind}: {first}"


def unchanged(group: WorkerGroup, step: int) -> bool:
    """Return True if a role still has the state that it had after this step."""
    return group.marked == step and not group.changed_by


def is_new(group: WorkerGroup) -> bool:
    """Return True if a role has the state that it was made with."""
    return group.marked is None and not group.changed_by


def _is_kept(group: WorkerGroup, replaced: AbstractSet[int], failed: AbstractSet[str]) -> bool:
    """Return True for a role that a failure elsewhere leaves as it is: on one worker, without collectives or state."""
    spec = ROLES.get(group.role)
    alone = spec is not None and spec.mesh == "one" and not spec.trains
    return alone and group.role not in failed and replaced.isdisjoint(group.mesh.ranks)
