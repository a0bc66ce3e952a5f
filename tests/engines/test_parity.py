"""Parity mode: the trainer's forward pass, under autograd, gives the engine's log-probs bit for bit."""

import numpy as np
import pytest
import torch

from tests.engines.reference import make_engine, make_model, make_requests
from tilth.engines.request import SamplingParams
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.logprobs import token_logprobs

QWEN3 = DecoderConfig(
    vocab_size=300, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, qk_norm=True, max_positions=256
)
QWEN2 = DecoderConfig(
    vocab_size=200, hidden_size=96, intermediate_size=252, num_layers=2, num_heads=4, num_kv_heads=2, qkv_bias=True,
    max_positions=256, family="qwen2", sliding_window=20, window_layers=(1,),
)  # fmt: skip
TEMPERATURE = 0.9
KINDS = [SamplingParams(max_tokens=n, temperature=TEMPERATURE, stop_tokens=(3,)) for n in (20, 60, 110)]
WAYS = [{}, {"max_rows": 5}, {"max_rows": 16, "kv_tokens": 320}, {"step_tokens": 29, "max_rows": 9}]


def generated(model, **options):
    return make_engine(model, parity=True, **options).generate(make_requests(20, vocab=200, kinds=KINDS))


def trained(model, found, parity):
    """Log-probs of the chosen tokens as the trainer computes them: fp32 parameters, gradients on."""
    trainer = Decoder(model.config, model.dtype)
    trainer.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    ids = torch.from_numpy(np.concatenate([t.tokens for t in found]))
    chosen = torch.from_numpy(np.flatnonzero(np.concatenate([t.mask for t in found])))
    hidden = trainer(ids, PackedContext([len(t.tokens) for t in found], parity=parity))
    logprobs, _ = token_logprobs(hidden[chosen - 1], trainer.head_weight, ids[chosen], temperature=TEMPERATURE)
    assert logprobs.requires_grad
    return logprobs.detach().numpy()


def said(found):
    return np.concatenate([t.logprobs[t.mask > 0] for t in found])


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(QWEN3, torch.float32, marks=pytest.mark.slow),
        (QWEN3, torch.bfloat16),
        pytest.param(QWEN2, torch.float32, marks=pytest.mark.slow),
        pytest.param(QWEN2, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["qwen3-fp32", "qwen3-bf16", "qwen2-fp32", "qwen2-bf16"],
)
def test_trainer_and_engine_agree_bit_for_bit(config, dtype):
    model = make_model(config, dtype=dtype, scale=4)
    found = generated(model)
    assert len(said(found)) > 500
    assert np.array_equal(trained(model, found, parity=True), said(found))


@pytest.mark.parametrize(
    ("dtype", "ways"),
    [(torch.float32, WAYS[2:])]
    + [pytest.param(dtype, WAYS, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_a_trajectory_does_not_depend_on_the_batch(dtype, ways):
    """Rows, chunks, preemption, neighbours: not one bit."""
    model = make_model(QWEN3, dtype=dtype, scale=4)
    first, *others = (generated(model, **way) for way in ways)
    for other in others:
        for a, b in zip(first, other):
            assert np.array_equal(a.tokens, b.tokens)
            assert np.array_equal(a.logprobs, b.logprobs)


def test_without_parity_the_difference_is_rounding():
    """The bound that holds at full speed in fp32."""
    model = make_model(QWEN3, scale=4)
    found = make_engine(model).generate(make_requests(30, vocab=200, kinds=KINDS))
    difference = np.abs(trained(model, found, parity=False) - said(found))
    assert difference.max() < 1e-4 and difference.mean() < 1e-6
