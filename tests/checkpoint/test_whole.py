"""A run's checkpoint that four ranks wrote is the same model to everyone who reads it as the one of one process."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tests.checkpoint.make import same, save_sharded
from tests.roles import small
from tilth.checkpoint import open_checkpoint, save, state_layouts
from tilth.cli.main import app
from tilth.core.layout import Layout, Mesh, RaggedShard, Replicate, Shard
from tilth.models.decoder import Decoder
from tilth.models.hf import load_pretrained
from tilth.runs.models import MODEL_FOLDER, load_model, save_shape

MESH = Mesh(("fsdp", "tp"), (2, 2))
VOCABULARY = small.config().vocab_size


def layout(name, shape):
    """Vocabulary and heads over tp, then rows over fsdp; norms over fsdp in unequal parts of the flat storage."""
    if len(shape) == 1:
        return Layout(MESH, (RaggedShard((1, 3)) if shape[0] % 4 == 0 else Shard(0), Replicate()), shape, (1, 0))
    columns = name.endswith(("o_proj.weight", "down_proj.weight"))
    return Layout(MESH, (Shard(0), Shard(1 if columns else 0)), shape, (1, 0))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with the same weights: one process wrote the checkpoint of the first, four that of the second."""
    model = Decoder(small.config())
    model.init_weights_(5)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = {f"exp_avg.{n}": torch.full_like(p, 0.5) for n, p in weights.items()}
    state |= {f"step.{n}": torch.tensor(3.0) for n in weights}
    whole = {"model": weights, "ema": {n: p * 0.5 for n, p in weights.items()}, "optimizer": state}
    layouts = {n: layout(n, tuple(p.shape)) for n, p in weights.items()}
    by_group = {"model": layouts, "ema": layouts, "optimizer": state_layouts(layouts, state)}
    found = []
    for name in ("one", "four"):
        run = tmp_path_factory.mktemp(name)
        (run / "run.json").write_text(json.dumps({"state": "finished", "digest": "0"}))
        (run / "recipe.toml").write_text('[data]\nsource = "addition"\ndigits = 1\n[reward]\nfunctions = ["math"]\n')
        save_shape(run / MODEL_FOLDER, small.config(), small.TOKENIZER)
        if name == "one":
            save(run / "checkpoints", 4, whole, {})
        else:
            save_sharded(run / "checkpoints", 4, whole, by_group, mesh=MESH)
        found.append(run)
    return found


def test_the_vocabulary_does_not_divide(runs):
    """Else the rows below would prove less than they say."""
    entry = open_checkpoint(runs[1] / "checkpoints/step-000004").entry("model", "model.embed_tokens.weight")
    assert VOCABULARY % 4 and len({piece.size for piece in entry.boxes}) > 1 and len(entry.boxes) == 4


@pytest.mark.parametrize("which", ["", "@ema", "@4", "/checkpoints/step-000004"])
def test_load_model(runs, which):
    one, four = (load_model(f"{run}{which}") for run in runs)
    assert list(one.tensors) == list(four.tensors) and one.config == four.config and one.step == four.step == 4
    assert all(same(one.tensors[n], four.tensors[n]) for n in one.tensors)


def tilth(*arguments):
    found = CliRunner().invoke(app, [str(a) for a in arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_export(runs, tmp_path):
    for run in runs:
        tilth("export", run, tmp_path / run.name)
    one, four = (load_pretrained(tmp_path / run.name)[1] for run in runs)
    assert list(one) == list(four) and all(same(one[n], four[n]) for n in one)
    files = [(tmp_path / run.name / "model.safetensors").read_bytes() for run in runs]
    assert files[0] == files[1]


def test_eval(runs):
    ask = ["addition", "--limit", "8", "--max-tokens", "3", "--json"]
    one, four = (json.loads(tilth("eval", run, *ask)) for run in runs)
    ignored = ("model", "seconds", "tokens_per_second")
    assert {k: v for k, v in one.items() if k not in ignored} == {k: v for k, v in four.items() if k not in ignored}


def test_generate(runs):
    ask = ["3+4=", "--temperature", "0", "--max-tokens", "4", "--json", "--logprobs"]
    one, four = (tilth("generate", run, *ask) for run in runs)
    assert one == four and json.loads(one)["tokens"]


def test_optimizer_state_comes_back_to_one_process(runs):
    targets = {n: torch.zeros_like(t) for n, t in _state(runs[0]).items()}
    open_checkpoint(runs[1] / "checkpoints/step-000004").restore("optimizer", targets)
    assert all(same(targets[n], t) for n, t in _state(runs[0]).items())


def _state(run):
    checkpoint = open_checkpoint(run / "checkpoints/step-000004")
    return {n: checkpoint.read("optimizer", n) for n in checkpoint.names("optimizer")}
