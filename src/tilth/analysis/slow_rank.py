"""A slow rank of a running job, and what it costs: the seconds of each step that it alone adds.

The question is ``run_replay``'s, with the peers as the measure: how long would the step take if the work of this rank
took the mean time of the other ranks that share its calls? (The ideal of the straggler study, the mean with the slow
rank in it, finds 3/4 of the loss among four.) Ranks are compared within a stage of the pipeline.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.recent import recent
from tilth.analysis.run_graph import LAUNCH, WORK, read_steps
from tilth.analysis.run_replay import CACHE, RunModel, even, numbered
from tilth.analysis.run_whatif import coordinates, place_among
from tilth.core.errors import DataError
from tilth.flows.callbacks import Callback, RunView
from tilth.guard.verdict import Verdict

SHARE = 0.1
"""Share of a step that a rank must cost: uneven work costs a few percent."""
FEWEST, MOST = 8, 40
"""Steps that a verdict needs, and looks at."""
EVERY = 60.0
"""Seconds between two looks; and 50 times what a look takes, so that it costs no more than 2 % of a core."""
EVENTS = 400_000
"""Most events of a look."""
TRIED = 16
"""Most ranks of a look whose work is replaced by that of their peers."""


def gains(model: RunModel, most: int = TRIED) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ranks, int64 [r], and for each step the seconds that it would be shorter if the work of one rank took the
    time of its peers, float64 [s, r], and the ratio of its work to theirs, float64 [r].

    most: ranks to try; of more, those whose work takes most longer than that of their peers in the median of the steps.
    """
    workers = model.steps.workers
    nodes, peers = _of_peers(model)
    took, own = model.sum_real[nodes], np.searchsorted(workers, model.rank[nodes])
    tried = np.arange(len(workers))
    if len(workers) > most:  # a replay of each would be quadratic in the ranks
        step = np.searchsorted(model.steps.steps, model.steps.events.step[model.steps.frame[model.order[nodes]]])
        over = np.bincount(step * len(workers) + own, took - peers, len(model.steps.steps) * len(workers))
        tried = np.sort(np.argsort(-np.median(over.reshape(-1, len(workers)), axis=0), kind="stable")[:most])
    ratios = np.bincount(own, took, len(workers)) / np.maximum(np.bincount(own, peers, len(workers)), 1e-12)
    recorded = model.times(model.sum_real[:, None])
    width = max(1, CACHE // 4 // (8 * len(model.order)))  # a replay has some arrays of a block's size
    gained = list[np.ndarray]()
    for i in range(0, len(tried), width):
        durations = np.repeat(model.sum_real[:, None], len(tried[i : i + width]), axis=1)
        for column, worker in enumerate(tried[i : i + width]):
            mine = own == worker
            durations[nodes[mine], column] = peers[mine]
        gained.append(recorded - model.times(durations))
    return workers[tried], np.concatenate(gained, axis=1), ratios[tried]


def _of_peers(model: RunModel) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes of work, int64 [m], and the seconds that the peers of their ranks take, float64 [m]."""
    steps, order = model.steps, model.order
    call, segment = steps.call[order], steps.segment[order]
    stages = place_among(coordinates(steps), "layers")
    nodes = np.flatnonzero(~model.home & ((model.kind == WORK) | (model.kind == LAUNCH)))
    ranks, of = np.unique(model.rank[nodes], return_inverse=True)
    stage = np.array([stages[rank] for rank in ranks.tolist()], np.int64)[of]
    took, peers = model.sum_real[nodes], np.empty(len(nodes))
    whole = numbered(np.stack([call[nodes], stage]))
    member = numbered(np.stack([whole, model.rank[nodes]]))
    alike = even(whole, member)
    peers[alike] = _others(numbered(np.stack([whole[alike], segment[nodes[alike]]])), took[alike])
    if not alike.all():  # groups differ, and so do segments: all of a call is scaled
        first, mine = np.unique(member[~alike], return_index=True, return_inverse=True)[1:]
        total = np.bincount(mine, took[~alike])
        ratio = np.divide(_others(whole[~alike][first], total), total, out=np.ones_like(total), where=total > 0)
        peers[~alike] = took[~alike] * ratio[mine]
    return nodes, peers


def _others(which: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean of the other values of each group; a value without others stays."""
    count, total = np.bincount(which)[which], np.bincount(which, values)[which]
    return np.where(count > 1, (total - values) / np.maximum(count - 1, 1), values)


def slow_rank(run: str | Path, since: int = -1) -> tuple[Verdict | None, int]:
    """Return the verdict on the newest steps of a run after step ``since``, and the last of them; -1 if there are too
    few. Raises DataError for a trace that cannot be read."""
    events, known = recent(run, MOST)
    if events is None:
        return None, -1
    return slow_in(events, range(max(known.start, since + 1, known.stop - MOST), known.stop))


def slow_in(events: Events, steps: range) -> tuple[Verdict | None, int]:
    """Return the verdict on some steps, and the last of them; -1 if they or their workers are too few. DataError."""
    if len(steps) < FEWEST or len(events.workers) < 2:
        return None, -1
    model = RunModel(read_steps(events, steps, EVENTS))
    if len(model.steps.steps) < FEWEST or len(model.steps.workers) < 2:
        return None, -1
    ranks, gained, ratios = gains(model)
    return judged(model.steps.steps, model.steps.recorded, ranks, gained, ratios), steps.stop - 1


def judged(
    steps: np.ndarray, seconds: np.ndarray, ranks: np.ndarray, gained: np.ndarray, ratios: Sequence[float] | np.ndarray
) -> Verdict | None:
    """Return the verdict on the rank that costs most. seconds: of each step, [s]; gained: [s, w].

    It costs SHARE of a step or more in the median, and half of that in three of four steps: a long evaluation, a
    checkpoint or a first step are few, and uneven rows slow another rank in each step.
    """
    cost = np.median(gained, axis=0)
    worst = int(cost.argmax())
    lost, usual = float(cost[worst]), float(np.median(seconds))
    if lost < SHARE * usual or np.quantile(gained[:, worst], 0.25) < lost / 2:
        return None
    evidence = (
        f"rank {ranks[worst]} costs {lost:.3g} s of each step of {usual:.3g} s ({lost / usual:.0%}): its work takes "
        f"{ratios[worst]:.2f} times that of its peers, in steps {steps[0]} to {steps[-1]}"
    )
    details = {"seconds": lost, "step": usual, "ratio": float(ratios[worst]), "steps": [int(steps[0]), int(steps[-1])]}
    return Verdict("slow", (int(ranks[worst]),), evidence, details)


class SlowRankWatch(Callback):
    """Looks at the newest steps of its run now and then, in a thread; warns of a rank that two looks in a row name."""

    def __init__(self, every: float = EVERY) -> None:
        self._every = every
        self._due = 0.0
        self._thread: threading.Thread | None = None
        self._found: SimpleQueue[tuple[Verdict | None, int]] = SimpleQueue()
        self._seen, self._named, self._told = -1, -1, -1
        """Last step that was looked at; rank that the newest look named, and that was warned of."""

    def on_run_start(self, run: RunView) -> None:
        """Begin with steps after the last committed one."""
        self._seen, self._due = run.state.step, time.monotonic() + self._every

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Warn of what was found, and look again when it is time."""
        while not self._found.empty():
            if new := self.take(*self._found.get()):
                run.say(f"warning: slow: {new.evidence}")
                run.directory.note_finding({"step": step, **vars(new)})
        busy = self._thread is not None and self._thread.is_alive()
        if not busy and time.monotonic() >= self._due:
            self._thread = threading.Thread(
                target=self._look, args=(run.directory.path, self._seen), name="slow-rank", daemon=True
            )
            self._thread.start()

    def on_run_end(self, run: RunView, summary: dict[str, Any]) -> None:
        """Let a look end."""
        if self._thread is not None:
            self._thread.join()

    def take(self, verdict: Verdict | None, last: int) -> Verdict | None:
        """Return the verdict of a look if it is to be told: the second in a row, and not told yet. last: its last step;
        -1: it saw too few."""
        if last < 0:
            return None
        self._seen = last
        rank = verdict.ranks[0] if verdict is not None else -1
        again, self._named = rank >= 0 and rank == self._named, rank
        if rank != self._told:
            self._told = rank if again else -1
            return verdict if again else None
        return None

    def _look(self, run: Path, since: int) -> None:
        began = time.monotonic()
        try:
            self._found.put(slow_rank(run, since))
        except DataError:  # a file came or went meanwhile: the next look reads them
            self._found.put((None, -1))
        self._due = time.monotonic() + max(self._every, 50 * (time.monotonic() - began))
