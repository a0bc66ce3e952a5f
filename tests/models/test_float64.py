"""A float64 model computes in float64 from end to end, and nothing of it is rounded to fp32 on the way."""

import math

import numpy as np
import pytest
import torch

from tests.models.tiny import decoder, shape, tokens
from tilth.models.attention import PackedContext
from tilth.models.converters import ValueHead, ValueModel
from tilth.models.decoder import Decoder, RMSNorm
from tilth.models.rope import Rope
from tilth.training.packed import MicroBatch, appraise, model_input, score

DOUBLE = torch.float64
ROUNDED = 1e-9
"""Differences of fp32 arithmetic are larger than this, those of float64 smaller."""


def double(family: str) -> Decoder:
    return decoder(shape(family), DOUBLE).to(DOUBLE)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_hidden_states_logits_and_log_probs_are_float64(family: str) -> None:
    model, ids = double(family), tokens([5, 4])
    hidden = model(ids, PackedContext([5, 4]))
    logits = model.logits(hidden)
    found, entropy = model.token_logprobs(hidden, model.head_weight, ids, 0.7)
    assert {x.dtype for x in (hidden, logits, found, entropy)} == {DOUBLE}
    logp = (hidden @ model.head_weight.T / 0.7).log_softmax(-1)
    assert torch.allclose(found, logp[torch.arange(9), ids], rtol=1e-14, atol=1e-14)
    single = decoder(shape(family))(ids, PackedContext([5, 4]))
    assert single.dtype == torch.float32 and ROUNDED < (single - hidden).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_difference_quotient_sees_no_rounding(family: str) -> None:
    """Central differences of the log-probs in a direction: fp32 anywhere on the way would leave noise of 1e-2 in them.

    The step of 1e-5 divides what was rounded by 2e-5.
    """
    model, ids = double(family), tokens([6])
    generator = torch.Generator().manual_seed(0)
    ways = [torch.randn(p.shape, generator=generator, dtype=DOUBLE) for p in model.parameters()]

    def value() -> torch.Tensor:
        return model.token_logprobs(model(ids, PackedContext([6])), model.head_weight, ids)[0].sum()

    value().backward()
    slope = sum(float((p.grad * way).sum()) for p, way in zip(model.parameters(), ways))
    ends = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for p, way in zip(model.parameters(), ways):
                p.add_(way, alpha=step)
            ends.append(float(value()))
    assert math.isclose((ends[0] - ends[1]) / 2e-5, slope, rel_tol=1e-5)


def test_rope_tables_are_those_of_numpy() -> None:
    rope = Rope(shape("llama"))
    positions = torch.tensor([0, 1, 37, 5000])
    cos, sin = rope.tables(positions, None, DOUBLE)
    angles = positions.numpy()[:, None] * rope.frequencies.numpy().astype(np.float64)
    half = angles.shape[1]
    assert np.abs(cos[:, 0, :half].numpy() - np.cos(angles)).max() < 1e-14
    assert np.abs(sin[:, 0, half:].numpy() - np.sin(angles)).max() < 1e-14
    single = rope.tables(positions, None, torch.float32)[0]
    assert single.dtype == torch.float32 and ROUNDED < (single - cos).abs().max() < 1e-3


def test_norm_and_score() -> None:
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    norm, head = RMSNorm(1e-6), ValueHead(16).to(DOUBLE)
    norm.weight = torch.nn.Parameter(torch.linspace(0.3, 2, 16, dtype=DOUBLE))
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 16, dtype=DOUBLE))
        head.bias.fill_(0.1)
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert (norm(x) - wanted).abs().max() < 1e-14
    values = head(x)
    assert values.dtype == DOUBLE and (values - (x @ head.weight[0] + 0.1)).abs().max() < 1e-14


def test_scorers_pass_it_on() -> None:
    model, ids = double("qwen2"), tokens([5])
    for scorer, made in ((score, model), (appraise, ValueModel(model).to(DOUBLE))):
        micro = MicroBatch(ids, torch.tensor([5]), torch.tensor([5]), torch.tensor([0, 1, 1, 0, 1]), {})
        scorer(made, micro, made(*model_input(micro)), temperature=1.0, entropy=True)
        filled = [micro.logprobs, micro.entropy] if scorer is score else [micro.values]
        assert all(x.dtype == DOUBLE and len(x) == 5 for x in filled)
