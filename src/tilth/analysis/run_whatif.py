"""Time of a run's step if parts of it were like their peers: S, by operation, data rank and worker.

The study's numbers (arXiv 2505.05713; ``whatif`` has the definitions) on the dependency graph of ``run_graph``, with
the ideal of ``run_replay``. Runs have no pipeline, so there is one stage.
"""

import math
import re
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.run_graph import Steps, read_steps
from tilth.analysis.run_replay import RunModel
from tilth.analysis.run_trace import open_run
from tilth.analysis.whatif import GUILTY, Cause, Replayed, Slowdown, mended, timed
from tilth.config.axes import Split, over
from tilth.core.errors import DataError


@dataclass(frozen=True)
class RunWhatIf(Replayed):
    """Findings of a run. ``explained``: a replay with the usual delays of dispatch (``RunModel.usual_delays``);
    with the delays that were recorded the error is 0 by construction."""

    by_axis: dict[str, dict[int, Slowdown]]
    """For each axis of the mesh with more than one coordinate, S of each coordinate."""
    worst: list[int]  # ranks of the workers of M_W
    dropped: list[int]  # steps left out because calls of theirs are missing
    older: int  # number of steps left out because the newer ones have enough events
    profiled: tuple[int, ...]  # steps left out because a profiler made them longer


def analyse(run: str | Path, steps: range | None = None) -> tuple[RunModel, RunWhatIf, Cause]:
    """Analyse the attempt of a run that ``open_run`` chooses.

    steps: only these; typical values still come from the whole run. Raises DataError without events, a complete step
    or these steps.
    """
    events = open_run(run).events
    try:
        return analyse_events(events, steps)
    except DataError as error:
        raise DataError(f"{run}: {error}", key=error.key) from error


def analyse_events(events: Events, steps: range | None = None) -> tuple[RunModel, RunWhatIf, Cause]:
    """Analyse loaded events. Raises DataError without a complete step or these steps."""
    from tilth.analysis.run_cause import diagnose_run

    model = RunModel(read_steps(events, steps))
    found = what_if_run(model)
    return model, found, diagnose_run(model, found)


def what_if_run(model: RunModel) -> RunWhatIf:
    """Compute all findings of a run."""
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
    operations = zip(steps.ops, model.operations().T, model.real.sum(0))
    least = 1e-3 * model.sum_real.sum()  # frames have no time of their own
    return RunWhatIf(
        steps=steps.steps, recorded=steps.recorded, replayed=replayed, explained=model.usual_delays(), ideal=best,
        by_optype={name: Slowdown.of(t, best) for name, t, own in operations if own > least},
        by_stage={}, by_dp=apart({int(d): workers[dp == d] for d in np.unique(dp)}),
        by_axis={axis: apart(groups) for axis, groups in _axes(at, workers.tolist()).items()},
        workers=workers, dp=dp, stage=stage, exact=exact, exact_per_step=(alone / best[:, None]).T,
        worst=worst.tolist(), m_w=mended(model, np.isin(model.rank, worst)[:, None], replayed, best),
        m_s=mended(model, ~everything, replayed, best), m_c=mended(model, talk, replayed, best),
        dropped=steps.dropped, older=steps.older, profiled=steps.profiled,
    )  # fmt: skip


def place_among(at: dict[int, dict[str, int]], split: Split) -> dict[int, int]:
    """Return each rank's place among those that divide ``split``. at: from ``coordinates``."""
    axes = over(split)
    sizes = {name: max((place.get(name, 0) for place in at.values()), default=0) + 1 for name in axes}
    return {rank: reduce(lambda n, a: n * sizes[a] + place.get(a, 0), axes, 0) for rank, place in at.items()}


def coordinates(steps: Steps) -> dict[int, dict[str, int]]:
    """Return each rank's coordinates by axis in the mesh of the role it works for most."""
    events, found = steps.events, {}
    places = [{axis: int(at) for axis, at in re.findall(r"(\w+)=(\d+)", name)} for name in events.place.names]
    for rank in np.unique(steps.rank).tolist():
        rows = np.flatnonzero((events.rank == rank) & events.op.is_("call"))
        took = np.bincount(events.place.codes[rows], events.duration[rows], len(places))
        found[rank] = places[int(took.argmax())] if len(rows) else {}
    return found


def _axes(at: dict[int, dict[str, int]], workers: list[int]) -> dict[str, dict[int, np.ndarray]]:
    """Ranks at each coordinate of every axis that has more than one."""
    found = {}
    for axis in dict.fromkeys(axis for rank in workers for axis in at[rank]):
        mine = [at[rank].get(axis, -1) for rank in workers]
        if len(set(mine) - {-1}) > 1:
            found[axis] = {i: np.array([r for r, m in zip(workers, mine) if m == i]) for i in sorted(set(mine) - {-1})}
    return found
