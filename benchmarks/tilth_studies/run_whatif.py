"""Findings of ``tilth trace whatif`` on a run: S by operation, data rank, axis of the mesh and worker."""

import math
from dataclasses import dataclass

import numpy as np

from tilth.analysis.run_replay import RunModel
from tilth.analysis.run_whatif import coordinates, place_among, replayed
from tilth.analysis.whatif import Replayed
from tilth_studies.slowdowns import GUILTY, Gain, Slowdown, Slowdowns, mended


@dataclass(frozen=True)
class RunWhatIf(Slowdowns):
    """Findings of a run."""

    by_axis: dict[str, dict[int, Slowdown]]
    """For each axis of the mesh with more than one coordinate, S of each coordinate."""
    worst: list[int]  # ranks of the workers of M_W
    dropped: list[int]  # steps left out because calls of theirs are missing
    older: int  # number of steps left out because the newer ones have enough events
    profiled: tuple[int, ...]  # steps left out because a profiler made them longer


def what_if_run(model: RunModel, found: Replayed | None = None) -> RunWhatIf:
    """Compute all findings of a run. found: ``replayed`` of it, if that is known."""
    steps, found = model.steps, found or replayed(model)
    best = found.ideal

    def apart(groups: dict[int, np.ndarray]) -> dict[int, Slowdown]:
        return {at: Slowdown.of(t, best) for at, t in zip(groups, groups_of(model, list(groups.values())).T)}

    def gain(fix: np.ndarray) -> Gain:
        return mended(model, fix, found.replayed, best)

    workers = steps.workers
    at = coordinates(steps)
    rows, layers = place_among(at, "rows"), place_among(at, "layers")
    dp, stage = (np.array([place[int(r)] for r in workers], np.int64) for place in (rows, layers))
    alone = groups_of(model, [workers[i : i + 1] for i in range(len(workers))])
    exact = alone.mean(0) / best.mean()
    worst = workers[np.lexsort((workers, -exact))][: math.ceil(GUILTY * len(workers))]
    talk = np.array([kind == "communication" for kind in steps.kinds])[None]
    by_op = zip(steps.ops, operations(model).T, model.real.sum(0))
    least = 1e-3 * model.sum_real.sum()  # frames have no time of their own
    return RunWhatIf(
        **vars(found),
        by_optype={name: Slowdown.of(t, best) for name, t, own in by_op if own > least},
        by_stage={}, by_dp=apart({int(d): workers[dp == d] for d in np.unique(dp)}),
        by_axis={axis: apart(groups) for axis, groups in _axes(at, workers.tolist()).items()},
        workers=workers, dp=dp, stage=stage, exact=exact, exact_per_step=(alone / best[:, None]).T,
        worst=worst.tolist(), m_w=gain(np.isin(model.rank, worst)[:, None]),
        m_s=gain(np.zeros((len(model.order), 1), bool)), m_c=gain(talk),
        dropped=steps.dropped, older=steps.older, profiled=steps.profiled,
    )  # fmt: skip


def groups_of(model: RunModel, groups: list[np.ndarray]) -> np.ndarray:
    """float64 [s, g]: times with only the ranks of one group as recorded."""
    return _each(model, [np.where(np.isin(model.rank, g), model.sum_real, model.sum_ideal) for g in groups])


def operations(model: RunModel) -> np.ndarray:
    """float64 [s, k]: times with only one operation as recorded."""
    columns = range(model.real.shape[1])
    return _each(model, [model.sum_ideal + model.real[:, i] - model.ideal[:, i] for i in columns])


def _each(model: RunModel, durations: list[np.ndarray]) -> np.ndarray:
    if not durations:
        return np.zeros((len(model.last), 0))
    return model.times(np.maximum(np.stack(durations, 1), 0))


def _axes(at: dict[int, dict[str, int]], workers: list[int]) -> dict[str, dict[int, np.ndarray]]:
    """Ranks at each coordinate of every axis that has more than one."""
    found = {}
    for axis in dict.fromkeys(axis for rank in workers for axis in at[rank]):
        mine = [at[rank].get(axis, -1) for rank in workers]
        if len(set(mine) - {-1}) > 1:
            found[axis] = {i: np.array([r for r, m in zip(workers, mine) if m == i]) for i in sorted(set(mine) - {-1})}
    return found
