"""Attention against a float64 oracle, and packing that changes nothing and leaks nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.models.tiny import FAMILIES, decoder, tokens
from tilth.models import attention
from tilth.models.attention import PackedContext, bucket_lengths, causal_mask, matmul_attention
from tilth.plan.kernels import KEYS

lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """One query of one head at a time, in float64."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for start, length in zip(np.cumsum([0, *lengths]), lengths):
        for i in range(length):
            first = 0 if window is None else max(0, i - window + 1)
            seen = slice(start + first, start + i + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // group].double() @ q[start + i, head].double() / q.shape[2] ** 0.5
                sink = scores.new_full((1,), -torch.inf) if sinks is None else sinks[head : head + 1].double()
                weights = torch.cat((scores, sink)).softmax(0)[:-1]
                out[start + i, head] = weights @ v[seen, head // group].double()
    return out


def random_qkv(n: int, heads: int = 4, kv_heads: int = 2, hd: int = 8, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, h, hd, generator=generator) for h in (heads, kv_heads, kv_heads)]


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=lengths_of, window=st.none() | st.integers(1, 12), parity=st.booleans(), kv_heads=st.sampled_from([1, 2, 4])
)
def test_packed_attention_is_the_oracle(lengths: list[int], window: int | None, parity: bool, kv_heads: int) -> None:
    ctx = PackedContext(lengths, parity=parity)
    q, k, v = random_qkv(len(ctx.positions), 4, kv_heads)
    out = ctx.attend(0, q, k, v, window)
    n = sum(lengths)
    assert out.shape == q.shape
    assert (out[:n] - oracle(q[:n], k[:n], v[:n], lengths, window)).abs().max() < 1e-5


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=lengths_of,
    window=st.none() | st.integers(1, 12),
    parity=st.booleans(),
    with_sinks=st.booleans(),
    fused=st.booleans(),
)
def test_sinks_and_narrower_values_are_the_oracles(
    lengths: list[int], window: int | None, parity: bool, with_sinks: bool, fused: bool
) -> None:
    ctx = PackedContext(lengths, parity=parity)
    q, k, v = random_qkv(len(ctx.positions))
    v, sinks = v[..., :5], torch.tensor([2.0, -1.0, 0.5, 3.0]) if with_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        for limits in (attention.MASKED_UP_TO, attention.CAUSAL_UP_TO):
            patch.setitem(limits, 4, 0 if fused else 10_000)
        out = ctx.attend(0, q, k, v, window, sinks)
    n = sum(lengths)
    assert out.shape == v.shape[:1] + q.shape[1:2] + v.shape[2:]
    assert (out[:n] - oracle(q[:n], k[:n], v[:n], lengths, window, sinks)).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 40])
def test_sinks_of_fused_kernels_have_the_gradients_of_matmul_attention(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [60, 5, 33]
    q, k, v = (x.requires_grad_() for x in random_qkv(sum(lengths)))
    sinks = torch.tensor([2.0, -1.0, 0.5, 3.0], requires_grad=True)
    results = []
    for above in (0, 10_000):
        monkeypatch.setitem(attention.MASKED_UP_TO, 4, above)
        monkeypatch.setitem(attention.CAUSAL_UP_TO, 4, above)
        out = PackedContext(lengths).attend(0, q, k, v, window, sinks)
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        results.append([out, *torch.autograd.grad((out * probe).sum(), (q, k, v, sinks))])
    assert all((a - b).abs().max() < 2e-5 for a, b in zip(*results))
    assert results[0][4].abs().min() > 0.1


@pytest.mark.parametrize("window", [None, 1, 50, 290, 1000])
def test_sdpa_for_long_sequences_is_matmul_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [300, 5, 290, 257]
    q, k, v = (x.requires_grad_() for x in random_qkv(sum(lengths)))
    results = []
    for above in (0, 10_000):
        monkeypatch.setitem(attention.MASKED_UP_TO, 4, above)
        monkeypatch.setitem(attention.CAUSAL_UP_TO, 4, above)
        out = PackedContext(lengths).attend(0, q, k, v, window)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for by_sdpa, by_matmul in zip(*results):
        assert (by_sdpa - by_matmul).abs().max() < 1e-5 * (1 + by_matmul.abs().max())
    same = torch.equal(results[0][0], results[1][0])
    assert same == (window == 1), "a window of one token is exact; otherwise two kernels must have run"


def test_gradients_of_padded_attention_are_those_of_each_sequence_alone() -> None:
    lengths = [3, 30, 17, 1, 29]
    q, k, v = (x.double().requires_grad_() for x in random_qkv(sum(lengths)))
    packed = torch.autograd.grad(PackedContext(lengths).attend(0, q, k, v, None).square().sum(), (q, k, v))
    alone = torch.autograd.grad(
        sum(
            PackedContext([n]).attend(0, *parts, None).square().sum()
            for n, *parts in zip(lengths, q.split(lengths), k.split(lengths), v.split(lengths))
        ),
        (q, k, v),
    )
    for one, two in zip(packed, alone):
        assert (one - two).abs().max() < 1e-12


@settings(max_examples=examples(15), deadline=None)
@given(lengths=lengths_of, seed=st.integers(0, 5), name=st.sampled_from(["qwen3", "mistral", "llama-dynamic"]))
def test_a_sequence_does_not_depend_on_order_or_neighbours(lengths: list[int], seed: int, name: str) -> None:
    model = decoder(FAMILIES[name])
    parts = tokens(lengths).split(lengths)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    with torch.no_grad():
        hidden = model(torch.cat(parts), PackedContext(lengths)).split(lengths)
        mixed = [lengths[i] for i in order]
        shuffled = model(torch.cat([parts[i] for i in order]), PackedContext(mixed)).split(mixed)
    for place, i in enumerate(order):
        assert (shuffled[place] - hidden[i]).abs().max() < 2e-5


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("lengths", [[9, 20, 14], [12, 12, 12], [30, 280, 7]])
def test_no_gradient_crosses_between_sequences(lengths: list[int], parity: bool) -> None:
    ctx = PackedContext(lengths, parity=parity)
    qkv = [x.requires_grad_() for x in random_qkv(len(ctx.positions))]
    middle = slice(lengths[0], lengths[0] + lengths[1])
    grads = torch.autograd.grad(ctx.attend(0, *qkv, None)[middle].square().sum(), qkv)
    for grad in grads:
        assert grad[middle].abs().sum() > 0 and grad.isfinite().all()
        assert grad[: lengths[0]].abs().sum() == 0 and grad[lengths[0] + lengths[1] :].abs().sum() == 0


def test_no_token_sees_a_later_one() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(24))
    out = PackedContext([24]).attend(0, q, k, v, 5)
    (grad,) = torch.autograd.grad(out[13].sum(), v)
    seen = grad.abs().sum((1, 2)) > 0
    assert seen.nonzero().flatten().tolist() == [9, 10, 11, 12, 13]


def test_bool_and_additive_masks_are_equal_and_so_are_shared_and_per_row_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 2, 16, 8, generator=generator)
    k, v = torch.randn(2, 3, 2, 16, 8, generator=generator)
    additive = causal_mask(16, None, torch.float32)
    expected = matmul_attention(q, k, v, additive)
    assert torch.equal(matmul_attention(q, k, v, additive == 0), expected)
    assert torch.equal(matmul_attention(q, k, v, additive.expand(3, -1, -1, -1, -1)), expected)
    everything = matmul_attention(q, k, v, None)
    assert torch.equal(everything[..., -1, :], expected[..., -1, :])
    assert not torch.equal(everything, expected)


@given(lengths=st.lists(st.integers(1, 5000), max_size=200), whole=st.booleans())
def test_buckets_hold_their_sequences_and_waste_little(lengths: list[int], whole: bool) -> None:
    table = np.array(lengths, np.int64)
    padded = bucket_lengths(table, whole)
    assert (padded >= table).all()
    edges = np.unique(padded)
    fine = np.maximum(table + 16, table * 1.25)
    assert (padded - fine).clip(min=0).sum() < attention._GROUP_TOKENS * 12 * max(1, len(edges))
    assert len(edges) <= 40
    if whole:
        assert (padded % KEYS == 0).all()
    elif lengths:
        assert padded.max() == table.max()


def test_equal_lengths_need_no_moves_and_far_lengths_make_groups() -> None:
    assert PackedContext([60] * 5)._source is None
    assert PackedContext([60] * 5)._groups == [attention._PaddedGroup(0, 5, 60)]
    groups = PackedContext([20] * 200 + [1000])._groups
    assert [(g.count, g.length) for g in groups] == [(200, 32), (1, 1000)]


def test_empty_sequences_and_empty_batches() -> None:
    q, k, v = random_qkv(7)
    out = PackedContext([0, 3, 0, 4]).attend(0, q, k, v, None)
    assert torch.equal(out, PackedContext([3, 4]).attend(0, q, k, v, None))
    model = decoder(FAMILIES["qwen3"])
    for parity in (False, True):
        assert model(tokens([]), PackedContext([], parity=parity)).shape == (0, 64)


def test_positions_and_extents() -> None:
    ctx = PackedContext(torch.tensor([2, 3]))
    assert ctx.positions.tolist() == [0, 1, 0, 1, 2]
    assert ctx.extents.tolist() == [2, 2, 3, 3, 3]


@pytest.mark.parametrize("window", [None, 1, 7, 50, 400])
def test_flash_attention_is_asked_for_the_same_thing(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel by its documentation, in plain Python: is what we hand it what the other kernels compute?"""

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1] if enable_gqa else 1, 1) for x in (k, v))
        assert cu_q.dtype == cu_k.dtype == torch.int32 and q.shape == k.shape == v.shape
        assert max_q == max_k == int(cu_q.diff().max()) and window_size[1] == 0
        left = window_size[0] if window_size[0] >= 0 else max_q
        parts = []
        for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist()):
            i = torch.arange(b - a)
            seen = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - left)
            scores = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) / q.shape[2] ** 0.5
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[a:b]))
        return torch.cat(parts)

    lengths = [300, 0, 5, 64, 290, 33]
    q, k, v = random_qkv(sum(lengths), hd=32)
    expected = PackedContext(lengths).attend(0, q, k, v, window)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr("tilth.models.attention.varlen_serves", lambda q: True)
    torch.testing.assert_close(PackedContext(lengths).attend(0, q, k, v, window), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 50])
def test_on_a_gpu(dtype: torch.dtype, bound: float, window: int | None) -> None:
    lengths = [300, 5, 64, 290, 33]
    q, k, v = random_qkv(sum(lengths), hd=32)
    expected = PackedContext(lengths).attend(0, q, k, v, window)
    moved = [x.to("cuda", dtype).requires_grad_() for x in (q, k, v)]
    out = PackedContext(lengths, "cuda").attend(0, *moved, window)
    assert (out.float().cpu() - expected).abs().max() < bound
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().square().sum(), moved))


@pytest.mark.parametrize("seen", [90, 300, 700])
def test_masked_keys_behind_a_row_change_no_bit_in_parity(seen: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 1, 4, 16, generator=generator), torch.randn(1, 2, 1040, 16, generator=generator)
    found = []
    for keys in (-(-seen // 16) * 16, 528, 768, 1040):
        mask = torch.zeros(1, 1, 1, 4, max(keys, seen))
        mask[..., seen:] = -torch.inf
        some = k[:, :, : mask.shape[-1]]
        found.append(matmul_attention(q, some, some, mask, parity=True))
    torch.testing.assert_close(
        found[0], matmul_attention(q, k[:, :, :seen], k[:, :, :seen], None), atol=1e-6, rtol=1e-5
    )
    assert all(torch.equal(found[0], other) for other in found[1:])
