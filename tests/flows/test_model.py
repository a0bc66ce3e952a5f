"""Models by path, tokenizers by precedence, and what does not fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.flows import tiny
from tests.roles import small
from tilth.core.errors import DataError, ModelError
from tilth.data.prompts import PromptSet, load_source
from tilth.data.tokenizer import Tokenizer
from tilth.flows.build import build
from tilth.flows.model import MODEL_FOLDER, LoadedModel, choose_tokenizer, load_model, new_config, save_shape
from tilth.models.decoder import Decoder
from tilth.models.hf import parameter_shapes, save_pretrained
from tilth.plan.shape import parameters


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return tiny.run(
        tiny.recipe(folder, supervised={"steps": 1}, algorithm={"steps": 1}, run={"eval_prompts": 2})
    ).directory


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "hf"
    model = Decoder(small.config())
    model.init_weights_(7)
    save_pretrained(out, model.config, dict(model.named_parameters()), tokenizer=small.TOKENIZER)
    return out, model


# ---- by path ----


def test_a_run_is_its_newest_checkpoint(finished):
    found = load_model(finished)
    assert {n: tuple(t.shape) for n, t in found.tensors.items()} == parameter_shapes(found.config)
    assert found.source == finished / MODEL_FOLDER
    assert found.tokenizer.encode("1+2=") == Tokenizer.characters(load_source(tiny.recipe("x").data).alphabet()).encode(
        "1+2="
    )


def test_a_run_that_has_saved_nothing_says_so(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"state": "running", "digest": "0"}))
    with pytest.raises(ModelError, match=r"has no checkpoint yet; .*run\.save_every"):
        load_model(tmp_path)


def test_a_directory_of_hugging_face_is_read_as_it_is(exported):
    out, model = exported
    found = load_model(out)
    assert found.source == out and found.config.hidden_size == 16
    assert all(torch.equal(found.tensors[n], p) for n, p in model.named_parameters())
    assert found.tokenizer.vocab_size == small.TOKENIZER.vocab_size


def test_neither_run_nor_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)


def test_a_model_without_a_tokenizer_has_none(exported, tmp_path):
    out, _ = exported
    for file in out.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_model(tmp_path).tokenizer is None


# ---- the tokenizer ----


OWN = Tokenizer.characters("abc")


def loaded(tokenizer):
    return LoadedModel(small.config(), {}, tokenizer, Path("somewhere"))


def test_the_recipe_s_tokenizer_comes_first(tmp_path):
    OWN.save(tmp_path)
    recipe = tiny.recipe("runs", data={"tokenizer": str(tmp_path)})
    found = choose_tokenizer(recipe, small.PROMPTS, loaded(small.TOKENIZER))
    assert found.vocab_size == OWN.vocab_size != small.TOKENIZER.vocab_size


def test_then_the_model_s_own():
    assert choose_tokenizer(tiny.recipe("runs"), small.PROMPTS, loaded(OWN)) is OWN


def test_then_one_token_for_each_character_of_the_data():
    found = choose_tokenizer(tiny.recipe("runs"), PromptSet.of([{"prompt": "xy", "answer": "z"}]), None)
    assert found.decode(found.encode("zyx")) == "zyx" and found.vocab_size == 5
    with pytest.raises(DataError, match="'a'"):
        found.encode("a")


def test_a_model_that_has_none_asks_for_one():
    with pytest.raises(DataError, match=r"no tokenizer\.json; name one with data\.tokenizer"):
        choose_tokenizer(tiny.recipe("runs"), small.PROMPTS, loaded(None))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(exported, tmp_path):
    out, _ = exported
    Tokenizer.characters("abcdefghijklmnop+0123456789=").save(tmp_path)
    recipe = tiny.recipe("runs", model={"path": str(out)}, data={"tokenizer": str(tmp_path)})
    with pytest.raises(DataError, match=r"the tokenizer has 30 tokens, the model only 14"):
        build(recipe, small.PROMPTS, pool=None)


def test_a_model_may_have_more_tokens_than_its_tokenizer(tmp_path):
    model = Decoder(replace(small.config(), vocab_size=20))
    model.init_weights_(0)
    save_pretrained(tmp_path, model.config, dict(model.named_parameters()), tokenizer=small.TOKENIZER)
    parts = build(tiny.recipe("runs", model={"path": str(tmp_path), "context": 16}), small.PROMPTS, pool=None)
    assert parts.config.vocab_size == 20 and parts.tokenizer.vocab_size == 14


# ---- a run from a model, and a model from a recipe ----


def test_a_run_begins_with_the_weights_of_its_model(exported):
    out, model = exported
    parts = build(tiny.recipe("runs", model={"path": str(out), "context": 16}), small.PROMPTS, pool=None)
    theirs = dict(parts.policy.weights())
    assert all(torch.equal(theirs[n], p) for n, p in model.named_parameters())


def test_the_shape_of_a_new_model_is_the_recipe_s(tmp_path):
    recipe = tiny.recipe("runs", model={"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "family": "qwen2"})
    config = new_config(recipe, 50)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (32, 3, 4, 2)
    assert config.qkv_bias and not config.qk_norm and config.max_positions == 16
    assert parameters(config) == sum(p.numel() for p in Decoder(config).parameters())
    save_shape(tmp_path / "model", config, small.TOKENIZER)
    assert type(config).from_hf(json.loads((tmp_path / "model" / "config.json").read_text())) == config
    assert Tokenizer.load(tmp_path / "model").vocab_size == small.TOKENIZER.vocab_size
