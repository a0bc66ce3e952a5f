"""Schedule of a global batch over ranks: which sequences run together, on how many ranks each, and in which order.

A sequence longer than the capacity of a rank is a gang: several ranks share its tokens. Shorter ones are packed and
stay on one rank. Algorithms 1 (naive) and 2 (balance scheduler) of ByteScale, arXiv 2502.21231, with three choices
that the paper leaves open: a gang has more ranks than it needs where it would outlast the mean load, gangs take
consecutive ranks where that starts them no later, and short sequences fill the time that a member waits for its gang.
"""

import heapq
import math
from collections.abc import Callable
from itertools import chain, product
from typing import Literal, NamedTuple

import numpy as np

from tilth.core.errors import PlanError
from tilth.plan.offload import OffloadLimits, fewest_ranks, ratios
from tilth.plan.packing import Numbers, micro_batches

Balance = Literal["tokens", "cost", "none"]
WIDER = (1, 2, 4, 8, 16)
"""Divisors of the mean load that gangs are widened to, in this order, until the ranks are even."""
CHOICES = 64
"""Most widths of all gangs together that are tried one by one, and most sequences of a batch for which they are."""
WORTH = 0.9
"""Share of the time of narrower gangs in which wider ones, which send more, must end."""
CUTS = 4
"""Divisions of packs over pipelines, each with the fill times that the one before found."""


class Unit(NamedTuple):
    """Sequences that one rank, or several in a ring, compute as one micro-batch."""

    rows: np.ndarray
    """int64, ascending indices into the global batch, packed together."""
    ranks: tuple[int, ...]
    """Ascending indices along the axis "hdp"; their order is that of the ring."""
    cost: float
    """Predicted cost of each member."""
    offload: float = 0.0
    """Share of the activations' rows that move to the host."""


Rounds = list[list[Unit]]
"""Units in the one order that all ranks follow. In a round a rank has at most one unit, and may have none."""


class _Batch(NamedTuple):
    """Columns of the global batch and limits of a rank."""

    lengths: np.ndarray
    weights: np.ndarray
    """Cost of each sequence, float64 [n]."""
    least: np.ndarray
    """Fewest ranks that hold each sequence, int64 [n]."""
    capacity: int
    ranks: int
    offload: OffloadLimits | None
    ring: float
    """Cost of passing a token's keys and values around, beside which a member computes."""

    def widths(self, rows: np.ndarray, load: float) -> np.ndarray:
        """Return the ranks of gangs so that each lasts no longer than ``load``, if neither its ring does: int64 [n]."""
        least, costs = self.least[rows], self.weights[rows]
        shortest = np.maximum(self.ring * self.lengths[rows], load)
        wanted = np.divide(costs, shortest, out=np.zeros(len(rows)), where=shortest > 0)
        return np.clip(np.ceil(wanted - 1e-9).astype(np.int64), least, self.ranks)

    def longest(self, rows: np.ndarray) -> float:
        """Return the least cost of a member of the longest gang: on all ranks, or as its ring takes."""
        passed = self.ring * self.lengths[rows]
        return float(np.maximum(self.weights[rows] / self.ranks, passed).max(initial=0))

    def unit(self, rows: np.ndarray, ranks: np.ndarray) -> Unit:
        """Make the unit of these rows on these ranks."""
        moved = 0.0
        if self.offload is not None and self.lengths[rows[0]] > self.capacity:
            moved = float(ratios(self.lengths[rows], len(ranks), self.capacity, self.offload)[0])
        own = float(self.weights[rows].sum()) / len(ranks)
        passed = self.ring * float(self.lengths[rows].sum()) if len(ranks) > 1 else 0.0
        return Unit(rows, tuple(ranks.tolist()), max(own, passed), moved)

    def packs(self, rows: np.ndarray) -> list[np.ndarray]:
        """Pack rows of one rank into micro-batches."""
        if self.lengths[rows].sum() <= self.capacity:
            return [np.sort(rows)]
        return [np.sort(rows[found]) for found in micro_batches(self.lengths[rows], self.capacity)]


class _Gangs(NamedTuple):
    """Gangs on their ranks, in the order in which they run."""

    units: list[Unit]
    starts: list[float]
    loads: np.ndarray
    """Time at which each rank has finished, float64 [ranks]."""
    gaps: list[tuple[float, float, int]]
    """(seconds, start, rank) of the time that members wait for their gang."""


def schedule(
    lengths: Numbers,
    capacity: int,
    ranks: int,
    costs: Callable[[np.ndarray], np.ndarray],
    *,
    balance: Balance = "tokens",
    tolerance: float = 0.02,
    stages: int = 1,
    offload: OffloadLimits | None = None,
    ring: float = 0.0,
) -> Rounds:
    """Schedule sequences on ``ranks`` ranks, each with at most ``capacity`` tokens in a micro-batch.

    balance: "tokens" or "cost" (of ``costs``) makes the loads of ranks even, whatever the order of ``lengths``; "none"
    takes the sequences in their order (algorithm 1). tolerance: loads that differ by less than this share of the mean
    count as equal. stages: of a pipeline on each rank, which then has packs of one level of lengths. A gang has the
    same index among the micro-batches of all its members if a rank counts each round before its last gang, as a
    pipeline must. ring: cost of passing the keys and values of one token around a gang, beside which its members
    compute; it limits their number. Without pipelines the loads of two ranks differ by at most the tolerance and the
    largest unit.

    Raises PlanError for a sequence longer than all ranks hold, and for a cost that is no number, infinite or negative.
    """
    sizes = np.asarray(lengths, np.int64)
    weights = sizes.astype(np.float64) if balance == "tokens" else np.asarray(costs(sizes), np.float64)
    if not (weights >= 0).all() or np.isinf(weights).any():
        worst = int(np.argmin(np.isfinite(weights) & (weights >= 0)))
        message = f"a sequence of {sizes[worst]} tokens costs {weights[worst]}; costs are finite and not negative"
        raise PlanError(message, key="costs")
    batch = _Batch(sizes, weights, ranks_held(sizes, capacity, ranks, offload), capacity, ranks, offload, ring)
    return _naive(batch) if balance == "none" else _balanced(batch, tolerance, stages)


def ranks_held(lengths: np.ndarray, capacity: int, ranks: int, offload: OffloadLimits | None = None) -> np.ndarray:
    """Return the fewest ranks that hold each sequence, int64 [n]. Raises PlanError if they are more than ``ranks``."""
    least = fewest_ranks(lengths, capacity, offload)
    if (least > ranks).any():
        worst = int(np.argmax(least))
        raise PlanError(
            f"a sequence of {lengths[worst]} tokens needs {least[worst]} ranks of {capacity} tokens, and "
            f"layout.hdp={ranks}; raise layout.hdp or train.micro_tokens, or shorten the sequences",
            key="layout.hdp",
        )
    return least


def loads(rounds: Rounds, ranks: int, stages: int = 1) -> np.ndarray:
    """Return the time at which each rank finishes, float64 [ranks]: a gang starts when its last member is free.

    stages: of a pipeline on each rank, all equal; the last one's passes in one direction end at this time.
    """
    done = np.zeros((ranks, stages))
    steps = np.arange(stages)
    for unit in (unit for units in rounds for unit in units):
        members = list(unit.ranks)
        free = done[members].max(0) - steps * unit.cost
        done[members] = np.maximum.accumulate(free) + (steps + 1) * unit.cost
    return done[:, -1]


def _naive(batch: _Batch) -> Rounds:
    """Fill rounds with units by their number of ranks alone (algorithm 1)."""
    short = np.flatnonzero(batch.lengths <= batch.capacity)
    units = [short[found] for found in micro_batches(batch.lengths[short], batch.capacity)]
    units += list(np.flatnonzero(batch.lengths > batch.capacity)[:, None])
    units.sort(key=lambda rows: int(rows[0]))
    widths = np.array([batch.least[rows[0]] for rows in units], np.int64)
    rounds = []
    for found in micro_batches(widths, batch.ranks):
        ends = np.cumsum(widths[found])
        rounds.append([batch.unit(units[u], np.arange(end - widths[u], end)) for u, end in zip(found, ends)])
    return rounds


def _balanced(batch: _Batch, tolerance: float, stages: int) -> Rounds:
    """Place the gangs, then all other sequences, so that loads are even (algorithm 2)."""
    order = np.lexsort((-batch.lengths, -batch.weights))
    held = batch.lengths[order] <= batch.capacity
    long, short = order[~held], order[held]
    mean = float(batch.weights.sum()) / batch.ranks
    bound = (1 + tolerance) * max(mean, stages * batch.longest(long), float(batch.weights[short].max(initial=0)))
    best, found, before, used = np.inf, Rounds(), np.zeros(0, np.int64), 0
    others = _all_widths(batch, long) or (batch.widths(long, mean / divisor) for divisor in WIDER[1:])
    for widths in chain([batch.widths(long, mean / WIDER[0])], others):
        if best < np.inf and (before == widths).all():
            continue
        gangs = _place_gangs(batch, long, widths, tolerance * mean, stages)
        rounds, end = (_fill if stages == 1 else _fill_pipelines)(batch, gangs, short, stages)
        if end < (WORTH if widths.sum() > used else 1.0) * best or (end == best and widths.sum() < used):
            best, found, used = end, rounds, int(widths.sum())
        before = widths
        if best <= bound:
            break
    return found


def _all_widths(batch: _Batch, rows: np.ndarray) -> list[np.ndarray]:
    """Return every choice of ranks for the gangs of a small batch, narrowest first; [] for any other batch."""
    least, most = batch.least[rows], batch.widths(rows, float(batch.weights[rows].min(initial=1.0)) / batch.ranks)
    if len(batch.lengths) > CHOICES or math.prod((most - least + 1).tolist()) > CHOICES:
        return []
    every = product(*(range(high, low - 1, -1) for low, high in zip(least.tolist(), most.tolist())))
    return [np.array(widths, np.int64) for widths in sorted(every, key=sum)]


def _place_gangs(batch: _Batch, rows: np.ndarray, widths: np.ndarray, step: float, stages: int) -> _Gangs:
    """Place gangs, costliest first, each on the ranks that are free first; ``step``: loads within it are equal."""
    found = _Gangs([], [], np.zeros(batch.ranks), [])
    done = found.loads
    each = batch.weights[rows] / widths
    for at in np.lexsort((-batch.lengths[rows], -each)):
        members = _free_first(done, int(widths[at]), step)
        unit, begin = batch.unit(rows[at : at + 1], members), float(done[members].max())
        waiting = members[begin - done[members] > step]
        found.gaps.extend((begin - float(done[rank]), float(done[rank]), int(rank)) for rank in waiting)
        found.units.append(unit)
        found.starts.append(begin)
        done[members] = begin + unit.cost * (1 if begin else stages)  # the first one fills the pipeline
    return found


def _free_first(done: np.ndarray, width: int, step: float) -> np.ndarray:
    """Return the ``width`` ranks that are free first, ascending; consecutive ones if they are among these."""
    level = np.ceil(done / step) if step else done
    edge = np.partition(level, width - 1)[width - 1]
    early = level < edge
    fits, needed = (np.concatenate([[0], np.cumsum(mask)]) for mask in (level <= edge, early))
    runs = (fits[width:] - fits[:-width] == width) & (needed[width:] - needed[:-width] == needed[-1])
    first = int(np.argmax(runs))
    if runs[first]:
        return np.arange(first, first + width)
    ties = np.flatnonzero(level == edge)
    return np.sort(np.concatenate([np.flatnonzero(early), ties[: width - int(needed[-1])]]))


def _fill(batch: _Batch, gangs: _Gangs, rows: np.ndarray, _stages: int) -> tuple[Rounds, float]:
    """Give sequences, costliest first, to the longest wait for a gang, else to the rank that is free first. Return the
    rounds and the time at which the last rank has finished."""
    slots = [(begin, rank) for _, begin, rank in gangs.gaps]
    room = [(-wait, slot) for slot, (wait, _, _) in enumerate(gangs.gaps)]
    free = [(load, len(slots) + rank) for rank, load in enumerate(gangs.loads.tolist())]
    slots += [(load, rank) for rank, load in enumerate(gangs.loads.tolist())]
    members: list[list[int]] = [[] for _ in slots]
    heapq.heapify(room)
    heapq.heapify(free)
    for row, cost in zip(rows.tolist(), batch.weights[rows].tolist()):
        heap = room if room and cost <= -room[0][0] else free
        load, slot = heap[0]
        members[slot].append(row)
        heapq.heapreplace(heap, (load + cost, slot))
    timed = list(zip(gangs.starts, gangs.units))
    for (begin, rank), chosen in zip(slots, members):
        for pack in batch.packs(np.array(chosen, np.int64)) if chosen else []:
            timed.append((begin, batch.unit(pack, np.array([rank]))))
            begin += timed[-1][1].cost
    timed.sort(key=lambda pair: pair[0])
    return _in_rounds([unit for _, unit in timed], batch.ranks), max(load for load, _ in free)


def _in_rounds(units: list[Unit], ranks: int) -> Rounds:
    """Put units, in their order, each into the first round after those that its ranks already have."""
    rounds: Rounds = []
    after = [0] * ranks
    for unit in units:
        at = max(after[rank] for rank in unit.ranks)
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(unit)
        for rank in unit.ranks:
            after[rank] = at + 1
    return rounds


def _fill_pipelines(batch: _Batch, gangs: _Gangs, rows: np.ndarray, stages: int) -> tuple[Rounds, float]:
    """Give each pipeline packs of one level of lengths, short ones in greater number. A pipeline of equal stages takes
    the sum of its micro-batches and (stages - 1) times the costliest one. Return the rounds and the time at which the
    last pipeline has finished."""
    packs = _level_packs(batch, rows[np.argsort(-batch.lengths[rows], kind="stable")])
    costs = np.array([batch.weights[pack].sum() for pack in packs])
    order = np.argsort(-costs, kind="stable")
    owners = _cut(costs[order], gangs, batch.ranks, stages)
    rounds = _in_rounds(gangs.units, batch.ranks)
    taken: list[set[int]] = [set() for _ in range(batch.ranks)]
    for at, units in enumerate(rounds):
        for rank in (rank for unit in units for rank in unit.ranks):
            taken[rank].add(at)
    after = [0] * batch.ranks
    for pack, rank in zip((packs[at] for at in order), owners.tolist()):
        while after[rank] in taken[rank]:
            after[rank] += 1
        if after[rank] == len(rounds):
            rounds.append([])
        rounds[after[rank]].append(batch.unit(pack, np.array([rank])))
        after[rank] += 1
    return rounds, float(loads(rounds, batch.ranks, stages).max())


def _level_packs(batch: _Batch, rows: np.ndarray) -> list[np.ndarray]:
    """Pack sequences that follow each other in the order of lengths."""
    packs: list[list[int]] = []
    room = 0
    for row, size in zip(rows.tolist(), batch.lengths[rows].tolist()):
        if not packs or size > room:
            packs.append([])
            room = batch.capacity
        packs[-1].append(row)
        room -= size
    return [np.sort(np.array(pack, np.int64)) for pack in packs]


def _cut(costs: np.ndarray, gangs: _Gangs, ranks: int, stages: int) -> np.ndarray:
    """Cut packs, costliest first, into runs for the ranks from the most to the least loaded one. Return the rank of
    each pack, int64 [n]."""
    top, total = np.zeros(ranks), np.zeros(ranks)
    for unit in gangs.units:
        members = list(unit.ranks)
        top[members] = np.maximum(top[members], unit.cost)
        total[members] += unit.cost
    order = np.argsort(-gangs.loads, kind="stable")
    filling, middle = gangs.loads.copy(), np.cumsum(costs) - costs / 2
    best: tuple[np.ndarray, float] = np.zeros(0, np.int64), np.inf
    for _ in range(CUTS):
        need = np.clip(_level(filling, float(costs.sum())) - filling[order], 0, None)
        places = np.minimum(np.searchsorted(np.cumsum(need), middle, side="right"), ranks - 1)
        owners = order[places]
        most = top.copy()
        np.maximum.at(most, owners, costs)
        filling = np.maximum(gangs.loads, total + (stages - 1) * most)
        end = float((filling + np.bincount(owners, costs, ranks)).max())
        best = min(best, (owners, end), key=lambda pair: pair[1])
    return best[0]


def _level(heights: np.ndarray, amount: float) -> float:
    """Return the height that ``amount`` fills up to when it is poured over columns of these heights."""
    low = np.sort(heights)
    levels = (amount + np.cumsum(low)) / np.arange(1, len(low) + 1)
    above = np.append(low[1:], np.inf)
    return float(levels[np.argmax(levels <= above)])
