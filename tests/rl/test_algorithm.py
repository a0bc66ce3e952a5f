"""The resolved algorithm: made once, the same in every process, and what follows from it is refused or done."""

import pickle

import pytest
import torch

import tilth
from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tests.flows import tiny
from tilth.config.flows import FLOWS
from tilth.config.load import dump_toml, from_dict, load_recipe
from tilth.core.errors import PluginError, RecipeError
from tilth.launch.checks import check_algorithm
from tilth.rl import registry
from tilth.rl.algorithm import Algorithm, names
from tilth.rl.kl import KlForm

SAMPLING = [name for name, flow in FLOWS.items() if flow.samples]


def recipe(flow, **algorithm):
    more = {"reference": {"path": "x"}} if flow == "distill" else {"judge": {"path": "x"}} if flow == "fapo" else {}
    return from_dict({"flow": flow, "algorithm": algorithm, **more})


@pytest.mark.parametrize("flow", SAMPLING)
def test_every_flow_is_resolved_and_another_process_has_the_same(flow):
    one = Algorithm.of(recipe(flow))
    other = pickle.loads(pickle.dumps(one))
    assert (other.estimator, other.loss, other.aggregation) == (one.estimator, one.loss, one.aggregation)
    assert one.loss is one.loss and one.estimator is one.estimator
    for entry in one.chosen.values():
        assert set(entry.needs) <= one.available


def test_an_entry_of_ones_own_travels_too():
    @tilth.advantage("mine_travels")
    def mine(rewards, *, scale: float = 1.0):
        return scale * rewards

    sent = Algorithm.of(recipe("grpo", advantage="mine_travels", options={"scale": 0.5}))
    found = pickle.loads(pickle.dumps(sent)).estimator
    assert found.entry_name == "mine_travels" and found.scale == 0.5


@pytest.mark.slow
def test_names_are_resolved_as_often_for_many_micro_batches_as_for_one(tmp_path, monkeypatch):
    looked = []
    lookup = registry.lookup
    monkeypatch.setattr(registry, "lookup", lambda kind, name: looked.append((kind, name)) or lookup(kind, name))
    counts = {}
    for tokens in (16_384, 32):
        looked.clear()
        short = {"supervised": {"steps": 0}, "algorithm": {"steps": 2, "drop_flat": False}}
        tiny.run(tiny.recipe(tmp_path / str(tokens), train={"threads": 1, "micro_tokens": tokens}, **short))
        counts[tokens] = [name for kind, name in looked if kind in ("losses", "advantages", "corrections")]
    assert counts[16_384] == counts[32]


# ---- what cannot work is refused before the run ----


@pytest.mark.parametrize("flow", ["ppo", "vapo"])
def test_greedy_baselines_are_not_made_beside_a_critic(tmp_path, flow):
    text = "import tilth\n@tilth.advantage('mine_both')\ndef both(rewards, values, baselines): return values\n"
    plugins = {"plugins": [str(write(tmp_path, text))]}
    with raises(RecipeError, "baselines"):
        check_algorithm(from_dict({"flow": flow, "algorithm": {"advantage": "mine_both"}, **plugins}))


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "reinforce", "sapo", "gpg", "kl_cov"])
@pytest.mark.parametrize("key", ["clip_low", "clip_high"])
def test_a_clip_that_is_said_to_a_loss_without_one_is_refused_whatever_its_value(loss, key):
    for value in (0.2, 0.3):
        with pytest.raises(RecipeError) as caught:
            check_algorithm(recipe("grpo", loss=loss, **{key: value}))
        assert f"algorithm.{key} = {value}" in str(caught.value)
    for flow in ("grpo", "dapo"):  # whose own clip nobody said
        check_algorithm(recipe(flow, loss=loss))


def test_what_a_run_keeps_was_not_said(tmp_path):
    kept = tmp_path / "recipe.toml"
    kept.write_text(dump_toml(recipe("grpo", loss="dppo_tv")))
    check_algorithm(load_recipe(str(kept)))


def test_what_was_said_is_known_and_defaults_are_not():
    assert recipe("dapo", loss="gspo").algorithm.model_fields_set == {"loss"}
    assert from_dict({}).algorithm.model_fields_set == set()
    assert pickle.loads(pickle.dumps(recipe("dapo", clip_low=0.2))).algorithm.model_fields_set == {"clip_low"}


def test_a_function_that_exits_is_named():
    @tilth.advantage("mine_exits")
    def exits(rewards):
        raise SystemExit(3)

    with raises(PluginError, "mine_exits"):
        tilth.rl.estimate_rows("mine_exits", rewards=torch.ones(1))


@pytest.mark.parametrize("form", names()["kl"])
def test_a_form_of_the_kl_penalty_can_be_pickled(form):
    made = registry.build("kl", form, {}, KlForm)
    again, d = pickle.loads(pickle.dumps(made)), torch.tensor([-0.5, 0.0, 2.0])
    assert type(again) is type(made) and again == made and torch.equal(again.value(d), made.value(d))
