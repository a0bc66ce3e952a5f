"""Weights of a checkpoint for transformers, and back: bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.cli.kept import call, critic, groups, make_run, refused, said, upload, weights
from tests.flows import tiny
from tests.roles import small
from tilth.checkpoint import open_checkpoint
from tilth.checkpoint.directory import complete
from tilth.core.errors import StorageError
from tilth.models import hf
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.runs import export
from tilth.runs.models import load_model

IDS = torch.tensor(small.TOKENIZER.encode("12+34=46"))
CONTEXT = PackedContext([len(IDS)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one")


def stored(out: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(out.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def decoder(tensors: dict[str, torch.Tensor]) -> Decoder:
    model = Decoder(small.config())
    hf.load_weights(model, tensors)
    return model.requires_grad_(False)


@pytest.mark.parametrize("step", [2, 4])
def test_transformers_says_the_same(step, run, tmp_path):
    """Of a checkpoint of one process and of one of four."""
    result = call("ckpt", "export", f"{run}@{step}", tmp_path / "out")
    assert result.exit_code == 0 and "AutoModelForCausalLM.from_pretrained" in result.stdout
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model = decoder(weights(step))
    with torch.no_grad():
        ours = model.logits(model(IDS, CONTEXT))
        assert (theirs(IDS[None]).logits[0] - ours).abs().max() < 1e-5
    assert same(stored(tmp_path / "out"), weights(step))


def test_the_older_command_writes_the_same(run, tmp_path):
    assert (
        call("export", f"{run}@4", tmp_path / "a").exit_code
        == call("ckpt", "export", f"{run}@4", tmp_path / "b").exit_code
    )
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir()) and "tokenizer.json" in files
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


@pytest.mark.parametrize("group", ["model", "ema"])
@pytest.mark.parametrize("dtype", ["", "fp32", "bf16"])
def test_group_and_dtype(group, dtype, run, tmp_path):
    found = said("ckpt", "export", run, tmp_path / "out", "--group", group, "--dtype", dtype)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert same(stored(tmp_path / "out"), {n: t.to(kind) for n, t in groups(6)[group].items()})
    assert found["step"] == 6 and found["path"] == str(tmp_path / "out")
    assert found["files"] == sorted(file.name for file in (tmp_path / "out").iterdir())
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == str(kind).removeprefix("torch.")


def test_the_average_by_name(run, tmp_path):
    assert call("export", f"{run}@ema", tmp_path / "out").exit_code == 0
    assert same(stored(tmp_path / "out"), groups(6)["ema"])


def test_a_critic_is_a_classifier_of_tokens(run, tmp_path):
    result = call("ckpt", "export", f"{run}@4", tmp_path / "out", "--group", "critic")
    assert result.exit_code == 0 and "AutoModelForTokenClassification" in result.stdout
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model = critic(4)
    with torch.no_grad():
        ours = model.score(model(IDS, CONTEXT))
        assert (theirs(IDS[None]).logits[0, :, 0] - ours).abs().max() < 1e-5
    assert ours.std() > 0.01


def test_large_models_are_in_several_files(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        hf.save_pretrained, "__kwdefaults__", {**hf.save_pretrained.__kwdefaults__, "shard_bytes": 8000}
    )
    found = said("ckpt", "export", run, tmp_path / "out")
    shards = [name for name in found["files"] if name.startswith("model-")]
    assert len(shards) > 2 and "model.safetensors.index.json" in found["files"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert same({n: p.detach() for n, p in theirs.named_parameters()}, weights(6))
    assert said("ckpt", "diff", run, tmp_path / "out")["equal"]


def test_what_cannot_be_exported(run, tmp_path):
    out = tmp_path / "out"
    assert "has no weights in a group optimizer; weights are in: model, ema, critic" in refused(
        "ckpt", "export", run, out, "--group", "optimizer"
    )
    assert "weights are in" in refused("ckpt", "export", run, out, "--group", "reference")
    assert "--dtype int8: it must be fp32 or bf16" in refused("ckpt", "export", run, out, "--dtype", "int8")
    assert "keeps no checkpoint of step 3" in refused("ckpt", "export", f"{run}@3", out)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("")
    assert "is there already" in refused("ckpt", "export", run, out)
    assert [file.name for file in out.iterdir()] == ["mine"]


@pytest.mark.parametrize("out", ["s3://bucket/model", "memory://model", "file:///tmp/model"])
@pytest.mark.parametrize("command", [["export"], ["ckpt", "export"]])
def test_a_model_is_exported_into_a_local_directory(command, out, tmp_path, monkeypatch):
    """Nothing is read before: the folder is no run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert f"{out!r} is a URL" in refused(*command, "empty", out)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("command", [["export"], ["ckpt", "export"]])
def test_of_a_damaged_checkpoint_nothing_stays(command, tmp_path):
    """Neither what was written before the damage was met, nor the folders made for it; the next try works."""
    run = make_run(tmp_path / "run", (4, 6))
    out, empty, link = tmp_path / "new" / "deep", tmp_path / "empty", tmp_path / "link"
    empty.mkdir()
    link.symlink_to(empty)
    file = run / "checkpoints" / "step-000006" / "model.safetensors"
    file.write_bytes((data := file.read_bytes())[:-1] + bytes([data[-1] ^ 1]))  # when other tensors are written already
    for where in (out, empty, link):
        assert "is corrupt in file model.safetensors" in refused(*command, run, where)
    assert not out.parent.exists() and empty.is_dir() and not any(empty.iterdir()) and link.is_symlink()
    for where in (out, link):
        assert call(*command, f"{run}@4", where).exit_code == 0 and same(stored(where), weights(4))
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in empty.iterdir())


def test_what_others_put_there_meanwhile_stays(run, tmp_path, monkeypatch):
    def fails(*_, **__):
        (tmp_path / "out" / "theirs").write_text("")
        raise StorageError("no space left")

    monkeypatch.setattr(export, "save_pretrained", fails)
    assert "no space left" in refused("ckpt", "export", run, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["theirs"]


def test_a_checkpoint_in_a_store_needs_its_run(run, tmp_path):
    url = upload(run / "checkpoints", "memory://export/checkpoints")
    assert "its run's config.json is not beside it; use RUN@STEP" in refused(
        "ckpt", "export", f"{url}@4", tmp_path / "out"
    )
    away = tmp_path / "away"
    away.mkdir()
    for name in ("recipe.toml", "model"):
        (away / name).symlink_to(run / name)
    (away / "run.json").write_text(json.dumps({"state": "finished", "digest": "0", "checkpoints": url}))
    assert call("ckpt", "export", f"{away}@4", tmp_path / "out").exit_code == 0
    assert same(stored(tmp_path / "out"), weights(4))


def test_there_and_back_bit_for_bit(tmp_path):
    """A run that begins with what was exported and learns at a rate of 0 saves the same weights."""
    first = tiny.run(tiny.recipe(tmp_path, supervised={"steps": 2}, algorithm={"steps": 0}), name="first").directory
    assert call("ckpt", "export", first, tmp_path / "out").exit_code == 0
    still = {"supervised": {"steps": 1, "lr": 0.0}, "algorithm": {"steps": 0}, "optimizer": {"lr": 0.0}}
    again = tiny.run(tiny.recipe(tmp_path, model={"path": str(tmp_path / "out")}, **still), name="again").directory
    oldest = open_checkpoint(complete(again / "checkpoints")[0])
    ours = {name: oldest.read("model", name) for name in oldest.names("model")}
    assert same(ours, dict(load_model(first).tensors)) and same(ours, stored(tmp_path / "out"))
    assert said("ckpt", "diff", again, tmp_path / "out")["equal"]
