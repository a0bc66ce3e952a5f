"""Replay a run with any times set to ideal, many scenarios at once, on the graph of ``run_graph``.

The ideal is the time of peers. Work of a call: the mean over the ranks that share it, by segment and operation. A
communication: the typical transfer of its kind (operation, group, size) while the run is fast. A pause: 0. Work without
peers (the controller's, waiting for a checkpoint, storage) keeps its time.
"""

from functools import cached_property

import numpy as np

from tilth.analysis.network import meetings
from tilth.analysis.replay import schedule
from tilth.analysis.run_graph import AWAIT, LAUNCH, MEET, WORK, Steps

BLOCK = 10
"""Steps over which a typical value is taken: a fault may come and go."""
FAST = 0.25
"""Quantile over blocks of steps that stands for a healthy network: if a fault lasts for half of the run, the median
without it."""
OWN = frozenset({"wait", "storage"})
"""Kinds of operations without peers."""
CACHE = 32_000_000
"""Bytes of one array of a replay."""


class RunModel:
    """Steps ready for replay: n nodes in the order of the schedule, k operations, s steps."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.schedule = schedule(steps.graph)
        order = self.schedule.order
        self.order = order
        self.place = np.empty(len(order), np.int64)
        self.place[order] = np.arange(len(order))
        self.last = self.place[steps.last]
        self.real = steps.real[order]  # float64 [n, k]: seconds
        self.rank, self.kind, self.home = steps.rank[order], steps.kind[order], steps.home[order]
        self.sum_real = self.real.sum(1)

    @cached_property
    def ideal(self) -> np.ndarray:
        """float64 [n, k]: ideal seconds, as the module says."""
        return ideal(self.steps)[self.order]

    @cached_property
    def sum_ideal(self) -> np.ndarray:
        """float64 [n]."""
        return self.ideal.sum(1)

    def times(self, durations: np.ndarray) -> np.ndarray:
        """float64 [s, x]: time of each step in each of x scenarios. durations: float64 [n, x], seconds."""
        width = max(1, CACHE // (8 * len(durations)))
        blocks = [durations[:, i : i + width, None] for i in range(0, durations.shape[1], width)]
        return np.concatenate([self.schedule.run(block)[self.last, :, 0] for block in blocks], axis=1)

    def seconds(self, keep: np.ndarray) -> np.ndarray:
        """float64 [s]: time of each step with ``keep``, bool [n, 1] or [1, k], as recorded and all others ideal."""
        return self.times(np.where(keep, self.real, self.ideal).sum(1)[:, None])[:, 0]

    def usual_delays(self) -> np.ndarray:
        """float64 [s]: times with the median delay of its kind (calls or awaits of one name) for each dispatch.

        With the recorded delays any model replays the recorded time; the straggler study too measures its error on
        replays without delays of launch (arXiv 2505.05713, section 3).
        """
        steps, seconds = self.steps, self.sum_real.copy()
        nodes = np.flatnonzero(np.isin(self.kind, (LAUNCH, AWAIT)))
        kind, of = self.kind[nodes], self.order[nodes]
        rows = np.where(kind == AWAIT, steps.row[of], steps.frame[of])
        which = numbered(np.stack([kind, steps.events.detail.codes[rows]]))
        seconds[nodes] = quantiles(which, seconds[nodes], 0.5)[which]
        return self.times(seconds[:, None])[:, 0]


def ideal(steps: Steps) -> np.ndarray:
    """float64 [n, k]: ideal seconds of each node."""
    result = steps.real.copy()
    _share(steps, result)
    _fast(steps, result)
    result[:, [i for i, kind in enumerate(steps.kinds) if kind == "pause"]] = 0.0
    alone = [i for i, kind in enumerate(steps.kinds) if kind in OWN]
    result[:, alone] = steps.real[:, alone]
    return result


def _share(steps: Steps, result: np.ndarray) -> None:
    """Set segments and launches of one call to the mean over its ranks. If the ranks differ in their number of segments
    (their groups differ), scale each rank's to the mean of the sums."""
    nodes = np.flatnonzero(~steps.home & ((steps.kind == WORK) | (steps.kind == LAUNCH)))
    if not len(nodes):
        return
    alike = even(numbered(steps.call[nodes][None]), steps.frame[nodes])
    _mean(steps, result, nodes[alike], np.stack([steps.call, steps.segment])[:, nodes[alike]])
    odd = nodes[~alike]
    if len(odd):
        _scaled(steps, result, odd)


def even(group: np.ndarray, member: np.ndarray) -> np.ndarray:
    """bool [m]: True for the nodes of a group in which each member has equally many.

    group, member: int64 [m], numbers from 0 on of each node's group and of its member of the group.
    """
    first, size = np.unique(member, return_index=True, return_counts=True)[1:]
    low = np.full(int(group.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    high = np.zeros_like(low)
    np.minimum.at(low, group[first], size)
    np.maximum.at(high, group[first], size)
    return (low == high)[group]


def _mean(steps: Steps, result: np.ndarray, nodes: np.ndarray, key: np.ndarray) -> None:
    which = numbered(key)
    count = np.bincount(which)
    for column in range(result.shape[1]):
        total = np.bincount(which, steps.real[nodes, column])
        result[nodes, column] = (total / count)[which]


def _scaled(steps: Steps, result: np.ndarray, nodes: np.ndarray) -> None:
    frames, frame = np.unique(steps.frame[nodes], return_inverse=True)
    call = np.unique(steps.events.seq[frames], return_inverse=True)[1]
    ranks = np.bincount(call)
    for column in range(result.shape[1]):
        mine = np.bincount(frame, steps.real[nodes, column], len(frames))
        mean = (np.bincount(call, mine) / ranks)[call]
        scale = np.divide(mean, mine, out=np.ones_like(mean), where=mine > 0)
        result[nodes, column] = steps.real[nodes, column] * scale[frame]


def _fast(steps: Steps, result: np.ndarray) -> None:
    """Set transfers to those of the healthy network."""
    nodes = np.flatnonzero(steps.kind == MEET)
    if not len(nodes):
        return
    usual = fast(steps)
    result[nodes, steps.meet_column[nodes]] = usual[steps.row[nodes]] * 1e-9
    waits = steps.kind == AWAIT
    result[waits] = steps.real[waits]


def fast(steps: Steps) -> np.ndarray:
    """float64 [rows of the events]: ns of a transfer of each communication's kind on the healthy network.

    The lower quartile of the medians of each ``BLOCK`` steps of the run. 0 outside of the steps.
    """
    events, met, known = steps.events, meetings(steps.events), np.array(steps.events.steps)
    inside = np.isin(events.step[met.rows], known)
    rows, transfer = met.rows[inside], met.transfer[inside]
    kind = alike(steps, rows)
    block = numbered(np.stack([kind, np.searchsorted(known, events.step[rows]) // BLOCK]))
    of = np.zeros(int(block.max(initial=-1)) + 1, np.int64)
    of[block] = kind
    result = np.zeros(len(events))
    result[rows] = quantiles(of, quantiles(block, transfer, 0.5), FAST)[kind]
    return result


def alike(steps: Steps, rows: np.ndarray) -> np.ndarray:
    """int64: number of each communication's kind: operation, group and size (by powers of 2)."""
    events = steps.events
    size = np.floor(np.log2(np.maximum(events.bytes[rows], 1))).astype(np.int64)
    return numbered(np.stack([events.op.codes[rows], events.detail.codes[rows], size]))


def quantiles(which: np.ndarray, values: np.ndarray, q: float) -> np.ndarray:
    """float64 [groups]: the quantile (the value at or below it) of each group. which: int64 [m], from 0 on."""
    order = np.lexsort((values, which))
    count = np.bincount(which)
    first = np.cumsum(count) - count
    return values[order][first + np.floor(q * (count - 1)).astype(np.int64)].astype(np.float64)


def numbered(key: np.ndarray) -> np.ndarray:
    """int64 [m]: a number from 0 on for each different column of ``key``, int64 [parts, m], all at least -1."""
    code = np.zeros(key.shape[1], np.int64)
    for part in key:
        code = _dense(code * (int(part.max(initial=-1)) + 2) + part + 1)
    return code


def _dense(code: np.ndarray) -> np.ndarray:
    """Indices among the numbers that occur; without a sort where these lie close."""
    span = int(code.max(initial=0)) + 1
    if span > 8 * len(code) + 1000:
        return np.unique(code, return_inverse=True)[1].reshape(-1)
    there = np.zeros(span, bool)
    there[code] = True
    return (np.cumsum(there) - 1)[code]
