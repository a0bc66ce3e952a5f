"""What a step of one of our own runs would take if some of it were like its peers: S, by operation, data rank, worker.

The study's numbers (arXiv 2505.05713; ``whatif`` has the definitions) on the dependency model of ``run_graph``. Our
runs have no pipeline, so there is one stage. What is ideal is said in ``run_replay``.
"""

import math
import re
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

from tilth.analysis.cause import Cause
from tilth.analysis.events import Events
from tilth.analysis.network import assumed, retimed
from tilth.analysis.run_graph import Steps, read_steps
from tilth.analysis.run_replay import RunModel
from tilth.analysis.run_trace import open_run
from tilth.analysis.whatif import GUILTY, Replayed, Slowdown, mended, timed
from tilth.config.axes import Split, over
from tilth.core.errors import DataError


@dataclass(frozen=True)
class RunWhatIf(Replayed):
    """Findings of a run. ``explained``: a replay with the usual delays of dispatch (``RunModel.usual_delays``);
    with the delays that were recorded the error is 0 by construction."""

    by_axis: dict[str, dict[int, Slowdown]]
    """For each axis of the mesh that has more than one coordinate, each of these."""
    worst: list[int]
    """Ranks of the workers that M_W mends."""
    dropped: list[int]
    """Steps left out, for calls of theirs are missing."""
    older: int
    """Steps left out, for the newer ones have events enough."""
    profiled: tuple[int, ...]
    """Steps left out, for a profiler made them longer."""
    other_network: float | None
    """Seconds of a step with the recorded work on the network that was asked for; None: none was."""
    assumed: tuple[str, ...]
    """Communications whose latency this run cannot tell from bandwidth, so that all of it counted as bandwidth."""


def analyse(
    run: str | Path, steps: range | None = None, latency: float | None = None, bandwidth: float | None = None
) -> tuple[RunModel, RunWhatIf, Cause]:
    """Everything about a run, of the attempt that ``open_run`` takes.

    steps: only these; what is usual is taken from the whole run all the same. latency, bandwidth: seconds and bytes a
    second of another network, for ``other_network``. DataError: no events, no whole step, none of these steps.
    """
    events = open_run(run).events
    try:
        return analyse_events(events, steps, latency, bandwidth)
    except DataError as error:
        raise DataError(f"{run}: {error}", key=error.key) from error


def analyse_events(
    events: Events, steps: range | None = None, latency: float | None = None, bandwidth: float | None = None
) -> tuple[RunModel, RunWhatIf, Cause]:
    """The same of events that were read already. DataError: no whole step, none of these steps."""
    from tilth.analysis.run_cause import diagnose_run

    model = RunModel(read_steps(events, steps))
    found = what_if_run(model, latency, bandwidth)
    return model, found, diagnose_run(model, found)


def what_if_run(model: RunModel, latency: float | None = None, bandwidth: float | None = None) -> RunWhatIf:
    """All numbers of a run."""
    steps = model.steps
    everything = np.ones((len(model.order), 1), bool)
    replayed, best = timed(model, everything)

    def apart(groups: dict[int, np.ndarray]) -> dict[int, Slowdown]:
        return {at: Slowdown.of(t, best) for at, t in zip(groups, model.groups_of(list(groups.values())).T)}

    workers = steps.workers
    at = coordinates(steps)
    rows, layers = place_among(at, "rows"), place_among(at, "layers")
    dp, stage = (np.array([place[int(r)] for r in workers], np.int64) for place in (rows, layers))
    alone = model.groups_of([workers[i : i + 1] for i in range(len(workers))])
    exact = alone.mean(0) / best.mean()
    worst = workers[np.lexsort((workers, -exact))][: math.ceil(GUILTY * len(workers))]
    talk = np.array([kind == "communication" for kind in steps.kinds])[None]
    return RunWhatIf(
        steps=steps.steps, recorded=steps.recorded, replayed=replayed, explained=model.usual_delays(), ideal=best,
        by_optype={n: Slowdown.of(t, best) for n, t in zip(steps.ops, model.operations().T) if _told(model, n)},
        by_stage={}, by_dp=apart({int(d): workers[dp == d] for d in np.unique(dp)}),
        by_axis={axis: apart(groups) for axis, groups in _axes(at, workers.tolist()).items()},
        workers=workers, dp=dp, stage=stage, exact=exact, exact_per_step=(alone / best[:, None]).T,
        worst=worst.tolist(), m_w=mended(model, np.isin(model.rank, worst)[:, None], replayed, best),
        m_s=mended(model, ~everything, replayed, best), m_c=mended(model, talk, replayed, best),
        dropped=steps.dropped, older=steps.older, profiled=steps.profiled,
        other_network=_elsewhere(steps, latency, bandwidth),
        assumed=assumed(steps.events, latency, bandwidth, steps.steps),
    )  # fmt: skip


def _told(model: RunModel, name: str) -> bool:
    """Frames that spend nothing by themselves say nothing."""
    return bool(model.real[:, model.steps.ops.index(name)].sum() > 1e-3 * model.sum_real.sum())


def _elsewhere(steps: Steps, latency: float | None, bandwidth: float | None) -> float | None:
    if latency is None and bandwidth is None:
        return None
    model = RunModel(steps, retimed(steps.events, latency, bandwidth, steps.steps))
    return float(model.times(model.sum_real[:, None]).mean())


def place_among(at: dict[int, dict[str, int]], split: Split) -> dict[int, int]:
    """For each rank its place among those that divide this. at: as ``coordinates`` gives them."""
    axes = over(split)
    sizes = {name: max((place.get(name, 0) for place in at.values()), default=0) + 1 for name in axes}
    return {rank: reduce(lambda n, a: n * sizes[a] + place.get(a, 0), axes, 0) for rank, place in at.items()}


def coordinates(steps: Steps) -> dict[int, dict[str, int]]:
    """For each rank its coordinates by axis in the mesh of the role it works for most."""
    events, found = steps.events, {}
    places = [{axis: int(at) for axis, at in re.findall(r"(\w+)=(\d+)", name)} for name in events.place.names]
    for rank in np.unique(steps.rank).tolist():
        rows = np.flatnonzero((events.rank == rank) & events.op.is_("call"))
        took = np.bincount(events.place.codes[rows], events.duration[rows], len(places))
        found[rank] = places[int(took.argmax())] if len(rows) else {}
    return found


def _axes(at: dict[int, dict[str, int]], workers: list[int]) -> dict[str, dict[int, np.ndarray]]:
    """For each axis with more than one coordinate the ranks at each of them."""
    found = {}
    for axis in dict.fromkeys(axis for rank in workers for axis in at[rank]):
        mine = [at[rank].get(axis, -1) for rank in workers]
        if len(set(mine) - {-1}) > 1:
            found[axis] = {i: np.array([r for r, m in zip(workers, mine) if m == i]) for i in sorted(set(mine) - {-1})}
    return found
