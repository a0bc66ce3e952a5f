"""A model with experts goes through a whole recipe: alike in every layout, replayed or not, in parity, and resumed."""

from functools import partial

import pytest
import torch

from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_cluster import LAYOUTS, assert_near, shared, workers  # noqa: F401  (fixtures)
from tilth.core.errors import RecipeError
from tilth.flows.callbacks import Callback
from tilth.runs.models import load_model
from tilth.runs.readers import read_metrics

MODEL = {**tiny.SHAPE, "layers": 2, "context": 16, "family": "qwen3_moe", "experts": 4, "dense_layers": 1}
GRPO = {
    "model": MODEL,
    "supervised": {"steps": 3, "check_every": 3, "batch": 16, "lr": 5e-3},
    "algorithm": {"minibatches": 2, "steps": 3},
}


def train(**keys):
    return {"threads": 1, "router_balance": 0.01, **keys}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on one process."""
    return tiny.run(tiny.recipe(tmp_path_factory.mktemp("one"), **GRPO, train=train()))


@pytest.mark.slow  # tests/parallel/test_experts_trained.py has each layout
@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    ["fsdp", "dp", "tp, sp", "pp", "pp, zero-bubble", "cp"],
)
def test_grpo_of_experts_learns_in_every_layout_as_on_one_process(tmp_path, shared, alone, layout):  # noqa: F811
    ours = tiny.run(tiny.recipe(tmp_path, **GRPO, train=train(), **LAYOUTS[layout]))
    assert_near(ours, alone, rel=2e-4, abs=2e-5)
    for a, b in zip(read_metrics(ours.directory), read_metrics(alone.directory)):
        assert a["experts/load_max"] == pytest.approx(b["experts/load_max"], rel=1e-6)
        assert a["experts/balance_loss"] == pytest.approx(b["experts/balance_loss"], rel=1e-4)
    wanted = load_model(alone.directory).tensors
    for name, tensor in load_model(ours.directory).tensors.items():
        assert torch.allclose(tensor, wanted[name], atol=2e-4), name


def rl_steps(run):
    return [m for m in read_metrics(run.directory) if "mismatch/max" in m or "experts/flips" in m]


def test_the_trainer_sees_how_far_the_engine_routes_otherwise(alone):
    """Weights of both are equal in fp32, so hardly any choice differs at the first update."""
    steps = rl_steps(alone)
    assert len(steps) == 3 and all(m["experts/flips"] < 0.02 and m["experts/dropped"] == 0 for m in steps)


@pytest.mark.slow
def test_parity_holds_for_experts(tmp_path):
    short = {**GRPO, "supervised": {"steps": 1}, "algorithm": {"steps": 2}}
    found = tiny.run(tiny.recipe(tmp_path, **short, train=train(parity=True)))
    assert [(m["mismatch/max"], m["experts/flips"]) for m in rl_steps(found)] == [(0.0, 0.0)] * 2


def test_replayed_choices_train_as_well_and_own_choices_are_not_recorded(tmp_path, alone):
    replayed = tiny.run(tiny.recipe(tmp_path / "replay", **GRPO, train=train(routing="replay")))
    assert_near(replayed, alone, rel=2e-3, abs=2e-4)  # both route alike, but for a flip or two
    short = {**GRPO, "supervised": {"steps": 1}, "algorithm": {"steps": 1}}
    own = tiny.run(tiny.recipe(tmp_path / "own", **short, train=train(routing="own")))
    assert not any("experts/flips" in m for m in read_metrics(own.directory))


@pytest.mark.slow
def test_a_critic_has_experts_of_its_own(tmp_path):
    keys = {"flow": "ppo", "algorithm": {"advantage": "gae", "steps": 2}, "critic": {"steps": 1}, "model": MODEL}
    found = read_metrics(tiny.run(tiny.recipe(tmp_path, **keys, train=train())).directory)
    assert "value/experts/load_max" in found[-1] and "experts/load_max" in found[-1]


@pytest.mark.dist
@pytest.mark.slow
def test_weights_of_one_layout_go_into_another(tmp_path, shared):  # noqa: F811
    first = tiny.run(tiny.recipe(tmp_path / "first", **GRPO, train=train(), **LAYOUTS["fsdp"]))
    again = {"model": {"path": str(first.directory)}, "algorithm": {"steps": 2}, "supervised": {"steps": 0}}
    on_two = tiny.run(tiny.recipe(tmp_path / "two", **again, train=train(), **LAYOUTS["tp, sp"]))
    on_one = tiny.run(tiny.recipe(tmp_path / "one", **again, train=train()))
    assert_near(on_two, on_one, rel=2e-4, abs=2e-5)


class Stop(Callback):
    def on_step_end(self, run, step, metrics):
        if step == 5:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, alone):
    with pytest.raises(KeyboardInterrupt):
        tiny.run(tiny.recipe(tmp_path, **GRPO, train=train()), callbacks=[Stop()])
    again = tiny.run(tiny.recipe(tmp_path, **GRPO, train=train()))
    assert tiny.same(tiny.numbers(again.directory), tiny.numbers(alone.directory))
    assert tiny.weights(again.directory) == tiny.weights(alone.directory)


def test_replay_without_a_record_is_refused(tmp_path):
    """An engine of a plugin need not record."""
    made = tiny.recipe(tmp_path, **GRPO, train=train(routing="replay"))
    with raises(RecipeError, key="train.routing"):
        tiny.run(made, callbacks=[Forget()])


class Forget(Callback):
    """The engine forgets the experts."""

    def on_run_start(self, run):
        engine = tiny.worker(run.rollout).engine
        engine._new_dense = partial(engine._new_dense, routing=False)
