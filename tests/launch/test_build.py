"""A run's calls are balanced as its recipe says; lengths of samples are kept for what made them."""

import pytest

from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import DataError
from tilth.core.random import stream
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.launch import build, life
from tilth.launch.build import _short, all_lengths, mixed, prompt_lengths


@pytest.mark.parametrize(
    ("sections", "by"),
    [
        ({}, "tokens"),
        ({"train": {"balance": "cost"}}, "cost"),
        ({"train": {"balance": "none"}}, "none"),
        ({"cluster": {"costs": "costs.json"}}, "cost"),
    ],
)
def test_calls_are_balanced_as_the_recipe_says(tmp_path, sections, by):
    with life._cluster(tiny.recipe(tmp_path, **sections), None) as cluster:
        assert cluster.balance.by == by and cluster.balance.measures


@pytest.mark.parametrize(("there", "device"), [(False, "cpu"), (True, "cuda")])
def test_workers_plan_for_the_device_that_auto_has(tmp_path, monkeypatch, there, device):
    """What a worker predicts, as the activations that it offloads, is of the device on which it computes."""
    recipe, found = tiny.recipe(tmp_path), []
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    monkeypatch.setattr(build, "_gpus", lambda recipe: [])
    monkeypatch.setattr(build, "make_roles", lambda cluster, meshes, given: found.append(given["recipe"]))
    parts = build.build(recipe, recipe_prompts(recipe), None, tiny.inline())
    assert found[0].train.device == device and parts.recipe.train.device == "auto"


def test_lengths_of_samples_are_those_of_the_tools_that_their_template_lists(tmp_path):
    recipe, prompts = tiny.recipe(tmp_path, data={"template": "chatml"}), PromptSet.of(["a", "b"])
    tokenizer = Tokenizer.train(["a b"], 300)
    found = []
    for tools in ([], [{"name": "look"}], []):
        template = make_template("chatml", tokenizer, tools)
        found.append(all_lengths(recipe, prompts, template, tokenizer, tools, answers=False)[0])
    assert found[0] == found[2] < found[1]


def test_a_schedule_by_tokens_counts_those_of_answers_in_a_warm_up_too(tmp_path):
    """Prompts have four tokens, so that ten come before the 41st; with their answers they have six or more."""
    part = {"name": "a", "source": "addition", "schedule": {"0": 1.0, "41": 0.0}, "schedule_by": "tokens"}
    recipe = tiny.recipe(tmp_path, data={"source": "", "mixture": [part]})
    prompts = recipe_prompts(recipe)
    tokenizer = Tokenizer.characters(prompts.alphabet())
    lengths = prompt_lengths(recipe, prompts, make_template("", tokenizer), tokenizer, ())
    order = mixed(recipe, prompts.parts, *lengths)
    order.check(stream(recipe.seed, "prompts"), 11)
    order.check(stream(recipe.seed, "examples"), 6)
    for name, count in (("prompts", 12), ("examples", 8)):
        with raises(DataError, "data.mixture.weight"):
            order.check(stream(recipe.seed, name), count)


def test_a_batch_of_more_than_there_are_examples_and_a_warm_up_longer_than_the_run_are_told(tmp_path):
    few = {"data": {"digits": 1, "holdout": 0.2}, "optimizer": {"warmup_steps": 4}}
    long = tiny.recipe(tmp_path, **few, supervised={"steps": 4, "batch": 80})
    short = tiny.recipe(tmp_path, **few, supervised={"steps": 3, "batch": 81})
    assert not list(_short(long, 80))
    batch, warm = _short(short, 80)
    assert batch.startswith("supervised.batch = 81 and 80 examples") and "75%" in warm
    assert not list(_short(short.replaced("supervised", steps=0, epochs=0.0), 80))
