"""Every family as a user meets it: directories of transformers, generate, a run of Tilth, export, and back."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.cli.test_whole import SMALL
from tests.models.tiny import decoder, joined, shape
from tilth.cli.main import app
from tilth.data.tokenizer import Tokenizer
from tilth.models.family import families

SIZES = {"gpt_oss": ("model.experts=4",), "deepseek_v3": ("model.experts=4", "model.dense_layers=1")}


def tilth(*arguments):
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def theirs(request, tmp_path):
    """A directory that transformers saved, with a tokenizer; its model."""
    tokenizer = Tokenizer.characters("0123456789+=")
    model = decoder(shape(request.param, vocab_size=tokenizer.vocab_size))
    hf = {key: value for key, value in model.config.to_hf().items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**hf)
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    other.load_state_dict(joined(model.state_dict()), strict=False)
    other.tie_weights()
    other.config.eos_token_id = other.generation_config.eos_token_id = None
    other.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    return tmp_path / "theirs", other, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("theirs", sorted(families()), indirect=True)
def test_a_directory_of_transformers_generates_and_is_exported(theirs, tmp_path):
    folder, other, tokenizer = theirs
    said = json.loads(tilth("generate", folder, "12+34=", "--temperature", "0", "--max-tokens", "12", "--json"))
    ids = torch.tensor([tokenizer.encode("12+34=")])
    wanted = other.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert said["tokens"] == wanted[0, ids.shape[1] :].tolist()[: len(said["tokens"])] and said["tokens"]
    tilth("export", folder, tmp_path / "ours")
    stored, again = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "ours"))
    assert stored.keys() == again.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, other(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(families()))
def test_a_recipe_starts_a_model_that_learns_and_is_exported(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["model.layers=2", "model.heads=2", f"model.family={family}", *SIZES.get(family, ())]
    tilth("run", "addition-grpo", *SMALL, *more, "algorithm.steps=2", "run.name=one")
    tilth("generate", "runs/one", "1+2=", "--max-tokens", "4")
    tilth("export", "runs/one", "out")
    model = transformers.AutoModelForCausalLM.from_pretrained("out", attn_implementation="eager")
    assert type(model).__name__ == families()[family].architecture
