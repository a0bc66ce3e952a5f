"""Generation from the command line says what the model says: checked against a plain greedy loop."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tests.cli import speaking
from tilth.cli import generate
from tilth.cli.main import app
from tilth.data.tokenizer import Tokenizer
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.runs.models import LoadedModel


@pytest.fixture
def model(monkeypatch, tmp_path):
    tokenizer = Tokenizer.characters("0123456789+=")
    config = DecoderConfig(tokenizer.vocab_size, 32, 64, 2, 2, qk_norm=True, tie_embeddings=True, max_positions=32)
    decoder = Decoder(config)
    decoder.init_weights_(0)
    for p in decoder.parameters():
        if p.ndim == 2:
            p.data *= 8  # far from uniform, so that a wrong token is seen
    tensors = {name: p.detach() for name, p in decoder.named_parameters()}
    monkeypatch.setattr(generate, "load_model", lambda path: LoadedModel(config, tensors, tokenizer, tmp_path))
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return decoder, tokenizer


def say(*arguments):
    result = CliRunner().invoke(app, ["generate", "model", "12+34=", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def greedy(model, count):
    """Token by token with a full forward pass each."""
    decoder, tokenizer = model
    ids, found = tokenizer.encode("12+34="), []
    for _ in range(count):
        with torch.no_grad():
            hidden = decoder(torch.tensor(ids), PackedContext(torch.tensor([len(ids)])))
            logp = decoder.logits(hidden[-1:]).log_softmax(-1)[0]
        token = int(logp.argmax())
        found.append((token, float(logp[token])))
        ids.append(token)
        if token == tokenizer.eos_id:
            break
    return found


def test_greedy_is_the_plain_loop(model):
    expected = greedy(model, 8)
    said = json.loads(say("--temperature", "0", "--max-tokens", "8", "--json", "--logprobs"))
    assert said["tokens"] == [token for token, _ in expected]
    assert said["logprobs"] == pytest.approx([logprob for _, logprob in expected], abs=1e-4)
    assert said["text"] == model[1].decode(said["tokens"])


def test_plain_output_is_the_text(model):
    expected = model[1].decode([token for token, _ in greedy(model, 6)])
    assert say("--temperature", "0", "--max-tokens", "6") == expected + "\n"


def test_logprobs_name_each_token(model):
    lines = say("--temperature", "0", "--max-tokens", "3", "--logprobs").splitlines()[1:]
    assert [line.split()[1] for line in lines] == [
        repr(model[1].decode([t], special=True)) for t, _ in greedy(model, 3)
    ]


def test_n_samples_depend_on_the_seed_only(model):
    first, again, other = (say("--n", "5", "--max-tokens", "6", "--seed", seed, "--json") for seed in "112")
    assert first == again != other and len(first.splitlines()) == 5 and len(set(first.splitlines())) > 1


def test_stop_text_ends_and_is_left_out(model):
    whole = json.loads(say("--temperature", "0", "--max-tokens", "8", "--json"))
    stop = whole["text"][2]
    said = json.loads(say("--temperature", "0", "--max-tokens", "8", "--stop", stop, "--json"))
    assert said["text"] == whole["text"][: whole["text"].index(stop)] and said["finish"] == "stop"
    assert "logprobs" not in said


def test_top_k_one_is_greedy(model):
    greedy_said = json.loads(say("--temperature", "0", "--max-tokens", "5", "--json"))
    assert json.loads(say("--top-k", "1", "--max-tokens", "5", "--json"))["tokens"] == greedy_said["tokens"]
    assert json.loads(say("--top-p", "1e-6", "--max-tokens", "5", "--json"))["tokens"] == greedy_said["tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--max-tokens", "60"], "context of 32"), (["--top-p", "2"], "top_p is 2.0"), (["--stop", ""], "stop is ('',)")],
)
def test_what_cannot_be(model, arguments, message):
    result = CliRunner().invoke(app, ["generate", "model", "12+34=", *arguments])
    assert result.exit_code == 2 and message in result.stderr


def test_a_character_without_token(model):
    result = CliRunner().invoke(app, ["generate", "model", "what?"])
    assert result.exit_code == 2 and "no token for '?'" in result.stderr


def test_a_model_without_tokenizer(model, monkeypatch):
    loaded = generate.load_model("")
    monkeypatch.setattr(generate, "load_model", lambda path: loaded._replace(tokenizer=None))
    result = CliRunner().invoke(app, ["generate", "model", "1"])
    assert result.exit_code == 2 and "has no tokenizer.json" in result.stderr


# ---- templates and models by name ----


def test_a_run_s_prompts_are_made_as_it_made_them(model, monkeypatch):
    """With its stop strings; --template '' and --stop say otherwise."""
    decoder, tokenizer = model
    tokenizer.converse("{% for m in messages %}{{ '=' + m['content'] + '<eos>' }}{% endfor %}", ())
    loaded = generate.load_model("")
    first = json.loads(say("--temperature", "0", "--max-tokens", "8", "--json"))
    settings = {"data": {"template": "some.jinja"}, "rollout": {"stop": [first["text"][1]]}}
    monkeypatch.setattr(generate, "load_model", lambda path: loaded._replace(settings=settings))
    ids = [*tokenizer.encode("=12+34="), tokenizer.eos_id]
    expected = speaking.greedy(decoder, ids, 8, (tokenizer.eos_id,))
    said = json.loads(say("--temperature", "0", "--max-tokens", "8", "--json", "--stop", "@"))
    assert said["tokens"] == expected != first["tokens"]
    plain = json.loads(say("--temperature", "0", "--max-tokens", "8", "--json", "--template", ""))
    assert plain["finish"] == "stop" and plain["text"] == first["text"][:1]


def test_a_directory_with_a_chat_template(tmp_path):
    decoder, tokenizer = speaking.directory(tmp_path / "m", template="chatml")
    arguments = ["generate", str(tmp_path / "m"), "12+34=", "--temperature", "0", "--max-tokens", "9", "--json"]
    said = json.loads(CliRunner().invoke(app, [*arguments, "--template", "model"]).stdout)
    ids = tokenizer.encode("<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n")
    assert said["tokens"] == speaking.greedy(decoder, ids, 9, tokenizer.stop_ids)
    plain = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert plain["tokens"] == speaking.greedy(decoder, tokenizer.encode("12+34="), 9, tokenizer.stop_ids)


def test_the_model_s_name_is_read_as_everywhere(tmp_path):
    speaking.directory(tmp_path / "m")
    result = CliRunner().invoke(app, ["generate", f"{tmp_path / 'm'}@best", "1"])
    assert result.exit_code == 2 and "is no run, so it has no @best" in result.stderr
