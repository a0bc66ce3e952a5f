"""vLLM itself, where ``TILTH_VLLM_PYTHON`` names the interpreter of an environment that has it."""

import importlib.util
import os

import numpy as np
import psutil
import pytest
import torch

from tests.engines.reference import make_engine, make_model, make_requests
from tests.errors import raises
from tests.flows import tiny
from tests.serve.test_agent import runs
from tilth.data.trajectories import read_trajectories
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.engines.server import ServerError
from tilth.engines.vllm import VLLM
from tilth.models.config import DecoderConfig

PYTHON = os.environ.get("TILTH_VLLM_PYTHON", "")
MISSING = not PYTHON and importlib.util.find_spec("vllm") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="no vLLM: set TILTH_VLLM_PYTHON to the interpreter of an environment with it"),
]
SHAPE = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2}
FAMILIES = {
    "qwen3": {"qk_norm": True, "num_kv_heads": 1, "tie_embeddings": True},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "num_kv_heads": 1},
}


def made(config, **options):
    torch.set_num_threads(1)
    return VLLM(config, EngineOptions(seed=7, max_length=256, max_rows=16, python=PYTHON, **options))


def same(found, wanted):
    """Tokens are equal; the largest difference of log-probs before and after filters."""
    for a, b in zip(found, wanted, strict=True):
        assert (a.tokens.tolist(), a.finish, a.versions) == (b.tokens.tolist(), b.finish, b.versions)
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-4
        if b.sampling_logprobs is not None:
            assert np.abs(a.sampling_logprobs - b.sampling_logprobs).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_the_native_engine_says_under_old_and_new_weights(family):
    config = DecoderConfig(**SHAPE, **FAMILIES[family], max_positions=256)
    engine, requests = made(config), make_requests(24, longest=40)
    for version, seed in enumerate((0, 1)):
        model = make_model(config, seed)
        engine.update_weights(model.named_parameters(), version=version)
        native = make_engine(model)
        native.version = version
        same(engine.generate(requests), native.generate(requests))


def test_requests_survive_sleep_new_weights_and_a_lost_server():
    config = DecoderConfig(**SHAPE, **FAMILIES["qwen3"], max_positions=256)
    model, other = make_model(config), make_model(config, seed=1)
    engine = made(config, kv_tokens=1 << 18)
    engine.update_weights(model.named_parameters(), version=1)
    wanted, requests = make_engine(model), make_requests(12, longest=30)
    engine.submit(requests)
    done = engine.poll()
    server = psutil.Process(engine._server.process.pid)
    before = server.memory_info().rss
    engine.sleep()
    assert server.memory_info().rss < before
    engine.wake_up()
    done += engine.poll()
    server.kill()
    while len(done) < len(requests):
        done += engine.poll()
    same(sorted(done, key=lambda t: t.id), wanted.generate(requests))
    long = Request(1, [1, 2], SamplingParams(max_tokens=60))
    engine.submit([long])
    engine.poll()
    engine.update_weights(other.named_parameters(), version=2)
    while not (found := engine.poll()):
        pass
    wanted.submit([long])
    for _ in range(found[0].versions[1][0] - 2):
        wanted.poll()
    wanted.update_weights(other.named_parameters(), version=2)
    while not (native := wanted.poll()):
        pass
    same(found, native)


def test_a_server_that_cannot_start_is_an_error_with_its_log():
    config = DecoderConfig(**SHAPE, **FAMILIES["llama"], max_positions=256)
    engine = made(config, no_such_argument=1)
    with raises(ServerError, "rollout.engine.server") as raised:
        engine.update_weights(make_model(config).named_parameters(), version=1)
    assert "no_such_argument" in str(raised.value)


def test_agents_play_the_same_episodes(tmp_path):
    """A run whose episodes are programs of OpenAI's client, with either engine."""
    few = {"supervised": {"steps": 2}, "algorithm": {"steps": 2}, "run": {"eval_prompts": 4}}
    found = {}
    for engine in ("native", "vllm"):
        rollout = {"engine": engine} | ({"python": PYTHON} if engine == "vllm" else {})
        model = {"context": 96, "head_dim": 32}
        recipe = runs(tmp_path, "Plays", rollout=rollout, model=model, train={"parity": False}, **few)
        directory = tiny.run(recipe, reward=None, name=engine).directory
        rows = read_trajectories(directory)
        found[engine] = rows.sort_by([("step", "ascending"), ("id", "ascending")]).to_pylist()
        assert max(one.get("mismatch/max", 0.0) for one in tiny.numbers(directory)) < 1e-4
    assert len(found["vllm"]) == len(found["native"]) > 40
    for one, other in zip(*found.values(), strict=True):
        for name in ("tokens", "mask", "segments", "reward", "parts", "finish"):
            assert one[name] == other[name], name
        assert np.abs(np.array(one["logprobs"]) - other["logprobs"]).max() < 1e-4
