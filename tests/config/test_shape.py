"""A model that is begun from has its own shape: keys of another one beside its path are refused, whoever says them."""

import pytest

from tilth.config.errors import RecipeError
from tilth.config.keys import keys
from tilth.config.load import digest, dump_toml, from_dict, load_recipe

BESIDE = {"adapter", "path", "optimizer", "context", "dropout"}
SHAPE = {"family": "llama", "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64,
         "rope_theta": 5e5, "tied": False, "experts": 4, "experts_per_token": 3, "expert_ffn": 32, "shared_experts": 1,
         "dense_layers": 1}  # fmt: skip


def refused(call, *given):
    with pytest.raises(RecipeError) as error:
        call(*given)
    return str(error.value)


def test_every_key_of_a_model_is_of_its_shape_or_holds_beside_a_path():
    assert {name.removeprefix("model.") for name in keys() if name.startswith("model.")} == BESIDE | set(SHAPE)


@pytest.mark.parametrize("key", SHAPE)
def test_a_shape_beside_a_path_is_refused_by_name(key, tmp_path):
    said = f"model.{key}={str(SHAPE[key]).lower()}"
    given = f'"{SHAPE[key]}"' if key == "family" else str(SHAPE[key]).lower()
    whole, path = tmp_path / "whole.toml", tmp_path / "path.toml"
    whole.write_text(f'[model]\npath = "DIR"\n{key} = {given}\n')
    path.write_text('[model]\npath = "DIR"\n')
    for message in (
        refused(load_recipe, "addition-grpo", ["model.path=DIR", said]),
        refused(load_recipe, str(path), [said]),
        refused(load_recipe, str(whole)),
        refused(from_dict, {"model": {"path": "DIR", key: SHAPE[key]}}),
    ):
        assert f"model.{key}" in message and "DIR" in message


def test_all_of_them_are_named_at_once():
    message = refused(load_recipe, "addition-grpo", ["model.path=DIR", "model.hidden=64", "model.layers=2"])
    assert "model.hidden" in message and "model.layers" in message


def test_the_shape_of_a_recipe_gives_way_to_a_path_that_is_said_over_it():
    assert load_recipe("addition-grpo", ["model.path=DIR"]).model.path == "DIR"
    assert load_recipe("addition-grpo", ["model.path=", "model.hidden=64"]).model.hidden == 64


def test_what_a_run_keeps_is_its_recipe_still_and_no_more_than_that(tmp_path):
    """With every key stated, the shape too."""
    recipe, kept = load_recipe("addition-grpo", ["model.path=DIR"]), tmp_path / "recipe.toml"
    kept.write_text(dump_toml(recipe))
    again = load_recipe(str(kept), ["algorithm.steps=3"])
    assert load_recipe(str(kept)) == recipe == from_dict(recipe.dump()) and digest(again) != digest(recipe)
    assert "model.hidden" in refused(load_recipe, str(kept), ["model.hidden=64"])
    assert load_recipe(str(kept), ["model.path=", "model.hidden=64"]).model.hidden == 64


def test_a_run_of_a_time_with_fewer_keys_is_read(tmp_path):
    kept = tmp_path / "recipe.toml"
    kept.write_text('[model]\npath = "DIR"\nhidden = 64\n')
    assert "model.hidden" in refused(load_recipe, str(kept))
    (tmp_path / "run.json").touch()
    assert load_recipe(str(kept)).model.path == "DIR"
