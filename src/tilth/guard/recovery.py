"""Recovery from failures: run the step again, replace workers, or end the run.

``Recovery`` is a pure state machine over verdicts; ``launch.survive`` carries out what it decides. It changes as little
as it can (ByteRobust, arXiv 2509.16293, section 5): a failure that names no worker is tried again with the same ones, a
worker that is dead or hangs is replaced, and what happens again at the same step ends the run, since neither would
help, whichever workers it takes: a sample may end one after the other. Workers that end at once, before the first of
them is replaced, are one failure. A user's error never replaces a worker.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from tilth.core.errors import (
    CallTimeout,
    LogprobMismatch,
    NonFiniteError,
    ReplicaMismatch,
    StaleGeneration,
    StorageError,
    TilthError,
    TokenCountError,
    TokenIdentityError,
    WeightMismatch,
    WorkerError,
    WorkerLost,
)
from tilth.core.write_queue import LATEST, PATIENCE
from tilth.guard.verdict import Kind, Verdict
from tilth.process.child import MEMORY_RAN_OUT
from tilth.process.restarts import RestartPolicy

CAUSES: Sequence[tuple[type[TilthError], Kind]] = (
    (WorkerLost, "crash"), (CallTimeout, "hang"), (NonFiniteError, "not-finite"), (WeightMismatch, "corruption"),
    (ReplicaMismatch, "corruption"), (LogprobMismatch, "corruption"), (TokenIdentityError, "corruption"),
    (TokenCountError, "corruption"), (StorageError, "storage"), (WorkerError, "error"), (StaleGeneration, "error"),
)  # fmt: skip
"""Class of an error that a run can survive -> kind of its verdict. All other errors are the same again when the step
runs again: a user's, a bug's, exhausted memory that a worker itself reports."""
TWICE, THRICE = RestartPolicy(attempts=2), RestartPolicy(attempts=3)
REPEATED: Sequence[Kind] = ("crash", "hang", "out-of-memory", "corruption", "files")
RESTARTS: Mapping[Kind, RestartPolicy] = dict.fromkeys(REPEATED, THRICE)
"""Restarts of one step after failures of one cause, by their kind. Others: ``TWICE``."""
AT_ONCE: Sequence[Kind] = ("crash", "out-of-memory")
"""Kinds of which several workers may fail at once, each with an error of its own."""
ROOM = RestartPolicy(attempts=4, backoff=0.5, latest=LATEST)
"""Restarts of a step without room; at the last attempt the workers that fail are replaced, and no run ends before
``PATIENCE`` seconds have passed."""
WINDOW = 3600.0
"""Seconds in which ``guard.restarts`` recoveries may happen."""

GATED = ("loss", "grad_norm")
"""Keys of the error of an optimizer step that is not finite (``guard.on_nan``)."""
UNGATED = ("logits", "snapshot")
"""Keys of errors of weights that are not finite although every step was: the step before has others."""
ROLLBACKS = 2
"""Times that a run goes back to a checkpoint because of such errors."""

EVICTS = 3
"""Steps at which workers of one node crash or hang, within an hour, before the node is evicted."""

Step = Literal["retry", "replace", "rollback", "stop"]
OnNan = Literal["skip", "rollback", "stop"]


def verdict_of(error: BaseException) -> Verdict | None:
    """Return the verdict on an error of a run; None for one that no recovery can help."""
    for kind, name in CAUSES:
        if isinstance(error, kind):
            assert isinstance(error, TilthError)
            evidence = str(error)
            name = "out-of-memory" if name == "crash" and MEMORY_RAN_OUT in evidence else name
            return Verdict(name, error.ranks, evidence, {"key": error.key, "error": type(error).__name__})
    return None


@dataclass(frozen=True)
class Action:
    """Decision about one failure. ranks: workers to replace; why: what ends the run; evict: the node of these workers,
    which is not used again; wait: seconds before anything is done; again: it goes on trying what it tried before."""

    step: Step
    ranks: tuple[int, ...] = ()
    why: str = ""
    evict: str = ""
    wait: float = 0.0
    again: bool = False


@dataclass(frozen=True)
class Nodes:
    """Places of workers. movable: nodes whose workers find a place on others."""

    of: Mapping[int, str] = field(default_factory=dict)
    """Rank -> node."""
    movable: Collection[str] = ()

    def blamed(self, verdict: Verdict) -> str:
        """Return the node that all workers at fault are on, if they crashed or hang; "" otherwise.

        No error of a program, nor memory that it exhausts, says anything about a node.
        """
        found = {self.of.get(rank, "") for rank in verdict.ranks}
        return found.pop() if verdict.kind in ("crash", "hang") and len(found) == 1 else ""


NOWHERE = Nodes()


@dataclass
class _Past:
    """A failure. ended: when the run was whole again, its workers replaced."""

    at: float
    step: int
    verdict: Verdict
    node: str
    ended: float = math.inf


@dataclass
class Recovery:
    """History of a run's failures. restarts: most recoveries within an hour; 0: the first failure ends the run.

    on_nan: as ``guard.on_nan``.
    """

    restarts: int
    on_nan: OnNan = "skip"
    _past: list[_Past] = field(default_factory=list)

    def decide(self, verdict: Verdict | None, step: int, now: float, nodes: Nodes = NOWHERE) -> Action:
        """Return what to do about a failure of this step, and remember it. now: when it was noticed, in seconds of a
        clock that only grows; whoever carries the action out calls ``end``."""
        if verdict is None:
            return Action("stop", why="it would be the same again")
        if not self.restarts:
            return Action("stop", why="guard.restarts=0")
        if verdict.kind == "storage":
            return self._await_room(_Past(now, step, verdict, ""))
        gated = verdict.kind == "not-finite" and verdict.details.get("key") not in UNGATED
        if gated and (why := self._refuse_rollback(verdict)):
            return Action("stop", why=why)
        alike = [past for past in self._past if past.step == step and _same_cause(past.verdict, verdict)]
        recent = [past for past in self._past if now - past.at < WINDOW and past.verdict.kind != "storage"]
        corrupt = verdict.kind == "corruption" and any(past.verdict.kind == "corruption" for past in self._past)
        here = _Past(now, step, verdict, nodes.blamed(verdict))
        self._past.append(here)
        if not gated and not RESTARTS.get(verdict.kind, TWICE).again(times := _times([*alike, here])):
            return Action("stop", why=f"it has happened {times} times at this step")
        if len(recent) >= self.restarts:
            return Action("stop", why=f"there were {len(recent)} recoveries within an hour (guard.restarts)")
        if here.node in nodes.movable and _suspect([*recent, here]) == here.node:
            return Action("replace", tuple(r for r, node in nodes.of.items() if node == here.node), evict=here.node)
        if verdict.kind in ("crash", "hang", "out-of-memory", "files") and verdict.ranks:
            return Action("replace", verdict.ranks)
        if corrupt and verdict.ranks:  # the first time may be chance
            return Action("replace", verdict.ranks)
        return Action("rollback" if gated else "retry")

    def end(self, now: float, ranks: tuple[int, ...] | None = None) -> None:
        """Note when a recovery ended. ranks: the workers that were replaced, while others went on; None: the run has
        recovered from all that had failed."""
        for past in self._past:
            if past.ended == math.inf and ranks in (None, past.verdict.ranks):
                past.ended = now

    def _await_room(self, here: _Past) -> Action:
        """Run a step again until its disk, or its shared memory, takes what it writes, for ``PATIENCE`` seconds. What
        one process alone cannot write, as over a limit of its own, another one may: once, workers are replaced."""

        def goes_on(past: _Past) -> bool:
            return (past.step, past.verdict.kind) == (here.step, here.verdict.kind)

        tried = list(takewhile(goes_on, reversed(self._past)))
        begun = len(tried) + 1
        self._past.append(here)
        since = here.at - tried[-1].at if tried else 0.0
        if since >= PATIENCE and not ROOM.again(begun):
            return Action("stop", why=f"the step was run again for {since:.0f} s, {len(tried)} times")
        step: Step = "replace" if here.verdict.ranks and begun == ROOM.attempts else "retry"
        ranks = here.verdict.ranks if step == "replace" else ()
        return Action(step, ranks, wait=ROOM.pause(begun), again=bool(tried))

    def _refuse_rollback(self, verdict: Verdict) -> str:
        """Return why a step that is not finite ends the run, or ""."""
        if self.on_nan == "stop":
            return 'guard.on_nan = "stop"'
        if verdict.details.get("key") not in GATED:
            return "the weights that training began with are not finite"
        verdicts = [past.verdict for past in self._past]
        times = sum(v.kind == "not-finite" and v.details.get("key") in GATED for v in verdicts)
        return f"the run has gone back to a checkpoint {times} times" if times >= ROLLBACKS else ""


def _suspect(failures: Sequence[_Past]) -> str:
    """Return the one node with failures at ``EVICTS`` steps, if no other has them at more than one; else "".

    What fails again at one step is in the program or its data; what fails on many nodes is not theirs either.
    """
    steps = Counter(node for node, _ in {(past.node, past.step) for past in failures if past.node})
    first, *others = [*steps.most_common(2), ("", 0)]
    return first[0] if first[1] >= EVICTS and others[0][1] <= 1 else ""


def _same_cause(one: Verdict, other: Verdict) -> bool:
    """Return True if two failures look like one: of a kind, and at the same place where they have one."""
    return one.kind == other.kind and one.details.get("key") == other.details.get("key")


def _times(alike: Sequence[_Past]) -> int:
    """Return how often failures that look like one have happened: once for workers that ended at once, each by itself,
    before the first of them was replaced."""
    times, ranks, until = 0, set[int](), -math.inf
    for past in sorted(alike, key=lambda past: past.at):
        own = past.verdict.ranks
        if past.verdict.kind not in AT_ONCE or past.at >= until or not ranks.isdisjoint(own) or not own:
            times, ranks, until = times + 1, set(), math.inf
        ranks.update(own)
        until = min(until, past.ended) if own else -math.inf  # without ranks it may be anybody's
    return times
