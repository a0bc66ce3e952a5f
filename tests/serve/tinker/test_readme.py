"""The commands of README.md's two servers, as they stand there, with small models in place of those of the hub."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.documents import blocks
from tests.test_documents import SHAPE, SMALL
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained

pytestmark = pytest.mark.slow
TILTH = str(Path(sys.executable).with_name("tilth"))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TALK = [{"role": "user", "content": "How many are 1 and 2?"}, {"role": "assistant", "content": "1 and 2 are 3."}]
FEW = "batch_size=4 max_steps=2 max_length=256 lora_rank=4"


def lines(beginning):
    """Commands of the block whose first one begins so."""
    (found,) = (
        found
        for block in blocks("README.md")
        if (found := [one.text for one in block.commands]) and found[0].startswith(beginning)
    )
    return found


@contextmanager
def served(command, folder):
    """The address of a server that a command starts, on a free port."""
    words = [TILTH, *shlex.split(command)[1:], "--port", "0"]
    with open(folder / "serve.log", "w") as log:
        process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, stdout=log, text=True)
    try:
        told = ""
        while not (address := re.search(r"http://[\d.]+:\d+", told)):
            told = process.stderr.readline()
            assert told or process.poll() is None, (folder / "serve.log").read_text()
        yield address[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_run_is_served_to_openais_clients(tmp_path):
    (command,) = lines("tilth serve runs/")
    name = re.search(r"runs/([\w-]+)", command)[1]
    keys = [*SHAPE, *SMALL, "data.digits=1", "algorithm.steps=1", f"run.name={name}"]
    subprocess.run([TILTH, "run", "addition-grpo", *keys], cwd=tmp_path, check=True, capture_output=True)
    with served(command, tmp_path) as address:
        model = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
        found = httpx.post(f"{address}/v1/completions", json={"model": model, "prompt": "1+2=", "max_tokens": 2}).json()
    assert found["usage"]["completion_tokens"] in (1, 2)


def world(folder, base, named):
    """Directories of the names that the hub has: a base, the tokenizer of the name it is served by, conversations."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator([], letters)
    config = DecoderConfig(
        made.get_vocab_size(), 16, 32, num_layers=1, num_heads=1, head_dim=16, family="qwen3", qk_norm=True
    )
    model = Decoder(config)
    model.init_weights_(0)
    save_pretrained(folder / base, config, dict(model.named_parameters()))
    for place in (base, named):
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>").save_pretrained(folder / place)
    (folder / named / "config.json").write_text((folder / base / "config.json").read_text())
    talks = folder / "HuggingFaceH4" / "no_robots"
    talks.mkdir(parents=True)
    (talks / "train.jsonl").write_text("\n".join([json.dumps({"messages": TALK})] * 16))


def test_the_cookbooks_recipe_trains(tmp_path):
    if importlib.util.find_spec("tinker_cookbook") is None:
        pytest.skip("pip install tinker-cookbook, which no extra has")
    serve, export, recipe = lines("tilth serve Qwen/")
    base, named = re.search(r"serve (\S+)", serve)[1], re.search(r"--name (\S+)", serve)[1]
    world(tmp_path, base, named)
    variables = dict(word.split("=", 1) for word in export.split()[1:])
    assert f"model_name={named}" in recipe and variables.keys() == {"TINKER_BASE_URL", "TINKER_API_KEY"}
    with served(serve, tmp_path) as address:
        outside = os.environ | variables | {"TINKER_BASE_URL": address, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        words = [sys.executable, *shlex.split(recipe)[1:], *FEW.split(), f"log_path={tmp_path / 'log'}"]
        done = subprocess.run(words, cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step:max"] for row in steps if "step:max" in row] == [1, 2]
