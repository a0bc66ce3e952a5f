"""``tilth env try``: what a person reads, its JSON, and bad input in one line."""

import json

import pytest
from typer.testing import CliRunner

from tests.errors import raises
from tilth.cli.env_try import play
from tilth.cli.main import EnvTryCommand, app
from tilth.config.plugins import forget
from tilth.core.errors import DataError
from tilth.data.tokenizer import Tokenizer
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 57, "b": 38}}</tool_call>\n\n2166\n'
INFO = json.dumps({"prompt": "57*38", "answer": "2166"})
pytestmark = pytest.mark.dist


def said(*words, typed=CALL):
    return CliRunner().invoke(app, ["env", "try", "calculator", "--info", INFO, *words], input=typed)


def test_an_episode_by_hand():
    found = said()
    assert found.exit_code == 0
    assert [line for line in found.output.splitlines() if line[0] != "b"] == ["[user] 57*38", "[tool] 2166", "reward 1"]


@pytest.mark.slow
def test_its_json():
    found = json.loads(said("--json").stdout)
    assert [m["role"] for m in found["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert found["value"] == 1.0 and found["parts"] == {}


def test_what_cannot_be_printed_as_it_is(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    found = CliRunner().invoke(app, ["env", "try", f"{tmp_path / 'odd.py'}:Odd"], input="a\n\n")
    assert found.exit_code == 0 and "half ? here" in found.output and "8000 more characters" in found.output


def test_an_environment_of_a_plugin_is_found_by_its_name(tmp_path):
    (tmp_path / "named.py").write_text(ODD)
    found = CliRunner().invoke(app, ["--plugins", f"{tmp_path / 'named.py'}", "env", "try", "odd"], input="a\n\n")
    forget(())
    assert found.exit_code == 0 and "reward 1" in found.output


def test_a_model_directory_plays_by_its_own_chat_template(tmp_path):
    tokenizer = Tokenizer.characters("<a>")
    tokenizer.converse("{% for m in messages %}<{{ m['content'] }}{{ eos_token }}{% endfor %}", [])
    config = DecoderConfig(tokenizer.vocab_size, 8, 16, 1, 1, head_dim=8, family="llama", max_positions=32)
    model = Decoder(config)
    model.init_weights_(0)
    save_pretrained(tmp_path, config, dict(model.named_parameters()), tokenizer=tokenizer)
    found = said(
        "--model",
        str(tmp_path),
        "--max-tokens",
        "2",
        "--turns",
        "1",
        "--info",
        '{"prompt": "a", "answer": ""}',
        "--json",
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["segments"][0]["text"].startswith("<a")


ODD = """
import tilth

class Odd(tilth.Environment):
    def reset(self, info):
        return [{"role": "user", "content": "half \\udc80 here"}]

    def step(self, message):
        return [{"role": "user", "content": "x" * 10_000}], True

    def reward(self):
        return 1
"""


@pytest.mark.parametrize("info, key", [("{", "info"), ("7", "info.type")])
def test_info_that_is_no_record(info, key):
    with raises(DataError, key):
        play(EnvTryCommand("calculator", info=info))
