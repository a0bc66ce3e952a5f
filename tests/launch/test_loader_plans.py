"""Plans of loaders in a run: by cost and by the weights ahead, on record before they are followed."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.errors import raises
from tests.flows import tiny
from tilth.config.schema import DataConfig, MixtureSource
from tilth.core.errors import RecipeError, StorageError
from tilth.core.random import stream
from tilth.data.mixture import Mixture
from tilth.launch import loader_plans
from tilth.launch.loader_plans import (
    AHEAD,
    LoaderPlan,
    LoaderPlans,
    first_plan,
    follow_recorded,
    next_plan,
    processes,
    read_plans,
    record_plan,
    samples_ahead,
)

NAMES = ("few", "more", "late")
PARTS = tuple(
    MixtureSource(name=name, source="addition", schedule={"0": float(name != "late"), "30": 1.0}) for name in NAMES
)


class Loader:
    """The loader's group, with the costs that it has measured."""

    def __init__(self, data, costs, cores=4):
        self.costs, self.cores, self.followed = costs, cores, []
        self.plan = first_plan(data, cores if data.loaders == "auto" else data.loaders)

    def loading(self):
        return {"cores": self.cores, "plan": self.plan, "costs": self.costs}

    def follow(self, plan):
        self.followed.append(plan)
        self.plan = plan


def begun(folder, costs, loaders=4, step=0):
    data = {"source": "", "mixture": [part.model_dump(exclude_defaults=True) for part in PARTS], "loaders": loaders}
    made = tiny.recipe(folder, flow="sft", data=data, supervised={"batch": 12})
    rows = np.split(np.arange(300), 3)
    loader = Loader(made.data, costs)
    train = Mixture(made.data.sources, rows, made.supervised.batch)
    said = []
    run = tiny.stand_in(folder, step, said.append)
    run.said = said
    run.state.phase, run.state.drawn = "sft", {}
    return LoaderPlans(SimpleNamespace(recipe=made, train=train, roles={"loader": loader})), loader, run


def loaders_of(shares):
    """Number of processes by source."""
    return {name: sum(name in own for own in shares) for name in NAMES}


def test_the_first_plan_takes_samples_to_cost_the_same():
    data = DataConfig(source="", mixture=PARTS[:2], loaders=4)
    assert loaders_of(first_plan(data, 4)) == {"few": 2, "more": 2, "late": 0}
    assert first_plan(data, 1) == [{"few": 1.0, "more": 1.0}]
    assert first_plan(DataConfig(loaders=3), 3) == [{"source": pytest.approx(1 / 3)}] * 3


def test_a_plan_that_pays_is_on_record_before_it_is_followed(tmp_path, monkeypatch):
    plans, loader, run = begun(tmp_path, {})
    plans.on_run_start(run)
    assert [plan.step for plan in read_plans(tmp_path)] == [1] and not loader.followed
    loader.costs = {"few": 1e-3, "more": 9e-3}
    plans.on_step_end(run, 9, {})
    assert not loader.followed
    seen = []
    monkeypatch.setattr(loader, "follow", lambda plan: seen.append([plan, read_plans(tmp_path)[-1].shares]))
    plans.on_step_end(run, 10, {})
    ((plan, recorded),) = seen
    assert plan == recorded and read_plans(tmp_path)[-1].step == 11
    assert loaders_of(plan)["more"] > loaders_of(plan)["few"] and loaders_of(plan)["late"] >= 1  # it comes at step 30
    plans.on_step_end(run, 20, {})
    assert len(seen) == 1 and len(read_plans(tmp_path)) == 2  # the same costs


def test_a_plan_that_is_not_on_record_is_not_followed(tmp_path, monkeypatch):
    plans, loader, run = begun(tmp_path, {"few": 1e-3, "more": 9e-3})
    plans.on_run_start(run)

    def full(run, plan):
        raise StorageError("no room", key="x")

    monkeypatch.setattr(loader_plans, "record_plan", full)
    plans.on_step_end(run, 10, {})
    assert not loader.followed and "not followed yet" in run.said[-1]


def test_a_resume_follows_the_plan_on_record_unless_it_is_for_others(tmp_path):
    shares = [{"few": 1.0}, {"more": 1.0}]
    record_plan(tmp_path, LoaderPlan(11, 4, shares))
    plans, loader, run = begun(tmp_path, {})
    plans.on_run_start(run)
    assert loader.followed == [shares] and len(read_plans(tmp_path)) == 1
    plans, loader, run = begun(tmp_path, {}, loaders=2, step=20)
    plans.on_run_start(run)
    assert not loader.followed and read_plans(tmp_path)[-1] == LoaderPlan(21, 2, loader.plan)
    plans, loader, run = begun(tmp_path, {}, loaders="auto")
    assert not follow_recorded(loader, DataConfig(loaders="auto"), tmp_path)


def test_a_plan_of_a_source_that_has_gone_gives_way_to_a_new_one(tmp_path):
    record_plan(tmp_path, LoaderPlan(11, 4, [{"few": 1.0}, {"gone": 1.0}]))
    plans, loader, run = begun(tmp_path, {}, step=20)
    plans.on_run_start(run)
    assert not loader.followed and read_plans(tmp_path)[-1] == LoaderPlan(21, 4, loader.plan)


def test_a_look_ahead_ends_with_the_data():
    parts = (MixtureSource(name="few", at_end="stop"),)
    train, order = Mixture(parts, [np.arange(10)], 4), stream(0, "examples")
    assert samples_ahead(train, order, 0, 4) == [{"few": 4}, {"few": 4}] and samples_ahead(train, order, 8, 4) == []
    endless = Mixture((MixtureSource(name="few"),), [np.arange(10)], 4)
    assert samples_ahead(endless, order, 2, 4) == [{"few": 4}] * AHEAD


def test_without_costs_or_data_ahead_the_plan_stays():
    before = [{"few": 0.5}, {"few": 0.5, "more": 1.0}]
    assert next_plan({}, [{"few": 4}], 2, before) == before == next_plan({"few": 1.0}, [], 2, before)
    one = next_plan({"few": 1.0}, [{"few": 4, "more": 4}], 4, [])
    assert loaders_of(one) == {"few": 2, "more": 2, "late": 0}  # what is not known costs the mean


def test_more_loaders_than_a_machine_takes_are_refused():
    assert processes(DataConfig(loaders="auto"), 2) == 2
    assert processes(DataConfig(loaders=16), 2) == 16
    with raises(RecipeError, "data.loaders.cores"):
        processes(DataConfig(loaders=17), 2)
