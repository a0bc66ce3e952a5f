"""Costs that rows are placed by: where they come from, that a resume follows the same, and that they predict."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from tests.errors import raises
from tests.flows import tiny
from tests.launch.laws import costs_of, times_of
from tilth.cluster.controller.balance import RowBalance
from tilth.cluster.protocol import Transfer
from tilth.core.errors import DataError, StorageError
from tilth.launch import balance_costs
from tilth.launch.balance_costs import ENOUGH, OWN, PROFILE, CostFits, better, cached, fitted, micro_batches
from tilth.models.family import new_config
from tilth.plan.batch import MicroBatchLimits, RowTable, plan_batch
from tilth.plan.costs import load_costs, save_costs
from tilth.plan.offload import HostRates, OffloadLimits
from tilth.runs.costs import COSTS, OFFLOAD, read_costs, read_rates
from tilth.runs.readers import read_metrics

LAW = (2e-6, 3e-9, 1e-3)


def begun(folder, step=0, **sections):
    """CostFits of a run that begins after this step, its balance and the run."""
    sections = {"train": {"balance": "cost"}, **sections}
    made = tiny.recipe(folder, **sections)
    said = []
    run = tiny.stand_in(folder, step, said.append)
    run.said = said
    balance = RowBalance(made.balance)
    parts = SimpleNamespace(recipe=made, config=new_config(made.model, 20), roles=SimpleNamespace(policy=None))
    return CostFits(parts, SimpleNamespace(balance=balance)), balance, run


@pytest.fixture
def profiled(monkeypatch):
    """A profile that takes no time; counts its calls."""
    calls = []
    monkeypatch.setattr(balance_costs, "profile", lambda policy, recipe: calls.append(1) or costs_of(*LAW))
    return calls


def token(balance, step):
    return float(balance.planner(step).keywords["costs"](np.array([1.0]))[0])


def test_a_profile_is_made_once_for_a_model_and_recorded(tmp_path, profiled):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        fits, balance, run = begun(folder, run={"dir": str(tmp_path)})
        fits.on_run_start(run)
        assert token(balance, 1) == pytest.approx(LAW[0] + LAW[1]) and balance.collects
        assert [fit.step for fit in read_costs(folder)] == [1] and "error 1.0% (p90 2.0%)" in run.said[-1]
    assert len(profiled) == 1
    other = new_config(tiny.recipe(tmp_path, model={"layers": 2}).model, 20)
    made = tiny.recipe(tmp_path)
    assert cached(made, other) != cached(made, new_config(made.model, 20))
    assert cached(made.replaced("train", precision="bf16"), other) != cached(made, other)


def test_a_damaged_cache_is_told_and_made_again(tmp_path, profiled):
    fits, _, run = begun(tmp_path)
    path = cached(fits._parts.recipe, fits._parts.config)
    path.parent.mkdir()
    path.write_text("{")
    fits.on_run_start(run)
    assert profiled == [1] and path.name in run.said[0]


def test_a_file_is_followed_as_it_is(tmp_path, profiled):
    save_costs(costs_of(*LAW), tmp_path / "costs.json")
    fits, balance, run = begun(tmp_path, cluster={"costs": str(tmp_path / "costs.json")}, train={})
    fits.on_run_start(run)
    assert not profiled and not balance.collects and token(balance, 1) == pytest.approx(LAW[0] + LAW[1])
    again, balance, run = begun(tmp_path, 9, cluster={"costs": str(tmp_path / "costs.json")}, train={})
    save_costs(costs_of(5e-6), tmp_path / "costs.json")
    again.on_run_start(run)
    assert [fit.step for fit in read_costs(tmp_path)] == [1, 10]
    assert (token(balance, 9), token(balance, 10)) == pytest.approx((LAW[0] + LAW[1], 5e-6))
    save_costs(costs_of(5e-6, role="critic"), tmp_path / "costs.json")
    with raises(DataError, "policy.forward"):
        again.on_run_start(run)


def test_a_run_is_fitted_once_from_the_next_step_on_and_a_resume_follows_it(tmp_path, profiled):
    fits, balance, run = begun(tmp_path)
    fits.on_run_start(run)
    law = (4e-6, 1e-9, 2e-3)
    balance.times += times_of(law, ENOUGH - 1)
    fits.on_step_end(run, ENOUGH - 1, {})
    assert len(read_costs(tmp_path)) == 1
    balance.times += [one._replace(step=ENOUGH) for one in times_of(law, 1)]
    fits.on_step_end(run, ENOUGH, {})
    assert [(fit.step, fit.source) for fit in read_costs(tmp_path)] == [(1, PROFILE), (ENOUGH + 1, OWN)]
    assert (token(balance, ENOUGH), token(balance, ENOUGH + 1)) == pytest.approx((LAW[0] + LAW[1], law[0] + law[1]))
    assert not balance.collects and not balance.times
    resumed, again, run = begun(tmp_path, ENOUGH // 2)
    resumed.on_run_start(run)
    assert [token(again, step) for step in (1, ENOUGH, ENOUGH + 1)] == [
        token(balance, step) for step in (1, ENOUGH, ENOUGH + 1)
    ]
    assert not again.collects and len(read_costs(tmp_path)) == 2 and len(profiled) == 1


def test_a_file_given_to_a_resume_replaces_costs_that_were_to_begin_later(tmp_path, profiled):
    fits, balance, run = begun(tmp_path)
    fits.on_run_start(run)
    balance.times += times_of((4e-6, 1e-9, 2e-3), ENOUGH)
    fits.on_step_end(run, ENOUGH, {})
    save_costs(costs_of(7e-6, 1e-9, 1e-3), tmp_path / "costs.json")
    resumed, again, run = begun(tmp_path, ENOUGH // 2, cluster={"costs": str(tmp_path / "costs.json")})
    resumed.on_run_start(run)
    assert token(again, ENOUGH // 2 + 1) == token(again, ENOUGH + 9) == pytest.approx(7e-6 + 1e-9)
    assert token(again, 1) == token(balance, 1)


def test_costs_that_cannot_be_recorded_are_not_followed(tmp_path, profiled, monkeypatch):
    fits, balance, run = begun(tmp_path)
    fits.on_run_start(run)
    balance.times += times_of((4e-6, 1e-9, 2e-3), ENOUGH)

    def full(*_):
        raise StorageError("no room", key=COSTS)

    with monkeypatch.context() as patched:
        patched.setattr(balance_costs, "record_costs", full)
        fits.on_step_end(run, ENOUGH, {})
    assert token(balance, 900) == pytest.approx(LAW[0] + LAW[1]) and "no room" in run.said[-1]
    fits.on_step_end(run, ENOUGH + 1, {})
    assert read_costs(tmp_path)[-1].step == ENOUGH + 2


def test_a_damaged_record_stops_a_resume(tmp_path, profiled):
    (tmp_path / COSTS).write_text("{}\n")
    fits, _, run = begun(tmp_path)
    with raises(DataError, f"{COSTS}.1"):
        fits.on_run_start(run)


def test_by_tokens_nothing_is_done(tmp_path, profiled):
    fits, balance, run = begun(tmp_path, train={"balance": "tokens"})
    fits.on_run_start(run)
    fits.on_step_end(run, 1, {})
    assert not profiled and not (tmp_path / COSTS).exists() and not balance.collects


def test_the_law_behind_the_times_comes_back_with_its_error():
    found = fitted(times_of(LAW, 60, noise=0.05))
    assert (found.per_token, found.per_square, found.fixed) == pytest.approx(LAW, rel=0.1)
    assert found.error.held_out and found.error.median == pytest.approx(0.05 * 0.6745, rel=0.5)


def test_costs_that_predict_better_stay_with_the_error_in_this_run():
    times = times_of((2e-6, 0.0, 0.0), 5, noise=0.2)
    kept = better(costs_of(2e-6), times)
    assert kept.compute[0].per_token == 2e-6 and 0.05 < kept.compute[0].error.median < 0.3
    law = (2e-6, 3e-9, 1e-3)
    assert better(costs_of(9e-6), times_of(law, 60)).compute[0].per_token == pytest.approx(law[0], rel=1e-3)


def test_a_profile_grows_by_no_more_than_four_times_and_has_what_a_fit_needs(tmp_path):
    made = tiny.recipe(tmp_path, model={"context": 3000}, train={"micro_tokens": 5000})
    found = list(micro_batches(made))
    work = [(sum(lengths), sum(n * n for n in lengths)) for lengths in found]
    assert max(sum(lengths) for lengths in found) <= 5000 and max(max(lengths) for lengths in found) == 3000
    for (tokens, squares), (more, longer) in pairwise(work):
        assert more <= 4 * tokens and longer <= 16 * squares
    longest = [squares / tokens for tokens, squares in work]
    assert max(longest) > 10 * min(longest) and max(t for t, _ in work) > 10 * min(t for t, _ in work)


def test_a_run_profiles_its_model_and_learns_the_same(tmp_path):
    """On one rank the plan has nothing to place: only the order of micro-batches may differ, and here there is one."""
    given = {"flow": "sft", "supervised": {"steps": 2, "batch": 8}, "model": {"context": 24}}
    by_cost = tiny.run(tiny.recipe(tmp_path / "a", train={"balance": "cost"}, **given)).directory
    by_tokens = tiny.run(tiny.recipe(tmp_path / "b", **given)).directory
    (fit,) = read_costs(by_cost)
    assert fit.source == PROFILE and float(fit.costs.rows("policy")(np.array([20.0]))[0]) > 0
    assert fit.costs.about["seconds"] < 20
    assert tiny.same(tiny.numbers(by_cost), tiny.numbers(by_tokens))
    for record in read_metrics(by_cost):
        assert record["balance/spread"] == record["balance/idle"] == record["padding"] == 0
    assert not (by_tokens / COSTS).exists()


def test_a_profile_takes_the_shortest_of_its_tries_and_ends_in_time(tmp_path, monkeypatch):
    clock, calls = [0.0], []

    def time_passes(lengths):
        calls.append(sum(lengths))
        law = LAW[0] * sum(lengths) + LAW[1] * sum(n * n for n in lengths) + LAW[2]
        clock[0] += 300 * law
        return [law * (1 + 9 * (len(calls) % balance_costs.TRIES != 0)), 2 * law]

    monkeypatch.setattr(balance_costs.time, "monotonic", lambda: clock[0])
    policy = SimpleNamespace(mesh=(0, 1), time_passes=time_passes)
    made = tiny.recipe(tmp_path, model={"context": 3000}, train={"micro_tokens": 50_000})
    (found,) = balance_costs.profile(policy, made).compute
    ranks = dict(found.ranks)
    assert ranks[1] / ranks[0] == pytest.approx(2, rel=1e-6)
    assert clock[0] < 20 and max(calls) < 50_000


def test_rates_of_offloading_are_recorded_once_and_all_roles_follow_them(tmp_path):
    """Another rate, of another role or after a resume, would place rows on other ranks; without units it may."""
    many, few = (OffloadLimits(8, 1.0, np.square, HostRates(1.0, 1e9, flops)) for flops in (1.0, 1e9))
    placed = {"cluster": {"backend": "local", "workers": 4}, "train": {"offload": "auto", "device": "cuda"}}

    def resumed(folder, measured, **layout):
        fits, balance, run = begun(folder, **placed, policy={"layout": layout})
        planned = Transfer("plan", "merge", limits=MicroBatchLimits(50, offload=measured))
        fits._parts.roles.policy = SimpleNamespace(methods={"save": Transfer("all", "all"), "learn": planned})
        fits.on_run_start(run)
        return balance.planner(1)

    def ranks(plan, own):
        table = RowTable(np.full(4, 200), *np.zeros((2, 4), np.int64))
        found = plan(table, None, 4, MicroBatchLimits(50, offload=own), units=4).ranks[0].learn[0].ranks
        return len(found) or 1

    for name, first, wide in (("many", many, 1), ("few", few, 4)):
        (tmp_path / name).mkdir()
        plans = [resumed(tmp_path / name, each, hdp=4) for each in (first, many, few)]
        assert {ranks(plan, own) for plan in plans for own in (many, few, 0.0)} == {wide}
        assert read_rates(tmp_path / name) == first.rates
    assert ranks(plan_batch, many) == 1 and ranks(plan_batch, few) == 4
    (tmp_path / "none").mkdir()
    resumed(tmp_path / "none", many, dp=4)
    assert read_rates(tmp_path / "none") is None
    (tmp_path / "few" / OFFLOAD).write_text('{"bandwidth": 1, "host": 0, "flops": 1}')
    with raises(DataError, OFFLOAD):
        resumed(tmp_path / "few", many, hdp=4)


def test_the_ring_of_units_is_measured_followed_and_kept(tmp_path, monkeypatch):
    """A try takes as long as its slowest rank; with the ring the long row is on as many ranks as hide it."""
    tries = iter([[5.0, 9.0], [6.0, 4.0], [1.0, 8.0]])
    policy = SimpleNamespace(time_passes=lambda lengths: [2e-6 * sum(lengths)] * 2, time_ring=lambda n: next(tries))
    monkeypatch.setattr(balance_costs, "micro_batches", lambda recipe: [[32 * n] for n in range(1, 20)])
    units = {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"hdp": 2}}}
    made = tiny.recipe(tmp_path, model={"context": 3000}, train={"micro_tokens": 1000, "balance": "cost"}, **units)
    found = balance_costs.profile(policy, made)
    assert found.ring == 6.0 / 2000
    kept = better(replace(found, ring=7e-3), times_of((1.0, 0.0, 0.0), 60))
    assert kept.ring == 7e-3 and kept.about["source"] == OWN
    save_costs(found, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json").ring == found.ring
    balance, table = RowBalance("cost"), RowTable(np.array([900, 20]), *np.zeros((2, 2), np.int64))
    balance.use(1, costs_of(1e-6))
    balance.use(2, replace(costs_of(1e-6), ring=1e-3))
    for step, wide in ((1, 4), (2, 3)):
        plan = balance.planner(step)(table, None, 4, MicroBatchLimits(300), units=4)
        assert {len(micro.ranks) for rank in plan.ranks for micro in rank.learn if micro.several} == {wide}
