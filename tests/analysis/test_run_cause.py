"""Causes that were put into runs on paper and must come out, with the times of steps without them."""

import numpy as np
import pytest

from tests.analysis.run_jobs import Job
from tilth.analysis.run_graph import read_steps
from tilth.analysis.run_rates import rates
from tilth.analysis.run_replay import RunModel
from tilth.analysis.run_whatif import LEAST, alikeness, blocks, diagnose_run, replayed, typical
from tilth.analysis.time_breakdown import account

STEPS = 40
COST = (0.01, 1e-4, 2e-7)
"""Seconds of a forward pass, of each token, of each squared token; twice that backwards."""


class Training:
    """Data-parallel steps of some ranks, with noise; what is wrong is set by the fields and on from ``since`` on."""

    def __init__(self, ranks=2, seed=0, noise=0.02, since=1):
        self.ranks, self.g, self.noise, self.since = ranks, np.random.default_rng(seed), noise, since
        self.slow, self.long, self.pause = {}, {}, {}
        self.transfer, self.think, self.optimizer = 0.02, 0.01, 0.02

    def run(self, steps=STEPS):
        job = Job(self.ranks, delay=0.001, reply=0.001)
        for step in range(1, steps + 1):
            bad = step >= self.since
            with job:
                job.think(self.think if bad else 0.01)
                job.do("policy.update", {r: self.works(r, bad=bad) for r in range(self.ranks)})
        return job

    def works(self, rank, *, bad):
        works = []
        for i in range(3):
            tokens = int(1000 * self.g.uniform(0.95, 1.05) * (self.long.get(rank, 1.0) if bad else 1.0))
            squares = tokens * 100
            took = (COST[0] + COST[1] * tokens + COST[2] * squares) * (self.slow.get(rank, 1.0) if bad else 1.0)
            amount = {"tokens": tokens, "squares": squares, "micro_batch": i}
            pause = [("gc", self.pause[rank])] if bad and rank in self.pause else []
            works.append(("forward", took * self.g.lognormal(0, self.noise), {**amount, "inside": pause}))
            works.append(("backward", 2 * took * self.g.lognormal(0, self.noise), amount))
        transfer = (self.transfer if bad else 0.02) * self.g.lognormal(0, self.noise)
        return [*works, ("all_reduce", transfer, {"bytes": 4_000_000}), ("optimizer", self.optimizer)]


def found(job, steps=None):
    model = RunModel(read_steps(job.events, steps))
    analysed = replayed(model)
    return analysed, diagnose_run(model, analysed)


def healthy_median(**how):
    return float(np.median(found(Training(seed=9, **how).run())[0].replayed))


def only(cause, kind):
    assert [f.kind for f in cause.findings] == [kind], cause.text
    return cause.findings[0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_healthy_run_has_no_cause(ranks):
    for seed in range(3):
        _, cause = found(Training(ranks, seed).run())
        assert cause.findings == () and cause.text.startswith("none")


@pytest.mark.parametrize(("ranks", "slow", "factor"), [(2, 0, 1.5), (2, 1, 1.3), (4, 2, 2.0), (8, 7, 1.3)])
@pytest.mark.parametrize("since", [1, 21])
def test_a_slow_worker(ranks, slow, factor, since):
    training = Training(ranks, since=since)
    training.slow[slow] = factor
    _, cause = found(training.run(), range(since, STEPS + 1))
    finding = only(cause, "slow-worker")
    assert finding.where == ({"dp": slow, "stage": 0, "rank": slow},)
    assert finding.seconds == pytest.approx(healthy_median(ranks=ranks), rel=0.04)
    assert cause.evidence["worst_excess"] == pytest.approx(factor, rel=0.06)
    assert f"takes {factor:.1f}" in finding.text or f"takes {factor - 0.05:.1f}" in finding.text


def test_a_worker_that_is_slow_for_half_of_the_time():
    training = Training(2, since=21)
    training.slow[1] = 1.6
    _, cause = found(training.run())
    finding = only(cause, "slow-worker")
    assert "in 20 of 40 steps" in finding.text and "takes 1.5" in finding.text
    assert cause.evidence["worst_excess"] == pytest.approx(1.3, rel=0.05)


def test_jitter_that_strikes_now_the_one_and_now_the_other_is_no_slow_worker():
    for seed in range(5):
        _, cause = found(Training(2, seed, noise=0.4).run())
        assert "slow-worker" not in [f.kind for f in cause.findings]


@pytest.mark.parametrize(("ranks", "longest"), [(2, 0), (2, 1), (4, 3)])
def test_unequal_sequences_are_no_slow_worker(ranks, longest):
    training = Training(ranks)
    training.long = {r: 0.7 for r in range(ranks)} | {longest: 1 + 0.3 * (ranks - 1)}
    _, cause = found(training.run())
    finding = only(cause, "sequence-lengths")
    assert finding.where[0]["rank"] == longest
    assert finding.seconds == pytest.approx(healthy_median(ranks=ranks), rel=0.06)
    assert cause.evidence["worst_excess"] < 1.05 and cause.evidence["worst_load"] > 1.2


def test_what_has_no_tokens_takes_as_long_when_sequences_are_dealt_evenly():
    """An optimizer's step behind the all-reduce: were it scaled with the rows, the ranks would wait for it there."""
    training = Training(2, noise=0.0)
    training.long = {0: 1.6, 1: 0.4}
    training.optimizer = 0.5
    _, cause = found(training.run())
    even = Training(2, seed=9, noise=0.0)
    even.optimizer = 0.5
    expected = float(np.median(found(even.run())[0].replayed))
    assert only(cause, "sequence-lengths").seconds == pytest.approx(expected, rel=0.02)


def test_a_rank_whose_long_sequences_cost_more_than_the_fit_says_is_no_slow_worker():
    training = Training(2)
    training.long, training.slow = {0: 0.6, 1: 1.4}, {1: 1.3}
    _, cause = found(training.run())
    assert only(cause, "sequence-lengths").where[0]["rank"] == 1


def test_garbage_collection():
    training = Training()
    training.pause[1] = 0.1
    _, cause = found(training.run())
    finding = only(cause, "garbage-collection")
    assert finding.where == ({"dp": 1, "stage": 0, "rank": 1},) and "300 ms a step on rank 1" in finding.text
    assert finding.seconds == pytest.approx(healthy_median(), rel=0.03)


def test_a_slow_network_against_the_runs_own_fast_transfers():
    training = Training(since=21)
    training.transfer = 0.3
    _, cause = found(training.run(), range(21, STEPS + 1))
    finding = only(cause, "communication")
    assert finding.where == ({"optype": "all_reduce"},)
    assert finding.seconds == pytest.approx(healthy_median(), rel=0.03)
    _, before = found(training.run(), range(1, 21))
    assert before.findings == ()


def test_a_late_controller():
    training = Training(since=31)
    training.think = 0.4
    _, cause = found(training.run())
    assert only(cause, "controller").seconds == pytest.approx(healthy_median(), rel=0.03)


def test_two_causes_the_greater_first():
    training = Training()
    training.slow[0], training.pause[0] = 1.5, 0.05
    _, cause = found(training.run())
    assert [f.kind for f in cause.findings] == ["slow-worker", "garbage-collection"]
    assert cause.findings[0].seconds < cause.findings[1].seconds


def test_evidence_is_of_plain_numbers():
    analysed, cause = found(Training().run())
    assert all(type(v) is float for v in cause.evidence.values())
    assert cause.evidence["model_error"] == analysed.error and cause.evidence["waste"] == analysed.waste
    assert all(v < LEAST for k, v in cause.evidence.items() if k.startswith("gain"))


def test_forwards_and_backwards_of_a_micro_batch_go_together():
    training = Training(4, noise=0.0)
    _, cause = found(training.run())
    assert cause.evidence["forward_backward_correlation"] == pytest.approx(1, abs=1e-6)
    assert cause.evidence["forward_variation"] == pytest.approx(0.1 / 12**0.5, rel=0.15)  # all but the constant part
    job = Job(2)
    with job:
        works = [(op, s, {"micro_batch": i}) for i, s in enumerate((1.0, 2.0, 3.0)) for op in ("forward",)]
        works += [("backward", s, {"micro_batch": i}) for i, s in enumerate((3.0, 2.0, 1.0))]
        job.do("policy.update", {0: works, 1: works})
    steps = read_steps(job.events)
    assert alikeness(steps) == pytest.approx((-1, (2 / 3) ** 0.5 / 2))


def test_rates_and_costs():
    training = Training(noise=0.0)
    training.long[0] = 1.5
    found = rates(read_steps(training.run().events))
    long, usual = (COST[0] + (COST[1] + 100 * COST[2]) * n for n in (1500, 1000))
    fixed = 0.02 / 9  # the optimizer's step, of nine passes of this cost
    assert found.load.mean(0) == pytest.approx(
        np.array([long + fixed, usual + fixed]) / ((long + usual) / 2 + fixed), rel=0.02
    )
    assert found.excess == pytest.approx(np.ones((STEPS, 2)), abs=0.01)
    training = Training(noise=0.0)
    training.slow[1] = 1.4
    found = rates(read_steps(training.run().events))
    assert found.excess[:, 1] == pytest.approx(STEPS * [1.4], rel=0.06)  # but for the optimizer
    assert found.excess[:, 0] == pytest.approx(1 / found.excess[:, 1]) and found.load.mean(0) == pytest.approx(
        [1, 1], abs=0.01
    )
    even = found.scaled(np.ones(len(found.frames)))
    assert even == pytest.approx(found.steps.real.sum(1))
    twice = found.scaled(np.full(len(found.frames), 2.0))
    forward, backward, optimizer = (found.steps.ops.index(n) for n in ("forward", "backward", "optimizer"))
    assert (twice - even).sum() == pytest.approx(found.steps.real[:, [forward, backward, optimizer]].sum())


def test_blocks_of_steps():
    assert blocks(5).tolist() == [0] * 5 and blocks(0).tolist() == []
    assert blocks(23).tolist() == [0] * 10 + [1] * 13
    values = np.array([[1.0, 5.0]] * 10 + [[2.0, 7.0]] * 10)
    values[3] = 100
    assert (typical(values) == np.array([[1.0, 5.0]] * 10 + [[2.0, 7.0]] * 10)).all()


def test_the_pace_of_an_account_is_by_the_same_costs():
    training = Training(ranks=4, noise=0.0)
    training.slow, training.long = {2: 1.3}, {1: 1.6}
    events = training.run(steps=10).events
    pace, work = account(events).pace, rates(read_steps(events))
    assert pace == pytest.approx(work.excess.mean(0), rel=1e-3) and pace == pytest.approx([1, 1, 1.3, 1], rel=0.01)
