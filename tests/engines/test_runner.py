"""Compiled decode says the same, with one graph for all sizes; CUDA graphs likewise."""

import numpy as np
import pytest
import torch

from tests.engines.reference import CONFIG, make_engine, make_model, make_requests, naive
from tilth.engines.request import Request, SamplingParams
from tilth.models.config import DecoderConfig


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_once_for_all_sizes(dtype):
    """One layer, to compile quickly; many numbers of rows and lengths."""
    from torch._dynamo.utils import counters

    config = DecoderConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, qk_norm=True
    )
    model = make_model(config, dtype=dtype)
    requests = make_requests(60, longest=100)
    engine = make_engine(model, compile=True)
    engine.generate(requests[:1])
    assert engine.stats().compile_seconds > 0.5
    graphs = counters["stats"]["unique_graphs"]
    found, plain = engine.generate(requests[1:]), make_engine(model).generate(requests[1:])
    assert counters["stats"]["unique_graphs"] == graphs
    if dtype == torch.float32:
        for request, t in zip(requests[1:], found):
            tokens, raw, _ = naive(model, request)
            assert t.tokens.tolist() == tokens
            np.testing.assert_allclose(t.logprobs[len(request.prompt) :], raw, atol=5e-5)
    else:
        same = np.mean([a.tokens.tolist() == b.tokens.tolist() for a, b in zip(found, plain)])
        assert same > 0.5  # rounding of intermediate values differs; log-probs of the first tokens do not
        for a, b in zip(found, plain):
            n = a.prompt_length
            np.testing.assert_allclose(a.logprobs[: n + 1], b.logprobs[: n + 1], atol=0.1)
    other = make_model(config, seed=5, dtype=dtype)
    engine.update_weights(other.named_parameters(), version=2)
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))
    wanted = make_engine(other).generate([request])[0]
    assert engine.generate([request])[0].tokens[:8].tolist() == wanted.tokens[:8].tolist()


@pytest.mark.slow
def test_compiled_engines_keep_to_their_own_model():
    """Compiled code is cached by function and its guards on the model are off: no engine may find another's.

    Two differ in weights, the third in a number that no tensor's shape shows.
    """
    shape = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 4}
    requests = make_requests(10, kinds=[SamplingParams(max_tokens=10, temperature=0.0)])
    for seed, eps in ((0, 1e-6), (1, 1e-6), (1, 10.0)):
        model = make_model(DecoderConfig(**shape, rms_norm_eps=eps), seed=seed)
        engine = make_engine(model, compile=True)
        found = engine.generate(requests)
        assert engine.stats().compile_seconds > 0.5
        assert [t.tokens.tolist() for t in found] == [naive(model, r)[0] for r in requests]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compile", [False, True])
def test_cuda_says_what_the_cpu_says(compile):
    model = make_model()
    requests = make_requests(40, kinds=[SamplingParams(max_tokens=30, temperature=0.0)])
    engine = make_engine(model, device="cuda", compile=compile)
    same = [
        a.tokens.tolist() == b.tokens.tolist()
        for a, b in zip(engine.generate(requests), make_engine(model).generate(requests))
    ]
    assert np.mean(same) > 0.9
    assert (engine.stats().compile_seconds > 0) == compile
    before = torch.cuda.memory_allocated()
    engine.sleep()
    assert torch.cuda.memory_allocated() < before
    engine.wake_up()
    assert engine.generate(requests[:3])[2].completion_length == 30


def test_parity_is_eager_whatever_is_asked():
    engine = make_engine(make_model(CONFIG), compile=True, parity=True)
    engine.generate(make_requests(3))
    assert engine.stats().compile_seconds == 0
