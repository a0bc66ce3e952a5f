"""Numbers of a shape against an independent count over the tensors that such a decoder has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.config.load import from_dict
from tilth.config.schema import ModelConfig
from tilth.models.config import DecoderConfig
from tilth.models.family import new_config
from tilth.plan.shape import attended, kv_bytes, matrices, parameters, sequence_flops, token_flops

flag = st.booleans()


@st.composite
def shapes(draw):
    size = st.integers(1, 9)
    kv_heads = draw(st.integers(1, 3))
    flags = ("qk_norm", "qkv_bias", "o_bias", "mlp_bias", "tie_embeddings")
    return DecoderConfig(
        *[draw(size) for _ in range(4)], kv_heads * draw(st.integers(1, 3)), kv_heads, 2 * draw(size),
        **{name: draw(flag) for name in flags},
    )  # fmt: skip


def tensors(s):
    """Shapes of all parameters, written out one by one as in a checkpoint."""
    q, k = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    found = {"embed": (s.vocab_size, s.hidden_size), "norm": (s.hidden_size,)}
    if not s.tie_embeddings:
        found["head"] = (s.vocab_size, s.hidden_size)
    for i in range(s.num_layers):
        for name, rows, columns, bias in [
            ("q", q, s.hidden_size, s.qkv_bias),
            ("k", k, s.hidden_size, s.qkv_bias),
            ("v", k, s.hidden_size, s.qkv_bias),
            ("o", s.hidden_size, q, s.o_bias),
            ("gate", s.intermediate_size, s.hidden_size, s.mlp_bias),
            ("up", s.intermediate_size, s.hidden_size, s.mlp_bias),
            ("down", s.hidden_size, s.intermediate_size, s.mlp_bias),
        ]:
            found[f"{i}.{name}"] = (rows, columns)
            if bias:
                found[f"{i}.{name}.bias"] = (rows,)
        found |= {f"{i}.norm1": (s.hidden_size,), f"{i}.norm2": (s.hidden_size,)}
        if s.qk_norm:
            found |= {f"{i}.qnorm": (s.head_dim,), f"{i}.knorm": (s.head_dim,)}
    return found


@given(shapes())
def test_parameters(shape):
    assert parameters(shape) == sum(int(np.prod(t)) for t in tensors(shape).values())


@given(shapes())
def test_matrices(shape):
    inside = [t for name, t in tensors(shape).items() if len(t) == 2 and name not in ("embed", "head")]
    assert matrices(shape) == sum(rows * columns for rows, columns in inside)


@given(shapes(), st.integers(1, 20), flag)
def test_forward_flops_are_those_of_every_matrix_product(shape, seen, head):
    """Two for each multiply-add of [1, in] x [in, out], and of scores and mixing over the tokens seen."""
    products = [t for name, t in tensors(shape).items() if len(t) == 2 and name not in ("embed", "head")]
    flops = sum(2 * rows * columns for rows, columns in products)
    flops += 2 * shape.vocab_size * shape.hidden_size * head
    for _ in range(shape.num_layers * shape.num_heads):
        flops += 2 * seen * shape.head_dim + 2 * seen * shape.head_dim
    found = token_flops(shape, seen, head)
    assert found.forward == flops and found.backward == 2 * flops and found.both == 3 * flops


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 15))
def test_attended_pairs(sizes, window):
    full = sum(sum(1 for j in range(n) for i in range(j + 1)) for n in sizes)
    near = sum(sum(1 for j in range(n) for i in range(j + 1) if j - i < window) for n in sizes)
    assert attended(np.array(sizes)) == full and attended(np.array(sizes), window) == near


def test_flops_of_sequences_are_the_sum_over_tokens():
    shape = DecoderConfig(50, 8, 16, 2, 2, 1, 4)
    by_token = sum(token_flops(shape, t + 1).forward for n in (3, 7) for t in range(n))
    assert sequence_flops(shape, np.array([3, 7])).forward == pytest.approx(by_token, rel=1e-12)
    assert sequence_flops(shape, np.array([], int)) == (0, 0)


def test_kv_bytes():
    assert kv_bytes(DecoderConfig(50, 8, 16, 3, 4, 2, 6), 2) == 2 * 3 * 2 * 6 * 2


def test_new_config_resolves_zeros_and_the_family():
    shape = new_config(ModelConfig(), 14)
    assert (shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (4, 32, 384)
    assert shape.qk_norm and not shape.qkv_bias and shape.tie_embeddings
    assert new_config(ModelConfig(family="qwen2"), 14).qkv_bias
    asked = new_config(ModelConfig(ffn=100, kv_heads=2, head_dim=8, tied=False), 14)
    assert (asked.intermediate_size, asked.num_kv_heads, asked.head_dim, asked.tie_embeddings) == (100, 2, 8, False)


def test_the_demo_model_has_three_quarters_of_a_million_parameters():
    assert 0.75e6 < parameters(new_config(from_dict({}).model, 14)) < 0.9e6
