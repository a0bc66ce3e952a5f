"""State of the controller between two steps: phase, position, sets of ids."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilth.config.flows import FLOWS


class Intervals(list[tuple[int, int]]):
    """A set of integers as sorted pairs [start, stop) without neighbours that touch; as a list it is plain JSON.

    A look-up takes O(log n) of n pairs.
    """

    def __init__(self, pairs: Iterable[Sequence[int]] = ()) -> None:
        """pairs: [start, stop) in any order, also such that overlap."""
        super().__init__()
        for start, stop in pairs:
            self.add(start, stop)

    def add(self, start: int, stop: int | None = None) -> None:
        """Add the ids of [start, stop); stop: default ``start + 1``."""
        stop = start + 1 if stop is None else stop
        if start >= stop:
            return
        first, last = self._first_at(start), bisect_right(self, stop, key=_start)
        if first < last:
            start, stop = min(start, self[first][0]), max(stop, self[last - 1][1])
        self[first:last] = [(start, stop)]

    def _first_at(self, place: int) -> int:
        """Return the index of the first pair that contains this place, ends there, or comes after it."""
        before = bisect_right(self, place, key=_start)
        return before - 1 if before and self[before - 1][1] >= place else before

    def __contains__(self, id: Any) -> bool:
        """Return True if an id is in the set."""
        before = bisect_right(self, id, key=_start)
        return before > 0 and id < self[before - 1][1]


def _start(pair: tuple[int, int]) -> int:
    return pair[0]


@dataclass
class RunState:
    """Everything that a checkpoint holds for the controller; tensors are the workers' part."""

    step: int = 0
    phase: str = ""
    phase_step: int = 0
    finished: list[str] = field(default_factory=list)
    optimizer_steps: int = 0
    version: int = 0
    accuracy_first: float | None = None
    accuracy_last: float | None = None
    """Accuracy, or the mean reward if ``graded``, at the newest evaluation."""
    heldout: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation."""
    outcomes: dict[str, float] = field(default_factory=dict)
    """Index of a held-out prompt -> outcome of its answer at the newest evaluation."""
    outcomes_first: dict[str, float] = field(default_factory=dict)
    """``outcomes`` where the phase began; empty if that was not measured, or on other data."""
    graded: bool = False
    """True once some outcome was neither right (1) nor wrong (0), so that no mean is an accuracy."""
    best: dict[str, Any] | None = None
    """Best evaluation so far: step, metric, value."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Position in each stream: prompts, examples, documents or pairs; and in samples, which number trajectories."""
    carried: list[tuple[int, int, int]] = field(default_factory=list)
    """(id, group, prompt) of samples that the next step goes on with (``rollout.partial``)."""
    flying: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(first id, samples, prompt, version) of groups that are begun, and neither consumed nor dropped
    (``rollout.staleness``)."""
    versions: list[int] = field(default_factory=list)
    """Versions of the policy after each of the newest steps, from the oldest that drew tokens of these."""
    admitted: Intervals = field(default_factory=Intervals)
    """Ids of samples that were begun under ``rollout.staleness``; each is in ``consumed`` or ``dropped`` or flying."""
    ended: Intervals = field(default_factory=Intervals)
    """Those whose groups have ended."""
    consumed: Intervals = field(default_factory=Intervals)
    """Those that a step has learned from."""
    dropped: Intervals = field(default_factory=Intervals)
    """Those that were dropped, each with a reason."""
    event: int = 0
    """Number of the last event of these steps in the log (``runs.events``)."""
    flat: dict[str, float] = field(default_factory=dict)
    """Consecutive steps without a learning signal (``step_log.counted``)."""
    aligned: list[str] = field(default_factory=list)
    """Teachers with other tokens that have been asked."""
    weights: dict[str, float] = field(default_factory=dict)
    """Key of [algorithm] -> current value of an adapted weight, with what its adaptation depends on."""
    more_samples: int = 0
    """Samples of the phase's steps beyond the recipe's batch for each (``guard.batch``)."""
    ranks: int = 0
    """Ranks that divide a batch where the run began, which the recipe's batch is for; 0: batches do not change."""

    def __post_init__(self) -> None:
        """Read the sets of ids, which JSON holds as lists."""
        for name in ("admitted", "ended", "consumed", "dropped"):
            setattr(self, name, Intervals(getattr(self, name)))


# ---- phases: an optional warm-up, a stretch in which the critic learns alone, and the flow itself ----

WARMUP = "warmup"
VALUES = "values"
"""The phase in which the critic alone learns, before that of a flow with a critic."""


def is_supervised(phase: str) -> bool:
    """True for a phase that learns from given data: a supervised flow, or the warm-up of another flow."""
    return phase == WARMUP or (phase in FLOWS and not FLOWS[phase].samples)
