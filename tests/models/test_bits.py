"""Parity mode: packed forward (with autograd) and token-by-token cached decoding agree bit for bit on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.models.cached import decode_hidden
from tests.models.tiny import FAMILIES, VOCAB, decoder, shape, tokens
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.logprobs import logits_logprobs, token_logprobs
from tilth.models.row_product import prepare
from tilth.models.steady import steady_linear

LENGTHS = [5, 33, 20, 37, 17, 32, 1, 34, 23]
CONFIGS = {
    **{
        name: FAMILIES[name]
        for name in (
            "llama-none",
            "llama-biases",
            "qwen2-window",
            "mistral",
            "llama-dynamic",
            "mixtral",
            "olmo3",
            "gemma3",
        )
    },
    "qwen3-wide": shape("qwen3", hidden_size=160, num_heads=6, num_kv_heads=2, head_dim=32, vocab_size=1000),
    "one-kv-head": shape("llama", hidden_size=120, num_heads=3, num_kv_heads=1, head_dim=40),
    "mha-small-heads": shape("llama", num_heads=8, num_kv_heads=8, head_dim=8),
}


QUICK = {
    ("llama-biases", torch.float32),
    ("qwen2-window", torch.float32),
    ("mixtral", torch.bfloat16),
    ("one-kv-head", torch.bfloat16),
}
"""Biases, windows, experts, shared keys; widths that no block divides are below."""


def next_tokens(sequences: list[Tensor]) -> list[Tensor]:
    return [s.roll(-1) for s in sequences]


def packed_logprobs(model: Decoder, sequences: list[Tensor]) -> list[Tensor]:
    """As the trainer computes them, autograd on."""
    lengths = [len(s) for s in sequences]
    hidden = model(torch.cat(sequences), PackedContext(lengths, parity=True))
    logprobs, _ = token_logprobs(hidden, model.head_weight, torch.cat(next_tokens(sequences)), 0.8)
    assert logprobs.requires_grad
    return list(logprobs.detach().split(lengths))


def cached_logprobs(model: Decoder, sequences: list[Tensor], bucket: int) -> list[Tensor]:
    """As an engine computes them: a step for each token, all sequences in one batch, logits of the batch at once."""
    hidden = decode_hidden(model, sequences, bucket)
    with torch.no_grad():
        return [
            torch.cat([logits_logprobs(model.logits(h[None]), t[None], 0.8) for h, t in zip(rows, targets)])
            for rows, targets in zip(hidden, next_tokens(sequences))
        ]


def different(one: list[Tensor], two: list[Tensor]) -> int:
    return sum(int((a != b).sum()) for a, b in zip(one, two, strict=True))


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def alternating() -> list[object]:
    """Every configuration in either dtype; quick are those of ``QUICK``."""
    pairs = [(name, dtype) for name in CONFIGS for dtype in (torch.float32, torch.bfloat16)]
    return [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in QUICK)) for pair in pairs]


@pytest.mark.parametrize(("name", "dtype"), alternating())
def test_packed_equals_cached_decoding(name: str, dtype: torch.dtype, threads: int) -> None:
    model = decoder(CONFIGS[name], dtype)
    sequences = list(tokens(LENGTHS).split(LENGTHS))
    together = packed_logprobs(model, sequences)
    if dtype == torch.bfloat16:  # the engine keeps its parameters in the compute dtype
        model = model.to(dtype)
    for rows, bucket in (([0, 1, 2, 3, 4, 5, 6, 7, 8], 64), ([3], 128), ([8, 2, 6], 32)):
        some = [sequences[i] for i in rows]
        assert different(cached_logprobs(model, some, bucket), [together[i] for i in rows]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_packed_does_not_depend_on_what_is_packed_beside(dtype: torch.dtype, threads: int) -> None:
    model = decoder(CONFIGS["qwen3-wide"], dtype)
    sequences = list(tokens(LENGTHS).split(LENGTHS))
    together = packed_logprobs(model, sequences)
    for rows in ([3], [6], [8, 1], [5, 4, 3, 2, 1, 0]):
        assert different(packed_logprobs(model, [sequences[i] for i in rows]), [together[i] for i in rows]) == 0
    many = packed_logprobs(model, sequences * 12)
    assert different(many, together * 12) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences_agree_too(dtype: torch.dtype, threads: int) -> None:
    """Where full speed would take SDPA; caches of three sizes."""
    lengths = [900, 41, 517]
    model = decoder(CONFIGS["qwen3-wide"], dtype)
    sequences = list(tokens(lengths).split(lengths))
    together = packed_logprobs(model, sequences)
    for rows, bucket in (([0, 1, 2], 1024), ([2, 1], 528)):
        assert different(cached_logprobs(model, [sequences[i] for i in rows], bucket), [together[i] for i in rows]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_fused_projections_keep_every_bit(dtype: torch.dtype, threads: int) -> None:
    for name in ("llama-biases", "qwen3-wide", "one-kv-head"):
        model = decoder(CONFIGS[name], dtype)
        sequences = list(tokens([9, 12]).split([9, 12]))
        plain = cached_logprobs(model, sequences, 32)
        model.fuse()
        assert different(cached_logprobs(model, sequences, 32), plain) == 0, name
        assert different(packed_logprobs(model, sequences), plain) == 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_speed_mode_is_near(dtype: torch.dtype) -> None:
    model = decoder(FAMILIES["qwen3"], dtype)
    ids = tokens(LENGTHS)
    hidden = model(ids, PackedContext(LENGTHS))
    found, _ = token_logprobs(hidden, model.head_weight, ids)
    expected, _ = token_logprobs(model(ids, PackedContext(LENGTHS, parity=True)), model.head_weight, ids)
    assert (found - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 130, 700])
def test_log_probs_of_the_engine_are_those_of_the_trainer(dtype: torch.dtype, rows: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 64, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, 64, generator=generator)
    targets = torch.randint(VOCAB, (700,), generator=generator)
    model = Decoder(shape("llama", tie_embeddings=True), dtype)
    model.model.embed_tokens.weight.data = weight
    for temperature in (1.0, 0.7):
        expected, _ = token_logprobs(hidden, weight, targets, temperature)
        found = logits_logprobs(model.logits(hidden[:rows]), targets[:rows], temperature)
        assert torch.equal(found, expected[:rows])


@st.composite
def cases(draw: st.DrawFn) -> tuple[DecoderConfig, torch.dtype, list[int], list[int], int, int]:
    """A configuration, a dtype, lengths, some of them that decode together, a bucket, a number of threads."""
    width = draw(st.sampled_from([6, 8, 10, 24, 32, 40, 80, 96, 128, 192]))
    kv_heads, groups = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (1, 5), (1, 8)]))
    sizes = {"hidden_size": draw(st.sampled_from([56, 120, 520])), "num_layers": 1, "head_dim": width}
    sizes |= {"num_kv_heads": kv_heads, "num_heads": kv_heads * groups, "max_positions": 272}
    if draw(st.booleans()):
        config = shape("qwen3_moe", **sizes, expert_layers=(0,))
    else:
        config = shape("qwen3", **sizes, intermediate_size=draw(st.sampled_from([70, 72, 1000])))
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=12)) + draw(st.sampled_from([[], [], [150]]))
    some = draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, max_size=len(lengths), unique=True))
    longest = max(lengths[i] for i in some)
    bucket = draw(st.sampled_from([size for size in (16, 32, 48, 64, 80, 128, 160, 272) if size >= longest]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return config, dtype, lengths, some, bucket, draw(st.integers(1, 2))


prepare()  # as an engine or trainer does


@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_any_lengths_and_company_keep_every_bit(case: tuple) -> None:
    config, dtype, lengths, some, bucket, threads = case
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = decoder(config, dtype)
        sequences = list(tokens(lengths).split(lengths))
        together = packed_logprobs(model, sequences)
        model = model.to(dtype)
        found = cached_logprobs(model, [sequences[i] for i in some], bucket)
        assert different(found, [together[i] for i in some]) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_wide_layer_keep_their_bits_in_any_number(dtype: torch.dtype, threads: int) -> None:
    """Where libraries take other kernels for other numbers of rows."""
    some = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 1024, generator=some).to(dtype).requires_grad_() for n in (720, 136))
    bias = torch.randn(136, generator=some).to(dtype).requires_grad_()
    for b in (None, bias):
        whole = steady_linear(x, weight, b)
        for rows in (1, 5, 16, 48, 107, 112, 272, 592):
            assert torch.equal(steady_linear(x[:rows], weight, b), whole[:rows])
        assert torch.allclose(whole, F.linear(x, weight, b), rtol=0.02, atol=0.5 if dtype == torch.bfloat16 else 1e-3)
    gradients = [torch.autograd.grad(f(x, weight, bias).sum(), (x, weight, bias)) for f in (steady_linear, F.linear)]
    for one, other in zip(*gradients):
        assert torch.allclose(one, other, rtol=0.02, atol=0.5 if dtype == torch.bfloat16 else 1e-3)
