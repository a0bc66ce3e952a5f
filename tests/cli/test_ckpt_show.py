"""What is in a checkpoint, or in a directory of Hugging Face."""

import json
import math

import pytest
from safetensors import safe_open

from tests.cli.kept import add, call, groups, make_run, objects, refused, said, weights
from tests.roles import small
from tilth.checkpoint import open_checkpoint
from tilth.config.load import flattened
from tilth.models.hf import save_pretrained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one")


def test_all_of_it(run):
    found, stored = said("ckpt", "show", f"{run}@4"), run / "checkpoints" / "step-000004"
    assert (found["path"], found["kind"], found["step"]) == (str(stored), "checkpoint", 4)
    assert found["objects"] == objects(4) and found["layout"] == {"world": 4}
    whole = groups(4)
    assert [one["group"] for one in found["groups"]] == list(whole)
    for one in found["groups"]:
        tensors = whole[one["group"]].values()
        assert one["tensors"] == len(tensors) and one["elements"] == sum(t.numel() for t in tensors)
        assert one["bytes"] == 4 * one["elements"] and one["dtypes"] == ["float32"]
    assert {f["name"]: f["bytes"] for f in found["files"]} == {
        file.name: file.stat().st_size for file in stored.glob("*.safetensors")
    }
    assert found["bytes"] == sum(f["bytes"] for f in found["files"]) and "tensors" not in found


@pytest.mark.parametrize("which", ["", "@6"])
def test_the_newest_by_any_name(run, which):
    assert said("ckpt", "show", f"{run}{which}") == said("ckpt", "show", run / "checkpoints" / "step-000006")
    assert said("ckpt", "show", run / "checkpoints")["step"] == 6


def test_tensors_by_pattern(run):
    found = said("ckpt", "show", run, "--tensors", "model/*norm*")["tensors"]
    names = [name for name in weights(6) if "norm" in name]
    assert [one["name"] for one in found] == names and {one["group"] for one in found} == {"model"}
    both = said("ckpt", "show", run, "--tensors", "model.norm.weight")["tensors"]
    assert [one["group"] for one in both] == ["model", "ema", "critic"]
    for one in found:
        assert one["shape"] == list(weights(6)[one["name"]].shape) and one["dtype"] == "float32"
        assert one["bytes"] == 4 * math.prod(one["shape"]) and one["files"] == ["model.safetensors"]
        assert one["boxes"] == []
    assert "no tensor of" in refused("ckpt", "show", run, "--tensors", "nothing*")


def test_boxes_are_where_they_say(run):
    """Every box is cut out of its file by hand and is what the tensor has there."""
    stored = run / "checkpoints" / "step-000004"
    found = said("ckpt", "show", f"{run}@4", "--boxes")["tensors"]
    checkpoint, whole = open_checkpoint(stored), groups(4)
    assert {(one["group"], one["name"]) for one in found} == {(g, n) for g, some in whole.items() for n in some}
    some = [one for one in found if one["group"] == "model"]
    assert any(len(one["boxes"]) == 4 for one in some)
    for one in some:
        assert one["files"] == list(dict.fromkeys(part["file"] for part in one["boxes"]))
        assert sum(math.prod(part["size"]) for part in one["boxes"]) == math.prod(one["shape"])
        for part in one["boxes"]:
            box = tuple(slice(o, o + s) for o, s in zip(part["offset"], part["size"]))
            data = (stored / part["file"]).read_bytes()[part["byte0"] : part["byte0"] + part["bytes"]]
            assert data == whole["model"][one["name"]][box].contiguous().numpy().tobytes()
    assert checkpoint.groups == list(whole)


def test_for_people(run):
    text = call("ckpt", "show", f"{run}@4", "--tensors", "model/model.norm.weight", "--boxes").stdout
    assert "step 4, saved 2026-11-21 10:00:00 UTC, by 4 processes" in text and "progress.finished" in text
    assert (
        "300 values" in text
        and "model/model.norm.weight" in text
        and "[0:" in text
        and "model.000.safetensors @" in text
    )


def test_more_than_a_screen(tmp_path):
    add(tmp_path / "checkpoints", 2, said={f"key{i}": i for i in range(100)})
    text = call("ckpt", "show", tmp_path / "checkpoints").stdout
    assert "and 60 more; --json has all" in text and "key39" in text and "key40" not in text


def test_no_objects(tmp_path):
    add(tmp_path / "checkpoints", 2, said={})
    assert "value" not in call("ckpt", "show", tmp_path / "checkpoints").stdout
    assert said("ckpt", "show", tmp_path / "checkpoints")["objects"] == {}


@pytest.mark.parametrize("shard_bytes", [10**9, 8000])
def test_a_directory_of_hugging_face(shard_bytes, tmp_path):
    save_pretrained(tmp_path / "out", small.config(), weights(3), shard_bytes=shard_bytes)
    found = said("ckpt", "show", tmp_path / "out", "--boxes")
    assert found["kind"] == "huggingface" and [g["group"] for g in found["groups"]] == ["model"]
    assert {one["name"]: tuple(one["shape"]) for one in found["tensors"]} == {
        name: tuple(t.shape) for name, t in weights(3).items()
    }
    for one in found["tensors"]:
        with safe_open(tmp_path / "out" / one["files"][0], framework="pt") as file:
            assert one["name"] in file.keys()
    assert "a directory of Hugging Face" in call("ckpt", "show", tmp_path / "out").stdout


def test_what_is_not_there(run, tmp_path):
    assert "it has steps 2, 4, 6" in refused("ckpt", "show", f"{run}@5")
    assert "no model directory" in refused("ckpt", "show", tmp_path / "nowhere")
    assert "config.json" in refused("ckpt", "show", tmp_path)


def test_keys_with_dots():
    found = flattened({"a": {"b": 1, "c": {"d": [1, {"e": 2}]}}, "f": {}, "g": None})
    assert found == {"a.b": 1, "a.c.d": [1, {"e": 2}], "f": {}, "g": None}
    assert json.dumps(flattened({})) == '{"": {}}'
