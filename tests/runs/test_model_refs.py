"""Which checkpoint a text means."""

import json
import shutil
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from tests.cli.kept import add, flip, make_run, shell, upload, weights
from tests.errors import raises
from tests.flows import tiny
from tilth.checkpoint import mark_best
from tilth.core.errors import CheckpointError, ModelError, StorageError
from tilth.launch.build import rooted
from tilth.runs.model_refs import (
    Named,
    explained,
    find_checkpoint,
    identity,
    reaching,
    root_of,
    split_spec,
)
from tilth.runs.models import load_model
from tilth.runs.readers import run_settings


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "home", best=2)


@pytest.fixture
def url(run):
    place = f"memory://{uuid.uuid4().hex}/checkpoints"
    yield upload(run / "checkpoints", place)
    fsspec.filesystem("memory").rm(place, recursive=True)


@pytest.mark.parametrize(
    ("which", "step", "group"),
    [("", 6, "model"), ("@best", 2, "model"), ("@4", 4, "model"), ("@000004", 4, "model"), ("@ema", 6, "ema")],
)
def test_of_a_run_of_a_folder_and_of_a_store(which, step, group, run, url):
    name = f"step-{step:06d}"
    assert find_checkpoint(f"{run}{which}") == Named(run / "checkpoints" / name, group, run)
    assert find_checkpoint(f"{run / 'checkpoints'}{which}") == Named(run / "checkpoints" / name, group, None)
    assert find_checkpoint(f"{url}{which}") == Named(f"{url}/{name}", group, None)


def test_one_that_is_named_itself(run, url, tmp_path, monkeypatch):
    own = run / "checkpoints" / "step-000004"
    assert find_checkpoint(str(own)) == Named(own, run=run) and str(find_checkpoint(str(own))) == f"{run}@4"
    assert find_checkpoint(f"{url}/step-000004/") == Named(f"{url}/step-000004")
    shutil.copytree(own, tmp_path / "alone")
    assert find_checkpoint(str(tmp_path / "alone")) == Named(tmp_path / "alone")
    monkeypatch.chdir(own)
    found = find_checkpoint(".")
    assert found is not None and found.run is not None and found.run.samefile(run)


def test_the_identity_of_a_checkpoint_is_that_of_its_weights(run, url):
    assert identity(str(run)) == identity(f"{run}@6") != identity(f"{run}@4")
    assert identity(str(run)).startswith(f"{run}@6 (step 6, weights ")
    assert identity(str(run)).partition("(")[2] == identity(url).partition("(")[2]


def test_the_identity_of_a_directory_of_weights_is_that_of_its_bytes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"12")
    before = identity(str(tmp_path))
    assert before == identity(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"13")  # trained further: as long as it was
    assert before != identity(str(tmp_path))


def test_what_is_neither(run, tmp_path):
    (tmp_path / "hf").mkdir()
    assert find_checkpoint(str(tmp_path / "hf")) is None and find_checkpoint(str(tmp_path / "nowhere")) is None
    with raises(ModelError, "run.json"):
        find_checkpoint(f"{tmp_path / 'hf'}@best")
    with raises(ModelError, "run.json"):
        find_checkpoint(f"{run}/checkpoints/step-000004@4")
    with raises(ModelError, "manifest.json"):
        find_checkpoint("memory://never")


@pytest.mark.parametrize(
    ("which", "key"),
    [("@5", "@5"), ("@last", "@last"), ("@", "@")],
)
def test_what_there_is_not(which, key, run, url):
    for where in (run, run / "checkpoints", url):
        with raises(ModelError, key):
            find_checkpoint(f"{where}{which}")


def test_the_best_that_is_not_there(run, url):
    mark_best(run / "checkpoints", {"step": 3, "metric": "loss/heldout", "value": 1.0})
    with raises(ModelError, "best.json.step"):
        find_checkpoint(f"{run}@best")
    mark_best(url, None)
    with raises(ModelError, "best.json"):
        find_checkpoint(f"{url}@best")


def test_texts():
    assert split_spec("runs/a@best") == (Path("runs/a"), "best")
    assert split_spec("s3://bucket/a@best") == ("s3://bucket/a", "best")
    assert split_spec("s3://user@bucket/a/") == ("s3://user@bucket/a", "")
    assert split_spec("a@b/c") == (Path("a@b/c"), "")


def test_a_folder_with_an_at_is_itself(tmp_path):
    run = make_run(tmp_path / "run@home")
    assert find_checkpoint(str(run)) == Named(run / "checkpoints" / "step-000006", "model", run)
    assert find_checkpoint(f"{run}@4").path.name == "step-000004"


def test_workers_get_a_store_as_it_is(url, run, monkeypatch):
    made = tiny.recipe(run.parent, model={"path": f"{url}@4"})
    assert rooted(made).model.path == f"{url}@4"
    monkeypatch.chdir(run.parent)
    assert rooted(tiny.recipe(run.parent, model={"path": "home@4"})).model.path == f"{run.resolve()}@4"


def test_where_a_run_keeps_them(run, url, tmp_path):
    assert root_of(run) == run / "checkpoints"
    (run / "run.json").write_text(json.dumps({"state": "finished", "digest": "0", "checkpoints": url}))
    assert root_of(run) == url and find_checkpoint(f"{run}@2") == Named(f"{url}/step-000002", "model", run)
    assert all(torch.equal(load_model(f"{run}@2").tensors[name], t) for name, t in weights(2).items())
    elsewhere = tmp_path / "elsewhere"
    add(elsewhere, 9)
    (run / "run.json").write_text(json.dumps({"state": "finished", "digest": "0", "checkpoints": str(elsewhere)}))
    assert find_checkpoint(str(run)) == Named(elsewhere / "step-000009", "model", run)
    assert load_model(run).step == 9


def test_a_run_without_any(tmp_path):
    with raises(ModelError, "run.save_every"):
        find_checkpoint(str(shell(tmp_path / "run")))


def test_a_run_whose_checkpoints_were_in_memory(tmp_path):
    run = shell(tmp_path / "run")
    (run / "run.json").write_text(json.dumps({"state": "finished", "digest": "0", "checkpoints": "memory://gone"}))
    with raises(ModelError, "run.checkpoints"):
        find_checkpoint(str(run))


def test_a_run_s_recipe(run):
    assert run_settings(run) == {"run": {"keep": 2}}
    (run / "recipe.toml").unlink()
    assert run_settings(run) == {}
    (run / "recipe.toml").write_text("[run")
    with raises(ModelError, "recipe.toml"):
        run_settings(run)


# ---- what is said of damage ----


def test_damage_says_what_there_is_instead(run):
    name = flip(run / "checkpoints" / "step-000006")
    tensors = load_model(run).tensors
    other = next(n for n in tensors if n != name)
    assert torch.equal(tensors[other], weights(6)[other])  # what is intact can be read
    with pytest.raises(CheckpointError) as caught:
        tensors[name]
    assert str(caught.value) == (
        f"checkpoint {run}/checkpoints/step-000006: tensor model/{name} is corrupt in file model.safetensors; "
        f"'tilth ckpt verify {run}@6' lists all damage; the one before it is {run}@4"
    )


def test_damage_in_a_store(url):
    files, place = fsspec.url_to_fs(f"{url}/step-000004/ema.000.safetensors")
    files.rm(place)
    named = find_checkpoint(f"{url}@4")
    with raises(CheckpointError, "step-000004") as caught, explained(named):
        raise CheckpointError("broken", key="step-000004")
    assert str(caught.value).endswith(f"{url}/step-000002")


def test_stores_that_fail_are_no_damage():
    with raises(StorageError, "x"), reaching("s3://x"):
        raise OSError("no route")
    with raises(StorageError, "x"), explained(Named("s3://x")):
        raise ImportError("install s3fs")


def test_tensors_are_read_when_they_are_used(run, monkeypatch):
    loaded = load_model(run)
    shutil.rmtree(run / "checkpoints" / "step-000006")
    assert set(loaded.tensors) == set(weights(6)) and "nothing" not in loaded.tensors
    assert loaded.tensors.shape("model.norm.weight") == (16,)
    with pytest.raises(KeyError):
        loaded.tensors["nothing"]
    with pytest.raises(CheckpointError):
        loaded.tensors["model.norm.weight"]


@pytest.mark.parametrize("group", ["model", "ema", "critic"])
def test_groups_of_weights(group, run):
    shapes = {name: loaded.shape for name, loaded in load_model(f"{run}@2", group).tensors.items()}
    assert ("score.weight" in shapes) == (group == "critic")
    with raises(ModelError, "optimizer"):
        load_model(run, "optimizer")
