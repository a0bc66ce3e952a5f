"""Flows dpo and reward_model from recipe to checkpoint, and a reward model as the reward of another run."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch

from tests.data.reading import load_pairs
from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_cluster import LOCAL, shared, workers
from tilth.api import train
from tilth.checkpoint import open_checkpoint, read_best
from tilth.config.load import load_recipe, names
from tilth.core.errors import DataError, ModelError, RecipeError
from tilth.data.examples import pairs_of
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.models.attention import PackedContext
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained
from tilth.runs.export import write_model
from tilth.runs.models import load_model
from tilth.runs.readers import read_metrics, read_trajectories
from tilth.runs.signals import Interrupted

__all__ = ["shared", "workers"]
pytestmark = pytest.mark.usefixtures("two_layers")
FLOWS = ("dpo", "reward_model")
SHORT = {"supervised": {"steps": 1}, "algorithm": {"steps": 2}}
PAIRS = {"supervised": {"steps": 6, "batch": 8, "check_every": 3, "lr": 5e-3}}


def learn(folder, flow, *, name="", callbacks=(), **sections):
    """One-digit addition in pairs."""
    recipe = tiny.recipe(folder, **{"flow": flow, **PAIRS, **sections})
    return tiny.run(recipe, name=name or flow, reward=None, callbacks=callbacks)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A model that has seen answers."""
    return tiny.learn(tmp_path_factory.mktemp("sft"), "sft", run={"eval_prompts": 8}).directory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return {flow: learn(folder, flow) for flow in FLOWS}


# ---- what a run is ----


@pytest.mark.parametrize("flow", FLOWS)
def test_a_run_begins_at_log_2_and_says_of_each_step_what_it_did(made, flow):
    records = read_metrics(made[flow].directory)
    assert [r["phase"] for r in records] == [flow] * 6
    assert records[0]["loss"] == records[0]["loss/pairs"] == math.log(2) and records[0]["accuracy/pairs"] == 0.5
    assert [r["step"] for r in records if "accuracy/pairs" in r] == [1, 3, 6]
    assert records[-1]["loss"] != math.log(2) != records[-1]["loss/pairs"] and records[-1]["rewards/margin"] != 0
    assert all(r["pairs"] == 8 and r["tokens/trained"] == 16 * 7 for r in records)
    assert ("logprobs/chosen" in records[0]) == (flow == "dpo") == ("accuracy/heldout" in records[0])
    assert read_trajectories(made[flow].directory).num_rows == 0


def test_the_best_reward_model_by_held_out_pairs_is_kept(made):
    directory = made["reward_model"].directory
    best, records = read_best(directory / "checkpoints"), read_metrics(directory)
    measured = {r["step"]: r["accuracy/pairs"] for r in records if "accuracy/pairs" in r and r["step"] > 1}
    assert best["metric"] == "accuracy/pairs" and best["value"] == max(measured.values())
    told = made["reward_model"].summary["best"]
    low, high = told.pop("range")
    assert measured[best["step"]] == best["value"] and told == best and low < best["value"] < high
    assert load_model(f"{directory}@best", "reward_model").step == best["step"]


def scored(directory, which, prompts, indices):
    """Scores of chosen and rejected answers, one sequence at a time."""
    loaded = load_model(f"{directory}{which}", "reward_model")
    model = ValueModel(Decoder(loaded.config))
    model.load_state_dict({name: loaded.tensors[name] for name in loaded.tensors})
    template, found = make_template("", loaded.tokenizer), []
    for i in indices:
        (asked,) = template.prompts([prompts[i]])
        for answer in pairs_of(prompts, i)[0][:2]:
            ids = [*asked, *loaded.tokenizer.encode(answer, special=False), loaded.tokenizer.eos_id]
            with torch.no_grad():
                found.append(float(model.score(model(torch.tensor(ids), PackedContext([len(ids)])))[-1]))
    return np.array(found).reshape(-1, 2)


def test_what_a_run_says_of_held_out_pairs_is_what_its_checkpoint_says(made):
    directory = made["reward_model"].directory
    prompts = load_pairs(load_recipe(str(directory / "recipe.toml")).data)
    _, held = prompts.split(0.2)
    from tilth.core.random import stream

    chosen = held.take(stream(3, "heldout"), 0, 16)
    apart = np.diff(scored(directory, "", prompts, chosen.tolist()))[:, 0]
    last = read_metrics(directory)[-1]
    assert last["accuracy/pairs"] == pytest.approx(float((apart < 0).mean()))
    assert last["loss/pairs"] == pytest.approx(float(np.log1p(np.exp(apart)).mean()), rel=1e-5)


def test_a_reward_model_is_no_policy_and_a_policy_no_reward_model(made, tmp_path):
    with raises(ModelError, "model"):
        load_model(made["reward_model"].directory)
    with raises(ModelError, "reward.model"):
        tiny.run(tiny.recipe(tmp_path, reward={"model": str(made["dpo"].directory)}))


# ---- where it begins ----


def test_dpo_holds_the_policy_to_what_it_began_as(begun, tmp_path):
    short = {**PAIRS["supervised"], "steps": 2}
    result = learn(tmp_path, "dpo", model={"path": str(begun), "context": 16}, supervised=short)
    newest = max((result.directory / "checkpoints").glob("step-*"))
    stored, start = open_checkpoint(newest), load_model(begun)
    for name in start.tensors:
        assert torch.equal(stored.read("reference", name), start.tensors[name])
    assert any(not torch.equal(stored.read("model", name), start.tensors[name]) for name in start.tensors)
    assert read_metrics(result.directory)[0]["loss"] == math.log(2)


def test_a_reward_model_begins_from_a_run_a_directory_or_a_reward_model(begun, made, tmp_path):
    whole = load_model(begun)
    save_pretrained(tmp_path / "hf", whole.config, whole.tensors, tokenizer=whole.tokenizer, source=whole.source)
    short = {**PAIRS["supervised"], "steps": 1, "lr": 0.0}
    found = {}
    for name, path in {"run": begun, "hf": tmp_path / "hf", "rm": made["reward_model"].directory}.items():
        result = learn(tmp_path, "reward_model", name=name, model={"path": str(path), "context": 16}, supervised=short)
        found[name] = load_model(result.directory, "reward_model").tensors
    for name in (n for n in whole.tensors if not n.startswith("lm_head.")):
        assert torch.equal(found["run"][name], whole.tensors[name]) and torch.equal(
            found["hf"][name], whole.tensors[name]
        )
    assert not found["run"]["score.weight"].any()
    before = load_model(made["reward_model"].directory, "reward_model").tensors
    assert all(torch.equal(found["rm"][name], before[name]) for name in before) and before["score.weight"].any()


@pytest.mark.slow
def test_simpo_keeps_no_reference(tmp_path):
    short = {**PAIRS["supervised"], "steps": 1}
    result = learn(tmp_path, "dpo", preference={"loss": "simpo", "margin": 0.5}, supervised=short)
    newest = max((result.directory / "checkpoints").glob("step-*"))
    assert "reference" not in open_checkpoint(newest).groups
    assert read_metrics(result.directory)[0]["rewards/margin"] != 0


@pytest.mark.slow  # tests/roles/test_pairs.py and tests/rl/test_preference.py have each
@pytest.mark.parametrize("loss", ["ipo", "hinge", "robust"])
def test_other_losses_run(tmp_path, loss):
    short = {**PAIRS["supervised"], "steps": 2}
    records = read_metrics(learn(tmp_path, "dpo", preference={"loss": loss, "sft": 0.1}, supervised=short).directory)
    assert len(records) == 2 and all(math.isfinite(r["loss"]) for r in records)


def test_records_of_ones_own_and_several_pairs_of_a_prompt(tmp_path):
    data = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + gap)}
        for a in range(6)
        for b in range(6)
        for gap in (1, 2)
    ]
    settings = tiny.settings(tmp_path, supervised={**PAIRS["supervised"], "steps": 2})
    del settings["data"]
    result = train(data, flow="reward_model", live=False, keys={"data.holdout": 0.2}, **settings)
    records = read_metrics(result.directory)
    assert all(r["pairs"] == 16 for r in records) and result.summary["best"]["metric"] == "accuracy/pairs"


# ---- as a reward ----


def test_a_run_learns_from_a_reward_model_alone(made, tmp_path):
    model = f"{made['reward_model'].directory}@best"
    result = tiny.run(tiny.recipe(tmp_path, reward={"model": model}, **SHORT), reward=None, name="rated")
    records = [r for r in read_metrics(result.directory) if r["phase"] == "grpo"]
    assert all(r["reward/mean"] == pytest.approx(r["reward/part/model"], abs=1e-6) for r in records)
    table = read_trajectories(result.directory).to_pylist()
    prompts = load_pairs(load_recipe(str(made["reward_model"].directory / "recipe.toml")).data)
    assert prompts.alphabet() == "+0123456789="
    loaded = load_model(model, "reward_model")
    value = ValueModel(Decoder(loaded.config))
    value.load_state_dict({name: loaded.tensors[name] for name in loaded.tensors})
    for row in table[:12]:
        with torch.no_grad():
            ids = torch.tensor(row["tokens"])
            expected = float(value.score(value(ids, PackedContext([len(ids)])))[-1])
        assert row["reward"] == pytest.approx(expected, abs=1e-5) and dict(row["parts"])["model"] == row["reward"]


@pytest.mark.slow
def test_a_reward_model_as_a_directory_of_hugging_face_says_the_same(made, tmp_path):
    run, folder = made["reward_model"].directory, tmp_path / "exported"
    write_model(str(run), folder, group="reward_model")
    again, before = load_model(folder, "reward_model"), load_model(run, "reward_model")
    assert all(torch.equal(again.tensors[name], before.tensors[name]) for name in before.tensors)
    found = [
        tiny.run(tiny.recipe(tmp_path / name, reward={"model": str(where)}, **SHORT), reward=None, name=name)
        for name, where in (("a", run), ("b", folder))
    ]
    assert tiny.same(*(tiny.numbers(result.directory) for result in found))


@pytest.mark.slow
def test_a_reward_model_beside_a_function(made, tmp_path):
    reward = {"model": str(made["reward_model"].directory), "model_weight": 0.5}
    result = tiny.run(tiny.recipe(tmp_path, reward=reward, **SHORT))
    for row in read_trajectories(result.directory).to_pylist():
        own = tiny.close_enough(row["prompt_text"], row["text"], {"answer": row["answer"]})
        assert row["reward"] == pytest.approx(own + 0.5 * dict(row["parts"])["model"], abs=1e-5)


@pytest.mark.slow
def test_a_reward_model_does_not_change_what_is_right(made, tmp_path):
    reward = {"model": str(made["reward_model"].directory), "model_weight": 0.5}
    records = [
        read_metrics(tiny.run(tiny.recipe(tmp_path / name, algorithm={"steps": 1}, **given)).directory)
        for name, given in (("with", {"reward": reward}), ("without", {}))
    ]
    first, second = (
        [r["reward/heldout"] for r in found if r["phase"] == "warmup" and "reward/heldout" in r] for found in records
    )
    assert first == second and len(first) > 1


def test_a_reward_model_of_other_tokens_is_refused(tmp_path, made):
    other = PromptSet.of([{"prompt": text, "answer": "abc"} for text in ("äöü", "b", "c")])
    reward = {"model": str(made["reward_model"].directory)}
    recipe = tiny.recipe(tmp_path, reward=reward, data={"holdout": 0.0}, supervised={"steps": 0})
    with raises(RecipeError, "reward.model.tokenizer"):
        tiny.run(recipe, prompts=other)


# ---- again, and elsewhere ----


@pytest.mark.slow  # tests/flows/test_resume.py has a flow without pairs
@pytest.mark.parametrize("flow", ["dpo", "reward_model"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, made, flow):
    def interrupt(record):
        if record["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        learn(tmp_path, flow, callbacks=[tiny.Recorder(interrupt)])
    resumed = learn(tmp_path, flow)
    assert tiny.same(tiny.numbers(resumed.directory), tiny.numbers(made[flow].directory))
    assert tiny.weights(resumed.directory) == tiny.weights(made[flow].directory)
    assert json.loads((resumed.directory / "run.json").read_text())["attempt"] == 2


NEAR = ("loss", "grad_norm", "rewards/margin", "rewards/chosen", "rewards/accuracy", "loss/pairs", "accuracy/pairs")


@pytest.mark.dist
@pytest.mark.parametrize("flow", [pytest.param(n, marks=[pytest.mark.slow] * (n != "reward_model")) for n in FLOWS])
@pytest.mark.parametrize(
    "layout",
    [{"fsdp": 2}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"tp": 2}, {"cp": 2}, {"pp": 2}))],
    ids=["fsdp", "dp", "tp", "cp", "pp"],
)
def test_two_workers_learn_what_one_does(tmp_path, shared, made, flow, layout):
    where = {"cluster": LOCAL, "policy": {"layout": layout}}
    if flow == "dpo" and layout.keys() & {
        "cp",
        "pp",
        "tp",
    }:  # in one layout, policy and reference begin with equal bits and margins of 0
        where["reference"] = {"layout": layout}
    ours = read_metrics(learn(tmp_path, flow, **where).directory)
    theirs = read_metrics(made[flow].directory)
    assert len(ours) == len(theirs)
    for a, b in zip(ours[:4], theirs[:4]):  # a new head passes back next to nothing, and AdamW makes steps of noise
        assert a["pairs"] == b["pairs"] and a["tokens/trained"] == b["tokens/trained"]
        for name in (n for n in NEAR if n in b):
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-4), f"step {b['step']}: {name}"


@pytest.mark.dist
@pytest.mark.slow
def test_a_reward_model_in_a_pool_of_its_own(tmp_path, shared, made):
    reward = {"model": str(made["reward_model"].directory)}
    short = {"reward": reward, "algorithm": {"steps": 2}}
    alone = tiny.run(tiny.recipe(tmp_path / "one", **short), reward=None, name="one")
    pools = {"backend": "local", "pools": {"learn": 1, "speak": 1}}
    apart = {"cluster": pools, "rollout": {"pool": "speak"}, "reward_model": {"pool": "speak"}}
    spread = tiny.run(tiny.recipe(tmp_path / "two", **short, **apart), reward=None, name="two")
    for a, b in zip(read_metrics(spread.directory), read_metrics(alone.directory), strict=True):
        assert a.get("reward/mean") == pytest.approx(b.get("reward/mean"), rel=1e-4) if "reward/mean" in b else True


# ---- what is refused ----


@pytest.mark.parametrize(
    "flow, sections, key",
    [
        ("dpo", {"preference": {"loss": "ipo", "smoothing": 0.1}}, "ipo.smoothing"),
        ("dpo", {"preference": {"loss": "sigmoidd"}}, "preference.loss"),
        ("dpo", {"preference": {"loss": "bradley_terry"}}, "preference.loss"),
        ("dpo", {"preference": {"centring": 0.1}}, "sigmoid.centring"),
        ("reward_model", {"preference": {"loss": "sigmoid"}}, "preference.loss"),
        ("reward_model", {"preference": {"beta": 0.1}}, "bradley_terry.beta"),
        ("reward_model", {"preference": {"sft": 0.1}}, "preference.sft"),
        ("dpo", {"model": {"dropout": 0.1}}, "model.dropout"),
        ("dpo", {"reward": {"model": "x"}}, "reward.model"),
        ("dpo", {"supervised": {"steps": 0}}, "supervised.steps"),
    ],
)
def test_what_contradicts_itself_is_told_before_anything_starts(tmp_path, flow, sections, key):
    with raises(RecipeError, key):
        learn(tmp_path, flow, **sections)
    assert not list(tmp_path.iterdir())


def test_pairs_that_do_not_fit_are_told_before_anything_starts(tmp_path):
    with raises(DataError, "prompt 0, chosen.tokens"):
        learn(tmp_path, "reward_model", model={"context": 6}, rollout={"max_tokens": 2})


@pytest.mark.parametrize("name", ["dpo", "reward-model"])
def test_the_recipes_that_ship_are_of_these_flows(name):
    recipe = load_recipe(name)
    assert name in names() and recipe.flow_spec.learns == "pairs" and recipe.data.source == "addition"
