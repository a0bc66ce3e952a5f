"""A run's model, made larger: it says the same, here and in transformers, and a run goes on from it."""

import pytest
import torch
import transformers
from typer.testing import CliRunner

from tests.cli.kept import refused
from tests.flows import tiny
from tests.roles import small
from tilth.cli.main import app
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.hf import load_weights, save_pretrained
from tilth.runs.models import load_model
from tilth.runs.readers import read_metrics

GROWN = ("--hidden", "40", "--layers", "3", "--heads", "4", "--ffn", "50")


def logits(spec, ids):
    loaded = load_model(str(spec))
    model = Decoder(loaded.config)
    load_weights(model, loaded.tensors)
    with torch.no_grad():
        return model.logits(model(ids, PackedContext([len(ids)])))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has learned a little."""
    folder = tmp_path_factory.mktemp("runs")
    return tiny.run(tiny.recipe(folder, flow="sft", supervised={"steps": 20})).directory


@pytest.fixture
def made(run, tmp_path):
    """The line that says what was written, and the folder."""
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["expand", str(run), str(tmp_path / "out"), *GROWN])
    assert found.exit_code == 0, found.output
    return found.stdout, tmp_path / "out"


def test_it_has_the_logits_of_the_run_here_and_in_transformers(run, made):
    said, out = made
    ids = torch.arange(12)
    wanted, found = logits(run, ids), load_model(str(out))
    assert (logits(out, ids) - wanted).abs().max() < 1e-5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(ids[None]).logits[0] - wanted).abs().max() < 1e-5
    shape = found.config
    assert (shape.hidden_size, shape.num_layers, shape.num_heads, shape.intermediate_size) == (40, 3, 4, 50)
    assert found.tokenizer is not None and found.tokenizer.encode("1+2=") == load_model(str(run)).tokenizer.encode(
        "1+2="
    )
    assert theirs.generation_config.eos_token_id == found.tokenizer.eos_id
    assert f"from_pretrained({str(out)!r})" in said and f"tilth run RECIPE model.path={out}" in said


def test_a_run_goes_on_from_it(run, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["data.digits=1", "supervised.steps=6", "supervised.batch=16", "supervised.check_every=3", "train.threads=1"]
    keys += ["run.eval_prompts=16", "data.holdout=0.2", "run.name=on"]
    found = CliRunner().invoke(app, ["run", "sft", "data.source=addition", f"model.path={made[1]}", *keys])
    assert found.exit_code == 0, found.output
    losses = [row["loss"] for row in read_metrics(tmp_path / "runs" / "on") if "loss" in row]
    before = [row["loss"] for row in read_metrics(run) if "loss" in row]
    assert len(losses) == 6 and losses[0] < before[0] - 0.2
    assert load_model("runs/on").config.hidden_size == 40


@pytest.mark.parametrize("words", [("--hidden", "8"), ("--heads", "1"), ("--layers", "1"), ("--expert-ffn", "64"), ()])
def test_what_cannot_be_is_refused_in_a_line_and_nothing_is_written(run, tmp_path, words):
    said = refused("expand", run, tmp_path / "out", *words)
    key = words[0][2:].replace("-", "_") if words else "hidden"
    assert key in said and not (tmp_path / "out").exists()


def test_a_model_of_float64_stays_so_and_a_full_folder_is_kept(tmp_path):
    model = Decoder(small.config()).double()
    model.init_weights_(1)
    save_pretrained(tmp_path / "in", model.config, model.state_dict(), tokenizer=small.TOKENIZER)
    width = str(model.config.hidden_size + 3)
    assert (
        CliRunner().invoke(app, ["expand", str(tmp_path / "in"), str(tmp_path / "out"), "--hidden", width]).exit_code
        == 0
    )
    assert {x.dtype for x in load_model(str(tmp_path / "out")).tensors.values()} == {torch.float64}
    assert "is there already" in refused("expand", tmp_path / "in", tmp_path / "out", "--hidden", width)
