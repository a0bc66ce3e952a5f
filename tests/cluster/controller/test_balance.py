"""Balance of a run's calls: which costs hold at which step, and figures beside their definitions."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.launch.laws import costs_of
from tilth.cluster.controller.balance import FEW, RowBalance, idle, padding, spread
from tilth.core.errors import DataError
from tilth.plan.batch import RankLoad, plan_batch, token_costs

LOADS = st.lists(st.lists(st.integers(1, 50), max_size=4), min_size=1, max_size=5).filter(any)


def load(*tokens):
    n = np.array(tokens, np.float64)
    return RankLoad(2 * n, n, n**2)


def sums(seconds):
    """The sums of a rank's spans; what is nested in a pass is not its own time."""
    return {
        op: [9e9, 1e9 * part, 1, 0, 0, 0, 0, 0] for op, part in (("forward", seconds / 4), ("backward", 0.75 * seconds))
    }


@given(LOADS)
def test_figures_are_what_they_say(ranks):
    loads = [load(*tokens) for tokens in ranks]
    costs = [2.0 * sum(tokens) for tokens in ranks]
    assert spread(loads) == pytest.approx((max(costs) - min(costs)) / np.mean(costs))
    rounds = range(max(map(len, ranks)))
    fullest = [max(tokens[k] if k < len(tokens) else 0 for tokens in ranks) for k in rounds]
    empty = sum(f - (tokens[k] if k < len(tokens) else 0) for k, f in enumerate(fullest) for tokens in ranks)
    assert padding(loads) == pytest.approx(empty / (len(ranks) * sum(fullest)))
    waits = max(costs) * len(costs) - sum(costs)
    assert idle(np.array(costs)) == pytest.approx(waits / (max(costs) * len(costs)))


def test_nothing_to_do_is_even():
    assert spread([load()]) == padding([load(), load()]) == idle(np.zeros(3)) == 0


def followed(balance, step):
    """The costs by which calls of a step are planned."""
    plan = balance.planner(step)
    assert plan.func is plan_batch
    return plan.keywords.get("costs", inspect.signature(plan_batch).parameters["costs"].default)


def test_costs_hold_from_their_step_on_whatever_the_order_of_their_arrival():
    balance, lengths = RowBalance("cost"), np.array([1.0, 10.0])
    with raises(DataError, "train.balance.early"):
        balance.planner(1)
    balance.use(51, costs_of(3e-6))
    balance.use(1, costs_of(1e-6))
    found = {step: followed(balance, step)(lengths)[0] * 1e6 for step in (-1, 1, 50, 51, 900)}
    assert found == pytest.approx({-1: 1, 1: 1, 50: 1, 51: 3, 900: 3})
    balance.use(51, costs_of(5e-6))
    assert followed(balance, 60)(lengths)[0] == pytest.approx(5e-6)
    with raises(DataError, "policy.forward"):
        balance.use(70, costs_of(1e-6, role="critic"))


@pytest.mark.parametrize("by", ["tokens", "none"])
def test_tokens_count_where_costs_are_not_asked_for(by):
    balance = RowBalance(by)
    balance.use(1, costs_of(1e-6))
    assert followed(balance, 5) is token_costs and balance.planner(5).keywords == {"balance": by}


def test_a_call_leaves_its_figures_once():
    balance = RowBalance()
    balance.note("policy", 1, [load(30), load(10)], [sums(3.0), sums(1.0)])
    found = dict(balance.take())
    assert found == pytest.approx({"balance/spread": 1.0, "padding": 1 / 3, "balance/idle": 1 / 3})
    assert balance.take() == [] and balance.times == []


def test_what_is_not_measured_is_left_out():
    timed = RowBalance(measures=False)
    timed.note("policy", 1, [load(30), load(10)], [sums(3.0), sums(1.0)])
    silent = RowBalance()
    silent.note("policy", 1, [load(30), load(10)], [sums(3.0), {}])
    assert {name for name, _ in timed.take()} == {name for name, _ in silent.take()} == {"balance/spread", "padding"}
    alone = RowBalance()
    alone.note("policy", 1, [load(30)], [{}])  # inline: its spans are the controller's
    assert dict(alone.take())["balance/idle"] == 0


def test_times_are_those_of_a_mean_micro_batch_of_the_policy():
    balance = RowBalance("cost")
    balance.collects = True
    balance.note("critic", 7, [load(30)], [sums(3.0)])
    balance.note("policy", 7, [load(30, 10), load()], [sums(3.0), sums(1.0)])
    (found,) = balance.times
    assert found == (0, 7, 20.0, 500.0, pytest.approx(1.5))


def test_of_many_ranks_a_few_are_kept():
    balance = RowBalance("cost")
    balance.collects = True
    balance.note("policy", 1, [load(1)] * 1000, [sums(1.0)] * 1000)
    assert FEW / 2 < len(balance.times) <= FEW
