"""Models by path, tokenizers by precedence, and what does not fit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.errors import raises
from tests.flows import tiny
from tests.roles import small
from tilth.checkpoint import mark_best, save
from tilth.core.errors import DataError, ModelError, RecipeError
from tilth.data.prompts import PromptSet, load_source
from tilth.data.tokenizer import Tokenizer
from tilth.launch.build import build, rooted
from tilth.launch.checks import check_algorithm
from tilth.models.decoder import Decoder
from tilth.models.family import new_config
from tilth.models.hf import save_pretrained
from tilth.plan.shape import parameter_shapes, parameters
from tilth.runs.models import (
    MODEL_FOLDER,
    LoadedModel,
    choose_tokenizer,
    load_model,
    save_shape,
    wants_tokenizer,
)


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
    with raises(ModelError, "run.save_every"):
        load_model(tmp_path)


def test_a_directory_of_hugging_face_is_read_as_it_is(exported):
    out, model = exported
    found = load_model(out)
    assert found.source == out and found.config.hidden_size == 16
    assert all(torch.equal(found.tensors[n], p) for n, p in model.named_parameters())
    assert found.tokenizer.vocab_size == small.TOKENIZER.vocab_size


def test_neither_run_nor_model_is_named(tmp_path):
    with raises(ModelError, "nowhere"):
        load_model(tmp_path / "nowhere")
    with raises(ModelError, "config.json"):
        load_model(tmp_path)


def test_a_model_without_a_tokenizer_has_none(exported, tmp_path):
    out, _ = exported
    for file in out.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_model(tmp_path).tokenizer is None


# ---- which of a run's ----


CONFIG = small.config()
SHAPES = parameter_shapes(CONFIG)


def test_a_model_whose_tokenizer_has_more_tokens_cannot_read(exported):
    model = load_model(exported[0])
    assert wants_tokenizer(model) is model.tokenizer
    alphabet = "".join(map(chr, range(33, 120)))
    with raises(DataError, "config.json.vocab_size"):
        wants_tokenizer(model._replace(tokenizer=Tokenizer.characters(alphabet)))


def weights(value):
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


def add(run, step, *, ema=None):
    groups = {"model": weights(step)} | ({} if ema is None else {"ema": weights(ema)})
    save(run / "checkpoints", step, groups, {})


@pytest.fixture
def several(tmp_path):
    """A run whose weights say which checkpoint they are of."""
    run = tmp_path / "run@home"
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"state": "finished", "digest": "0"}))
    (run / "recipe.toml").write_text('[data]\ntemplate = "chatml"\n[rollout]\nstop = ["END"]\n[warmup]\nsteps = 3\n')
    save_shape(run / MODEL_FOLDER, CONFIG, small.TOKENIZER)
    for step in (2, 5, 9):
        add(run, step)
    return run


def value(spec):
    found = {float(t.unique().item()) for t in load_model(spec).tensors.values()}
    return found.pop() if len(found) == 1 else found


def test_a_checkpoint_is_named_by_step_or_by_its_directory(several):
    assert (value(several), value(f"{several}@5"), value(f"{several}@2")) == (9, 5, 2)
    assert value(f"{several}@000005") == 5
    assert value(several / "checkpoints" / "step-000002") == 2
    assert load_model(f"{several}@5").step == 5 and load_model(several).run == several


def test_a_checkpoint_is_found_from_inside_too(several, monkeypatch):
    monkeypatch.chdir(several / "checkpoints" / "step-000002")
    assert value(".") == 2 and load_model(".").tokenizer.vocab_size == small.TOKENIZER.vocab_size
    monkeypatch.chdir(several)
    assert value("checkpoints/step-000005") == 5 and value(".@9") == 9


def test_the_best_is_the_marked_one(several):
    mark_best(several / "checkpoints", {"step": 5, "metric": "accuracy/heldout", "value": 0.7})
    assert value(f"{several}@best") == 5
    mark_best(several / "checkpoints", {"step": 7, "metric": "accuracy/heldout", "value": 0.8})
    with raises(ModelError, "best.json.step"):
        load_model(f"{several}@best")


def test_the_average_is_that_of_the_newest(several):
    add(several, 12, ema=3.5)
    assert (value(f"{several}@ema"), value(several)) == (3.5, 12)
    add(several, 13)
    with raises(ModelError, "train.ema"):
        load_model(f"{several}@ema")


def test_a_run_says_how_it_made_prompts(several):
    found = load_model(several)
    assert (found.template, found.stop) == ("model", ("END",))
    (several / "recipe.toml").write_text("")
    assert (load_model(several).template, load_model(several).stop) == ("", ())
    (several / "recipe.toml").write_text("[data")
    with raises(ModelError, "recipe.toml"):
        load_model(several)


@pytest.mark.parametrize(
    ("which", "key"),
    [("@4", "@4"), ("@last", "@last"), ("@-2", "@-2"), ("@", "@"), ("@best", "best.json"), ("@ema", "train.ema")],
)
def test_what_a_run_does_not_have_is_named(several, which, key):
    with raises(ModelError, key):
        load_model(f"{several}{which}")


def test_only_a_run_has_several(exported):
    out, _ = exported
    with raises(ModelError, "run.json"):
        load_model(f"{out}@best")
    with raises(ModelError, "not"):
        load_model("nowhere/really/not")


def test_a_checkpoint_without_its_run_is_told(several, tmp_path):
    alone = tmp_path / "elsewhere" / "step-000005"
    shutil.copytree(several / "checkpoints" / "step-000005", alone)
    with raises(ModelError, "config.json"):
        load_model(alone)


def test_a_checkpoint_of_another_shape_is_told(several):
    save_shape(several / MODEL_FOLDER, small.config(num_layers=3), small.TOKENIZER)
    with raises(ModelError, "model.layers.2.self_attn.q_proj.weight.missing"):
        load_model(several)


# ---- the tokenizer ----


OWN = Tokenizer.characters("abc")


def loaded(tokenizer):
    return LoadedModel(small.config(), {}, tokenizer, Path("somewhere"))


def wanting(tokenizer, **data):
    return tiny.recipe("runs", data={"tokenizer": tokenizer, **data})


def test_the_recipe_s_tokenizer_comes_first(tmp_path):
    OWN.save(tmp_path)
    for model in (None, loaded(None)):
        assert choose_tokenizer(wanting(str(tmp_path)), small.PROMPTS, model).vocab_size == OWN.vocab_size


def test_characters_may_be_asked_for_of_prompts_or_of_documents():
    found = choose_tokenizer(wanting("characters"), PromptSet.of([{"prompt": "xy", "answer": "z"}]), None)
    assert found.vocabulary().keys() == {"<pad>", "<eos>", "x", "y", "z"}
    of_texts = choose_tokenizer(wanting("characters"), None, None, ["ab", "bc"])
    assert of_texts.vocabulary().keys() == {"<pad>", "<eos>", "a", "b", "c"}


def test_a_trained_tokenizer_has_seen_nothing_held_out():
    """Its merges are those of the training side alone, whatever the other side says."""
    words = ["".join(chr(97 + (i * 7 + j * j) % 26) for j in range(5)) for i in range(60)]
    prompts = PromptSet.of([{"prompt": f"{word} " * 5, "answer": word} for word in words])
    train, held = prompts.split(0.5)
    found = choose_tokenizer(wanting("bpe:400", holdout=0.5), prompts, None)
    alone = Tokenizer.train([p.text + p.answer for p in train], 400)
    assert found.vocabulary() == alone.vocabulary() and 260 < found.vocab_size <= 400
    assert found.vocabulary() != Tokenizer.train([p.text + p.answer for p in held], 400).vocabulary()
    assert found.decode(found.encode("größer 🙂")) == "größer 🙂"


def test_documents_train_a_tokenizer_of_their_own():
    texts = ["the cat sat on the mat"] * 3
    assert (
        choose_tokenizer(wanting("bpe:300"), None, None, texts).fingerprint()
        == Tokenizer.train(texts, 300).fingerprint()
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bpe:", "data.tokenizer.size"),
        ("bpe:many", "data.tokenizer.size"),
        ("bpe:0", "data.tokenizer.size"),
        ("bpe:10", "size"),
        ("none", "tokenizer.json.missing"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_told(name, key):
    with raises(DataError, key):
        choose_tokenizer(wanting(name), small.PROMPTS, None)


def test_a_tokenizer_that_means_other_texts_than_the_model_learned_is_refused(tmp_path):
    OWN.save(tmp_path)
    with raises(DataError, "data.tokenizer.a"):
        choose_tokenizer(wanting(str(tmp_path)), small.PROMPTS, loaded(small.TOKENIZER))


def test_the_model_s_own_tokenizer_may_be_named_and_a_smaller_one_that_agrees(tmp_path):
    small.TOKENIZER.save(tmp_path / "same")
    Tokenizer.characters("+012345678").save(tmp_path / "less")
    for folder in ("same", "less"):
        found = choose_tokenizer(wanting(str(tmp_path / folder)), small.PROMPTS, loaded(small.TOKENIZER))
        assert found.encode("1+2") == small.TOKENIZER.encode("1+2")


def test_then_the_model_s_own():
    assert choose_tokenizer(tiny.recipe("runs"), small.PROMPTS, loaded(OWN)) is OWN


def test_then_one_token_for_each_character_of_the_data():
    found = choose_tokenizer(tiny.recipe("runs"), PromptSet.of([{"prompt": "xy", "answer": "z"}]), None)
    assert found.decode(found.encode("zyx")) == "zyx" and found.vocab_size == 5
    with raises(DataError, "tokenizer.a"):
        found.encode("a")


def test_a_model_that_has_none_asks_for_one():
    with raises(DataError, "data.tokenizer"):
        choose_tokenizer(tiny.recipe("runs"), small.PROMPTS, loaded(None))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(exported, tmp_path):
    out, _ = exported
    Tokenizer.characters("abcdefghijklmnop+0123456789=").save(tmp_path)
    recipe = tiny.recipe("runs", model={"path": str(out)}, data={"tokenizer": str(tmp_path)})
    with raises(DataError, "data.tokenizer.size"):
        build(recipe, small.PROMPTS, None, tiny.inline())


def test_a_model_may_have_more_tokens_than_its_tokenizer(tmp_path):
    model = Decoder(replace(small.config(), vocab_size=20))
    model.init_weights_(0)
    save_pretrained(tmp_path, model.config, dict(model.named_parameters()), tokenizer=small.TOKENIZER)
    parts = build(tiny.recipe("runs", model={"path": str(tmp_path), "context": 16}), small.PROMPTS, None, tiny.inline())
    assert parts.config.vocab_size == 20 and parts.tokenizer.vocab_size == 14


# ---- a run from a model, and a model from a recipe ----


def test_a_run_begins_with_the_weights_of_its_model(exported):
    out, model = exported
    parts = build(tiny.recipe("runs", model={"path": str(out), "context": 16}), small.PROMPTS, None, tiny.inline())
    theirs = dict(tiny.worker(parts.roles.policy).weights())
    assert all(torch.equal(theirs[n], p) for n, p in model.named_parameters())


def test_a_run_may_begin_from_any_checkpoint_of_another(several):
    recipe = tiny.recipe("runs", model={"path": f"{several}@5", "context": 16})
    theirs = dict(tiny.worker(build(recipe, small.PROMPTS, None, tiny.inline()).roles.policy).weights())
    assert {float(t.unique()) for t in theirs.values()} == {5.0}


def test_the_shape_of_a_new_model_is_the_recipe_s(tmp_path):
    recipe = tiny.recipe("runs", model={"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "family": "qwen2"})
    config = new_config(recipe.model, 50)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (32, 3, 4, 2)
    assert config.qkv_bias and not config.qk_norm and config.max_positions == 16
    assert parameters(config) == sum(p.numel() for p in Decoder(config).parameters())
    save_shape(tmp_path / "model", config, small.TOKENIZER)
    assert type(config).from_hf(json.loads((tmp_path / "model" / "config.json").read_text())) == config
    assert Tokenizer.load(tmp_path / "model").vocab_size == small.TOKENIZER.vocab_size


def test_a_new_tokenizer_for_a_loaded_model_names_the_way_out(exported):
    out, _ = exported
    recipe = tiny.recipe("x", model={"path": str(out)}, data={"tokenizer": "bpe:2048"})
    with raises(DataError, "data.tokenizer.bpe"):
        choose_tokenizer(recipe, None, load_model(out), ["some text"])


def test_pre_training_refuses_a_reward():
    recipe = tiny.recipe("x", flow="pretrain", reward={"function": "exact"})
    with raises(RecipeError, "reward.function"):
        check_algorithm(recipe)


def test_workers_get_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    found = rooted(tiny.recipe("runs", model={"path": "runs/one@best"}, data={"template": "chat.jinja"}))
    assert found.model.path == f"{tmp_path}/runs/one@best" and found.data.template == f"{tmp_path}/chat.jinja"
    plain = tiny.recipe("runs", data={"template": "chatml"})
    assert rooted(plain) == plain
