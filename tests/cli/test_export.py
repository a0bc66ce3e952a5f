"""An exported directory loads in transformers and says there what the model says here."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tilth.cli.main import app
from tilth.data.tokenizer import Tokenizer
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.runs import export
from tilth.runs.models import LoadedModel, load_model, save_shape


@pytest.fixture
def model(monkeypatch, tmp_path):
    """Stands in for a run with a checkpoint."""
    tokenizer = Tokenizer.characters("0123456789+=")
    config = DecoderConfig(tokenizer.vocab_size, 32, 64, 2, 2, qk_norm=True, tie_embeddings=True, max_positions=32)
    decoder = Decoder(config)
    decoder.init_weights_(1)
    save_shape(tmp_path / "shape", config, tokenizer)
    tensors = {name: p.detach() for name, p in decoder.named_parameters()}
    monkeypatch.setattr(export, "load_model", lambda run: LoadedModel(config, tensors, tokenizer, tmp_path / "shape"))
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    return decoder, tokenizer


def call(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_transformers_loads_it_with_equal_logits(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    decoder, tokenizer = model
    result = call("run", tmp_path / "out")
    assert result.exit_code == 0 and "from_pretrained" in result.stdout
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor(tokenizer.encode("12+34=46"))
    with torch.no_grad():
        ours = decoder.logits(decoder(ids, PackedContext(torch.tensor([len(ids)]))))
        assert (theirs(ids[None]).logits[0] - ours).abs().max() < 1e-5
    assert theirs.generation_config.eos_token_id == tokenizer.eos_id
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("12+34=")["input_ids"] == ids[:6].tolist()


@pytest.mark.parametrize("change", [{"model_type": "barley"}, {"architectures": ["BarleyForCausalLM"]}])
def test_what_transformers_cannot_load_is_not_said_to_load(model, tmp_path, monkeypatch, change):
    write = export.save_pretrained

    def changed(folder, *rest, **more):
        write(folder, *rest, **more)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))

    monkeypatch.setattr(export, "save_pretrained", changed)
    result = call("run", tmp_path / "out")
    assert result.exit_code == 0 and "from_pretrained" not in result.stdout
    assert "Barley" in result.stdout or "barley" in result.stdout


def test_it_loads_here_again_bit_for_bit(model, tmp_path):
    call("run", tmp_path / "out")
    again = load_model(tmp_path / "out")
    for name, parameter in model[0].named_parameters():
        assert torch.equal(again.tensors[name], parameter)
    assert again.tokenizer.stop_ids == (model[1].eos_id,) and again.config == model[0].config


def test_all_stop_tokens_are_written(model, tmp_path):
    model[1].stop_ids = (1, 0)
    call("run", tmp_path / "out")
    assert load_model(tmp_path / "out").tokenizer.stop_ids == (1, 0)


def test_an_empty_directory_will_do_and_a_full_one_will_not(model, tmp_path):
    (tmp_path / "out").mkdir()
    assert call("run", tmp_path / "out").exit_code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    result = call("run", tmp_path / "out")
    assert result.exit_code == 2 and "is there already" in result.stderr
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}


def test_a_file_in_the_way(model, tmp_path):
    (tmp_path / "out").write_text("")
    assert call("run", tmp_path / "out").exit_code == 2


@pytest.mark.usefixtures("model")
def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = call("run", tmp_path / "file" / "out")
    assert result.exit_code == 2 and "cannot write model" in result.stderr


def test_a_chat_template_goes_along(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, tokenizer = model
    tokenizer.converse("{% for m in messages %}{{ m['content'] + '=' }}{% endfor %}", ())
    assert call("run", tmp_path / "out").exit_code == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "1+2"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "1+2="
    assert load_model(tmp_path / "out").tokenizer.chat_template == tokenizer.chat_template


def test_a_checkpoint_of_a_run_is_named(tmp_path):
    result = call(f"{tmp_path}/runs/x@best", tmp_path / "out")
    assert result.exit_code == 2 and "x" in result.stderr and not (tmp_path / "out").exists()
