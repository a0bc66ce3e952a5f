"""Time of a run's step if all of it were like its peers, and the likely cause of what it takes longer.

The study's numbers (arXiv 2505.05713; ``whatif`` has the definitions) on the dependency graph of ``run_graph``, with
the ideal of ``run_replay``. Runs have no pipeline, so there is one stage.

For a cause each candidate is taken out, and the steps are replayed: its gain is the share of their time that goes with
it. Slowness is a rank's time beyond the cost of its work (``run_rates``); unequal work is costs that differ among the
ranks of a call; garbage collection is traced; a slow network is compared with the run's own fast transfers, a late
controller with its own usual steps. Without communications and peers (inline) there are pauses and the controller's own
time only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.run_graph import MEET, WORK, Steps, read_steps
from tilth.analysis.run_rates import Rates, rates
from tilth.analysis.run_replay import BLOCK, RunModel, alike, fast, numbered, quantiles
from tilth.analysis.whatif import Cause, Finding, Place, Replayed, medians, timed
from tilth.config.axes import Split, over


def analyse_events(events: Events, steps: range | None = None) -> tuple[RunModel, Replayed, Cause]:
    """Analyse loaded events. Raises DataError without a complete step or these steps."""
    model = RunModel(read_steps(events, steps))
    found = replayed(model)
    return model, found, diagnose_run(model, found)


def replayed(model: RunModel) -> Replayed:
    """Return the times of a run's steps as recorded and in the ideal. Raises DataError if they are 0.

    ``explained`` is a replay with the usual delays of dispatch (``RunModel.usual_delays``): with the delays that were
    recorded the error is 0 by construction.
    """
    steps = model.steps
    times = timed(model, np.ones((len(model.order), 1), bool))
    return Replayed(steps.steps, steps.recorded, times[0], model.usual_delays(), times[1])


def place_among(at: dict[int, dict[str, int]], split: Split) -> dict[int, int]:
    """Return each rank's place among those that divide ``split``. at: from ``coordinates``."""
    axes = over(split)
    sizes = {name: max((place.get(name, 0) for place in at.values()), default=0) + 1 for name in axes}
    return {rank: reduce(lambda n, a: n * sizes[a] + place.get(a, 0), axes, 0) for rank, place in at.items()}


def coordinates(steps: Steps) -> dict[int, dict[str, int]]:
    """Return each rank's coordinates by axis in the mesh of the role it works for most."""
    events, found = steps.events, {}
    places = [{axis: int(at) for axis, at in re.findall(r"(\w+)=(\d+)", name)} for name in events.place.names]
    calls = np.flatnonzero(events.op.is_("call"))
    calls = calls[np.argsort(events.rank[calls], kind="stable")]
    ranks = np.unique(steps.rank)
    low, high = (np.searchsorted(events.rank[calls], ranks, side) for side in ("left", "right"))
    for rank, a, b in zip(ranks.tolist(), low, high):
        codes, where = np.unique(events.place.codes[calls[a:b]], return_inverse=True)
        took = np.bincount(where, events.duration[calls[a:b]])
        found[rank] = places[codes[took.argmax()]] if b > a else {}
    return found


# ---- the likely cause ----

LEAST = 0.05
"""Least share of a step's time for a cause."""
TOLD = 0.005
"""Least share of a step's time for a gain to be listed where there is no cause."""
SLOWER, LONGER = 1.1, 1.1
"""Ratios to the others from which a rank is slow, and its work unequal."""
STEADY = 0.25
"""Quantile of a block's steps at which a rank must be slower than its peers: a busy machine slows ranks by turns."""


@dataclass(frozen=True)
class _Candidate:
    kind: str
    durations: np.ndarray  # float64 [n]: seconds of the nodes without it
    text: Callable[[], str]
    where: tuple[Place, ...]
    plausible: bool


def diagnose_run(model: RunModel, found: Replayed) -> Cause:
    """Name why the steps are slow, and their time without each cause."""
    steps, work = model.steps, rates(model.steps)
    candidates = [_pauses(steps), _controller(steps)]
    if len(steps.workers) > 1:
        candidates += [_worker(steps, work), _lengths(steps, work), _network(steps)]
    without = model.times(np.stack([c.durations[model.order] for c in candidates], 1)).T
    gains = [1 - float(times.mean() / found.replayed.mean()) for times in without]
    ranked = [(c, times, gain) for c, times, gain in zip(candidates, without, gains) if c.plausible]
    findings = sorted(
        (_finding(c, times, found) for c, times, gain in ranked if gain >= LEAST), key=lambda f: f.seconds or 0.0
    )
    evidence = {"model_error": found.error, "waste": found.waste, **_evidence(steps, work)}
    evidence |= {f"gain_{c.kind.replace('-', '_')}": gain for c, gain in zip(candidates, gains)}
    text = "; ".join(f.text for f in findings)
    none = _none({c.kind.replace("-", " "): gain for c, _, gain in ranked}, found.waste)
    return Cause(text or none, tuple(findings), evidence)


def _none(gains: dict[str, float], waste: float) -> str:
    """Explain the loss, a share of the time, by the gains of candidates where none is a cause."""
    text = f"none: nothing alone costs {100 * LEAST:.0f} % of a step"
    known = {name: gain for name, gain in sorted(gains.items(), key=lambda kv: -kv[1]) if gain >= TOLD}
    scattered = waste - sum(known.values())
    if waste < LEAST:
        return text
    parts = ", ".join(f"{name} {100 * gain:.1f}" for name, gain in known.items())
    of = f"of the {100 * waste:.1f} % that is lost"
    saved = f"{of} mending these would save, in % of the time: {parts}"
    explained = saved if known else f"nothing explains a part {of}"
    if scattered < TOLD:
        return f"{text}; {explained}"
    return (
        f"{text}; {explained}; the other {100 * scattered:.1f} % is scattered over ranks and steps (jitter: now the "
        "one is slow, now the other), so no rank or cause alone is to be mended"
    )


def _finding(c: _Candidate, times: np.ndarray, found: Replayed) -> Finding:
    now, then = float(np.median(found.replayed)), float(np.median(times))
    lost, won = found.replayed.mean() - found.ideal.mean(), found.replayed.mean() - times.mean()
    less = 100 * (1 - times.mean() / found.replayed.mean())
    text = (
        f"{c.text()}; without it a step would take {then:.4g} s instead of {now:.4g} s (medians), "
        f"and all of them {less:.0f} % less"
    )
    return Finding(c.kind, float(won / lost) if lost > 0 else 0.0, text, c.where, then)


def _evidence(steps: Steps, work: Rates) -> dict[str, float]:
    if len(steps.workers) < 2:
        return {}
    alike, spread = alikeness(steps)
    return {
        "forward_backward_correlation": alike,
        "forward_variation": spread,
        "worst_excess": float(slowness(work).mean(0).max()),
        "worst_load": float(work.load.mean(0).max()),
    }


def alikeness(steps: Steps) -> tuple[float, float]:
    """Return ``cause.medians`` of own forward and backward times of each worker, matched by micro-batch."""
    events = steps.events
    forward, backward = (
        np.flatnonzero(events.op.is_(op) & (events.micro_batch >= 0) & np.isin(events.step, steps.steps))
        for op in ("forward", "backward")
    )
    found = []
    for rank in steps.workers:
        f, b = (rows[(events.rank[rows] == rank) & (events.parent[rows] >= 0)] for rows in (forward, backward))
        keys = [events.parent[rows] * (int(events.micro_batch.max()) + 1) + events.micro_batch[rows] for rows in (f, b)]
        _, i, j = np.intersect1d(*keys, return_indices=True)
        if len(i):
            found.append((events.own[f[i]].astype(np.float64), events.own[b[j]].astype(np.float64)))
    return medians(found)


def blocks(steps: int) -> np.ndarray:
    """int64 [s]: block number of each step; blocks have BLOCK neighbouring steps, the last one up to twice as many."""
    return np.minimum(np.arange(steps) // BLOCK, max(steps // BLOCK - 1, 0))


def typical(values: np.ndarray, q: float = 0.5) -> np.ndarray:
    """float64 [s, ...]: median, or another quantile, of each step's block."""
    block = blocks(len(values))
    return np.stack([np.quantile(values[block == b], q, 0) for b in range(int(block[-1]) + 1)])[block]


def slowness(work: Rates) -> np.ndarray:
    """float64 [s, w]: a rank's time over its peers' for equal work, block by block.

    1 in a block where it is not nearly always slower, or has much more work: the fit may underestimate much work.
    """
    steady = (typical(work.excess, STEADY) > 1) & (typical(work.load) < LONGER)
    return np.where(steady, np.maximum(typical(work.excess), 1), 1.0)


def _place(steps: Steps, rank: int) -> Place:
    at = coordinates(steps)
    return {"dp": place_among(at, "rows")[rank], "stage": place_among(at, "layers")[rank], "rank": rank}


def _pauses(steps: Steps) -> _Candidate:
    took = steps.real @ np.array([kind == "pause" for kind in steps.kinds])
    by_rank = {int(r): float(took[steps.rank == r].sum()) / len(steps.steps) for r in np.unique(steps.rank)}
    top = max(by_rank, key=lambda r: by_rank[r])
    where = tuple(_place(steps, r) for r in sorted(by_rank, key=lambda r: -by_rank[r]) if by_rank[r] > by_rank[top] / 2)

    text = f"garbage collection: {1000 * by_rank[top]:.0f} ms a step on rank {top}"
    return _Candidate("garbage-collection", steps.real.sum(1) - took, lambda: text, where, True)


def _controller(steps: Steps) -> _Candidate:
    """Cap the controller's own work in each step at that of a quick step."""
    mine = steps.home & (steps.kind == WORK)
    step = np.searchsorted(steps.steps, steps.events.step[steps.frame])
    total = np.bincount(step[mine], steps.real[mine].sum(1), len(steps.steps))
    quick = float(np.quantile(total, 0.25))
    durations = steps.real.sum(1)
    durations[mine] *= np.minimum(1, quick / np.maximum(total, 1e-12))[step[mine]]
    text = f"late controller: {1000 * total.mean():.0f} ms of its own work a step, {1000 * quick:.0f} ms in quick ones"
    return _Candidate("controller", durations, lambda: text, (), len(steps.workers) > 0)


def _worker(steps: Steps, work: Rates) -> _Candidate:
    """Give the slowest rank the rate of its peers, block by block; its jitter stays."""
    slow = slowness(work)
    by_rank = slow.mean(0)
    worst = int(by_rank.argmax())
    step, rank = work.at
    durations = work.scaled(np.where(rank == worst, 1 / slow[step, worst], 1.0))
    name = int(steps.workers[worst])

    def text() -> str:
        then = slow[:, worst] > 1
        some = "" if then.all() else f", in {then.sum()} of {len(then)} steps"
        times = slow[then, worst].mean()
        return f"slow worker: rank {name} takes {times:.2f} times as long as its peers for the same work{some}"

    return _Candidate("slow-worker", durations, text, (_place(steps, name),), by_rank[worst] >= SLOWER)


def _lengths(steps: Steps, work: Rates) -> _Candidate:
    """Divide the work of each call evenly; each rank keeps its rate."""
    load = work.load.mean(0)
    worst = int(load.argmax())
    name = int(steps.workers[worst])
    text = f"unequal sequences: rank {name} got {load[worst]:.2f} times the work of the mean"
    durations = work.scaled(1 / np.maximum(work.uneven, 1e-12))
    return _Candidate("sequence-lengths", durations, lambda: text, (_place(steps, name),), bool(load[worst] >= LONGER))


def _network(steps: Steps) -> _Candidate:
    """Subtract from transfers the typical excess of their kind in their block over the run's fast ones."""
    durations = steps.real.sum(1)
    nodes = np.flatnonzero(steps.kind == MEET)
    if not len(nodes):
        return _Candidate("communication", durations, str, (), False)
    events, rows = steps.events, steps.row[nodes]
    now, usual = durations[nodes], fast(steps)[rows] * 1e-9
    block = blocks(len(steps.steps))[np.searchsorted(steps.steps, events.step[rows])]
    which = numbered(np.stack([alike(steps, rows), block]))
    beyond = np.maximum(quantiles(which, now, 0.5)[which] - usual, 0)
    durations[nodes] = np.maximum(now - beyond, np.minimum(now, usual))
    lost = np.bincount(events.op.codes[rows], now - durations[nodes])
    most = int(lost.argmax())
    mine = events.op.codes[rows] == most

    def text() -> str:
        times, name = now[mine].sum() / max(usual[mine].sum(), 1e-12), events.op.names[most]
        return f"communication: transfers of {name} take {times:.1f} times as long as fast ones of the run"

    return _Candidate("communication", durations, text, ({"optype": events.op.names[most]},), True)
