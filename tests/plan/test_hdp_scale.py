"""The simulated jobs of ByteScale: lengths as published, and the order of the contenders."""

import numpy as np
import pytest
from tilth_studies.pipeline_idle import simulate

from tests.scripts import script
from tilth.plan.pipeline import passes
from tilth.plan.schedule import Unit


class Pipelines:
    """Run units on pipelines in 1F1B order: a gang's pass of a stage starts on all of its ranks at once."""

    def __init__(self, rounds, ranks, stages):
        self.stages = stages
        self.done = {}
        self.clock = np.zeros((ranks, stages))
        self.own = list(self._lists(rounds, ranks))
        self.index = {(r, id(u)): i for r, units in enumerate(self.own) for i, u in enumerate(units) if u is not None}

    @staticmethod
    def _lists(rounds, ranks):
        """Yield the micro-batches of each rank, None for a round that it leaves out before its last gang."""
        table = [{} for _ in range(ranks)]
        for at, units in enumerate(rounds):
            for unit in units:
                for rank in unit.ranks:
                    table[rank][at] = unit
        for found in table:
            last = max((at for at, unit in found.items() if len(unit.ranks) > 1), default=-1)
            yield [found.get(at) for at in sorted({*range(last + 1), *found})]

    def _order(self, rank, stage):
        number = len(self.own[rank])
        warm = min(self.stages - 1 - stage, number)
        steady = [pair for i in range(number - warm) for pair in (("F", warm + i), ("B", i))]
        return [("F", i) for i in range(warm)] + steady + [("B", i) for i in range(number - warm, number)]

    def _ready(self, rank, stage, kind, index):
        before = stage - 1 if kind == "F" else stage + 1
        if not 0 <= before < self.stages:
            return 0.0
        return self.done.get((rank, before, kind, index))

    def run(self):
        """Return the end of the last pass."""
        places = {(r, s): 0 for r in range(len(self.own)) for s in range(self.stages)}
        orders = {(r, s): self._order(r, s) for r, s in places}
        queue = list(places)
        while queue:
            rank, stage = queue.pop()
            while places[rank, stage] < len(orders[rank, stage]):
                kind, index = orders[rank, stage][places[rank, stage]]
                unit = self.own[rank][index]
                members = (rank,) if unit is None else unit.ranks
                passes = [(m, index if unit is None else self.index[m, id(unit)]) for m in members]
                heads = all(
                    orders[m, stage][places[m, stage]] == (kind, i)
                    for m, i in passes
                    if places[m, stage] < len(orders[m, stage])
                )
                ready = [self._ready(m, stage, kind, i) for m, i in passes]
                if not heads or None in ready:
                    break
                begin = max([*(float(self.clock[m, stage]) for m in members), *(t for t in ready if t is not None)])
                end = begin + (0.0 if unit is None else unit.cost * (1 / 3 if kind == "F" else 2 / 3))
                for m, i in passes:
                    self.clock[m, stage] = end
                    self.done[m, stage, kind, i] = end
                    places[m, stage] += 1
                    other = stage + 1 if kind == "F" else stage - 1
                    queue += [(m, stage)] if m != rank else []
                    queue += [(m, other)] if 0 <= other < self.stages else []
        left = sum(len(order) - places[key] for key, order in orders.items())
        if left:
            raise AssertionError(f"{left} passes wait for each other")
        return float(self.clock.max())


@pytest.fixture(scope="module")
def made():
    return script("hdp_scale.py")


def test_byted_has_the_published_shares(made):
    job = made.ABLATION
    n = np.concatenate([made.drawn(job, seed) for seed in range(16)])
    share = lambda least: n[n >= least].sum() / n.sum()  # noqa: E731
    assert np.mean(n <= 4096) == pytest.approx(0.8, abs=0.04) and np.mean(n >= 131_072) == pytest.approx(
        0.01, abs=0.002
    )
    assert share(131_072) == pytest.approx(0.443, abs=0.06) and share(262_145) == pytest.approx(0.37, abs=0.06)
    assert made.drawn(job, 0).sum() == made.BATCH and n.max() <= job.context


def test_github_has_the_published_shares(made):
    job = made.ABLATION._replace(data="github")
    n = np.concatenate([made.drawn(job, seed) for seed in range(16)])
    assert n[n > 131_072].sum() / n.sum() == pytest.approx(0.162, abs=0.03)
    assert n[n > 262_144].sum() / n.sum() == pytest.approx(0.098, abs=0.03)


def test_balance_gains_most_and_every_contender_computes_the_same(made):
    row = made.compare(made.ABLATION, 1)
    assert row["balance_speedup"] > row["dynamic_speedup"] > row["static_speedup"] == 1
    assert row["balance_seconds"] <= row["balance_resident_seconds"]
    assert row["balance_idle"] < 0.05 < row["offload_idle"]
    lengths = made.drawn(made.ABLATION, 0)
    for how in made.CONTENDERS:
        rows = [row for units in made.planned(made.ABLATION, lengths, how) for u in units for row in u.rows.tolist()]
        assert sorted(rows) == list(range(len(lengths))), how


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 5), (4, 3), (4, 9)])
def test_a_lone_pipeline_is_that_of_the_package(stages, count):
    units = [[Unit(np.array([i]), (0,), 3.0)] for i in range(count)]
    found = Pipelines(units, 1, stages).run()
    orders = passes("1f1b", stages, 1, count)
    assert found == pytest.approx(max(end for _, end in simulate(orders, 1, {"forward": 1.0, "backward": 2.0})))


def test_gangs_hold_their_pipelines_together():
    alone = [[Unit(np.array([0]), (0,), 3.0)], [Unit(np.array([1]), (0, 1), 3.0)]]
    both = Pipelines(alone, 2, 2).run()
    assert both == Pipelines([[Unit(np.array([0]), (0,), 3.0)], [Unit(np.array([1]), (0,), 3.0)]], 1, 2).run()


@pytest.fixture
def small(made, monkeypatch):
    """A pipelined job of a small batch."""
    monkeypatch.setattr(made, "BATCH", 8 << 20)
    return made.Job(made.MODELS["8x7B"], "github", 64 * made.K, gpus=256)


@pytest.mark.slow
def test_pipelines_gain_from_balance(made):
    row = made.compare(made.Job(made.MODELS["70B"], "github", 256 * made.K), 1)
    assert 1.05 * row["balance_seconds"] < row["static_seconds"]


def test_balanced_pipelines_take_nearly_what_1f1b_takes_and_naive_ones_no_more(made, small):
    lengths = made.drawn(small, 0)
    for how in made.CONTENDERS:
        rounds = made.timed(small, lengths, made.planned(small, lengths, how))
        share = made.makespan(small, rounds) / Pipelines(rounds, small.ranks, small.model.pp).run()
        assert (0.7 if how in ("dynamic", "offload") else 0.9) < share < 1.1, how


def test_the_time_of_planning_is_measured_for_each_contender(made):
    rows = [*made.planning((256,))]
    assert {row["how"] for row in rows} == {"offload", "balance"} and all(row["planning_seconds"] > 0 for row in rows)
