import json

import numpy as np
import pytest

from tests.flows.stand_ins import Store, sampler
from tilth.core.batch import Batch
from tilth.data.order import Order
from tilth.flows.heldout import BASELINE_IDS, EVALUATION_IDS, PROBE_IDS, Evaluator
from tilth.rl.metrics import Metric
from tilth.rl.passk import wilson


class Policy:
    """Answers ``likelihood`` and ``pair_eval`` from what it is given."""

    def __init__(self, **answers):
        self.answers = {name: Metric(total, count, "mean") for name, (total, count) in answers.items()}

    def likelihood(self, batch):
        return self.answers

    def pair_eval(self, batch, preference):
        return self.answers


def evaluator(folder, value=lambda i: float(i % 2), policy=None, heldout=6, **sections):
    one = sampler(folder, value, **sections)
    one.roles["policy"] = policy
    refreshed = []
    made = Evaluator(
        one.recipe, one.roles, one, Order(np.arange(heldout) + 10), Store(), one.state, one.metrics,
        lambda: refreshed.append(1),
    )  # fmt: skip
    made.refreshed = refreshed
    return made


def test_an_evaluation_asks_for_the_same_greedy_answers_each_time(tmp_path):
    one = evaluator(tmp_path)
    assert one.evaluate() == one.evaluate() == 0.5
    (first, greedy), (again, _) = one.roles.rollout.asked
    assert greedy and first["id"].tolist() == again["id"].tolist() == list(range(EVALUATION_IDS, EVALUATION_IDS + 6))
    assert set(first["prompt"].tolist()) == set(range(10, 16)) and len(one.refreshed) == 2
    (found,) = one.results().values()
    assert found["accuracy/heldout"] == found["reward/heldout"] == 0.5 and one.results() == {}
    assert found["reward/heldout/prompts"] == 6
    assert (found["reward/heldout/low"], found["reward/heldout/high"]) == wilson(3, 6)[1:]


def test_ids_of_evaluations_probes_and_baselines_are_apart():
    assert BASELINE_IDS + 2**40 <= PROBE_IDS and PROBE_IDS + 2**40 <= EVALUATION_IDS and EVALUATION_IDS + 2**40 <= 0


def test_the_best_evaluation_is_the_earliest_of_equals_and_never_the_one_before_the_first_step(tmp_path):
    score = [1.0]
    one = evaluator(tmp_path, lambda i: score[0])
    best = []
    for step, value in enumerate([1.0, 0.0, 1.0, 1.0]):
        one.state.step, score[0], one.improved = step, value, False
        one.evaluate_heldout()
        best.append((one.state.best and one.state.best["step"], one.improved))
    assert best == [(None, False), (1, True), (2, True), (2, False)]


@pytest.mark.parametrize("heldout, value", [(0, lambda i: 1.0), (6, lambda i: None if i < 0 else 1.0)])
def test_without_answers_or_rewards_there_is_no_figure(tmp_path, heldout, value):
    one = evaluator(tmp_path, value, heldout=heldout)
    one.sampler._reward_worked = True
    assert one.evaluate() is None and one.results() == {} and "reward/heldout" not in one.metrics.values()


def test_a_supervised_phase_is_judged_by_its_loss_and_less_is_better(tmp_path):
    one = evaluator(tmp_path, policy=Policy(loss=(6.0, 3)), flow="sft")
    del one.roles["rollout"]
    one.state.phase, one.state.step = "sft", 2
    one.evaluate_heldout()
    assert one.state.best == {"step": 2, "metric": "loss/heldout", "value": 2.0}
    one.roles["policy"], one.state.step = Policy(loss=(3.0, 3)), 4
    one.evaluate_heldout()
    assert one.state.best == {"step": 4, "metric": "loss/heldout", "value": 1.0}


def test_pairs_are_judged_by_their_order(tmp_path):
    one = evaluator(tmp_path, policy=Policy(loss=(0.5, 1), **{"rewards/accuracy": (3, 4)}), flow="dpo")
    assert one.measure() == ("accuracy/pairs", 0.75)
    ends = dict(zip(("accuracy/pairs/low", "accuracy/pairs/high"), wilson(3, 4)[1:]))
    assert one.metrics.values() == {"loss/pairs": 0.5, "accuracy/pairs": 0.75, **ends}


def test_each_row_gets_the_reward_of_its_prompts_greedy_answer(tmp_path):
    one = evaluator(tmp_path, lambda i: {BASELINE_IDS: 0.25, BASELINE_IDS + 1: None}.get(i, 1.0))
    found = one.baselines(Batch({"prompt": np.array([7, 3, 7, 5])}))["baselines"]
    assert np.array_equal(found, [1.0, 0.25, 1.0, np.nan], equal_nan=True)
    assert one.metrics.values()["baseline/missing"] == 1 and one.metrics.values()["tokens/baseline"] == 6


def test_a_change_is_measured_from_the_evaluation_that_began_the_phase(tmp_path):
    right = [set(range(20))]
    one = evaluator(tmp_path, lambda i: float((i - EVALUATION_IDS) in right[0]), heldout=40, run={"eval_prompts": 40})
    one.evaluate()
    assert "reward/heldout/change_low" not in one.metrics.values()  # there was nothing before
    one.state.outcomes_first = json.loads(json.dumps(one.state.outcomes))  # as a checkpoint has it
    for better, shown in ((1, False), (12, True)):
        right[0] = set(range(20 + better))
        one.evaluate()
        found = one.metrics.values()
        assert (found["reward/heldout/change_low"] > 0) == shown and found["reward/heldout/change_high"] > 0
