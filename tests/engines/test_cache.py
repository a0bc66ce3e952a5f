"""The physical cache: layouts keep what they must, copies land where they should, attention sees what it may."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.reference import CONFIG, make_model
from tests.examples import examples
from tilth.engines.cache import CachedContext, KVCache, PrefixStore, _runs, fused_attention, shared_attention
from tilth.models.attention import PackedContext, matmul_attention
from tilth.models.config import DecoderConfig

CPU = torch.device("cpu")


def slab_of(rows, capacity, seed=0):
    slab = KVCache(CONFIG, torch.float32, CPU)
    slab.layout(rows, capacity)
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*slab.keys, *slab.values]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return slab


def contents(slab):
    return torch.stack([t.clone() for t in [*slab.keys, *slab.values]])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.data())
def test_layouts_keep_the_beginning_and_stay_finite_and_dense(shapes, data):
    slab = slab_of(3, 4)
    for rows, capacity in shapes:
        keep_rows = data.draw(st.integers(0, min(rows, slab.rows)))
        keep_tokens = data.draw(st.integers(0, min(capacity, slab.capacity)))
        before = contents(slab)
        slab.layout(rows, capacity, keep_rows, keep_tokens)
        after = contents(slab)
        assert after.shape[1:] == (rows, CONFIG.num_kv_heads, capacity, CONFIG.head_dim)
        assert torch.equal(after[:, :keep_rows, :, :keep_tokens], before[:, :keep_rows, :, :keep_tokens])
        assert after.isfinite().all()
        tensors = [*slab.keys, *slab.values]
        assert all(t.is_contiguous() for t in tensors)
        assert len({t.data_ptr() for t in tensors}) == len(tensors)
        for value, tensor in enumerate(tensors):  # no two share memory
            tensor.fill_(value)
        assert [t.unique().tolist() for t in tensors] == [[v] for v in range(len(tensors))]


def test_memory_is_that_of_the_largest_layout_and_is_used_again():
    slab = slab_of(8, 64)
    tensors = 2 * CONFIG.num_layers
    token = CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert slab.nbytes == (tensors + 1) * 8 * 64 * token
    buffers = {b.data_ptr() for b in slab._buffers}
    for rows, capacity in ((4, 32), (8, 48), (2, 256)):
        slab.layout(rows, capacity)
    assert {b.data_ptr() for b in slab._buffers} == buffers


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12, unique_by=lambda p: p[0]))
def test_runs_cover_every_pair_once(pairs):
    to, rows = [p[0] for p in pairs], [p[1] for p in pairs]
    seen = []
    for there, here, count, step in _runs(to, rows):
        assert step in (0, 1)
        seen += [(there + i, here + step * i) for i in range(count)]
    assert seen == pairs


@pytest.mark.parametrize("to, rows", [([2, 3, 4, 0], [1, 1, 1, 1]), ([0, 1, 3], [2, 3, 0]), ([], []), ([4, 1], [0, 3])])
def test_copy(to, rows):
    mine, other = slab_of(5, 8), slab_of(4, 6, seed=1)
    wanted, source = contents(mine), contents(other)
    for a, b in zip(to, rows):
        wanted[:, a, :, :5] = source[:, b, :, :5]
    mine.copy(to, other, rows, 5)
    assert torch.equal(contents(mine), wanted)


@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_read_is_a_copy_and_can_be_written_back(heads):
    slab = KVCache(replace(CONFIG, num_kv_heads=heads), torch.float32, CPU)
    slab.layout(2, 8)
    for value, tensor in enumerate(slab.tensors, 1):
        tensor.fill_(value)
    found = slab.read(1, 2, 5)
    assert [x.shape for x in found] == [(3, heads, CONFIG.head_dim)] * 2 * CONFIG.num_layers
    for tensor in slab.tensors:
        tensor.zero_()
    slab.write(1, 4, found)
    wanted = [(value, value) for value in range(1, len(found) + 1)]
    assert [(t[1, :, 4:7].mean(), t.sum() / heads / 3 / CONFIG.head_dim) for t in slab.tensors] == wanted


@pytest.mark.parametrize("slots", [(3, 0, 8), (3, 4, 8)])
def test_the_store_gives_back_what_it_was_given(slots):
    store = PrefixStore(KVCache(CONFIG, torch.float32, CPU), 4, most=9)
    first, second = slab_of(2, 16), slab_of(2, 16, seed=1)
    store.save([(0, slots[0]), (1, slots[1])], first, 1)
    store.save([(2, slots[2])], second, 0)
    target = slab_of(3, 16, seed=2)
    rest = contents(target)
    store.load(slots, target, 2)
    got = contents(target)
    assert torch.equal(got[:, 2, :, :8], contents(first)[:, 1, :, :8])
    assert torch.equal(got[:, 2, :, 8:12], contents(second)[:, 0, :, 8:12])
    assert torch.equal(got[:, 2, :, 12:], rest[:, 2, :, 12:]) and torch.equal(got[:, :2], rest[:, :2])
    assert store.nbytes <= 5 * 9 * 4 * CONFIG.num_kv_heads * CONFIG.head_dim * 4


WINDOWED = DecoderConfig(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=64,
    sliding_window=5, window_layers=(0,), family="qwen2", qkv_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("chunks", [[24], [8, 16], [1] * 24, [5, 1, 1, 9, 8]], ids=str)
def test_any_split_into_chunks_equals_the_whole(config, chunks, parity):
    """Rows of 24, 13 and 24 tokens in a slab full of old values, against a packed forward pass."""
    if parity and chunks[0] % 8:
        chunks = [8, 8, 8]
    model = make_model(config)
    lengths, rows = torch.tensor([24, 13, 24]), 8 if parity else 3
    ids = torch.zeros(rows, 24, dtype=torch.int64)
    ids[:3] = torch.randint(0, 100, (3, 24), generator=torch.Generator().manual_seed(1))
    whole = model(torch.cat([row[:n] for row, n in zip(ids, lengths)]), PackedContext(lengths, parity=parity))
    slab = slab_of(rows + 1, 32)
    got, at = [], 0
    for width in chunks:
        context = CachedContext(slab, torch.full((rows,), at), width, 32, parity)
        got.append(model(ids[:, at : at + width].flatten(), context).view(rows, width, -1))
        at += width
    got = torch.cat([row[:n] for row, n in zip(torch.cat(got, 1), lengths)])
    if parity:
        assert torch.equal(got, whole)
    else:
        torch.testing.assert_close(got, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 3])
def test_fused_attention_is_matmul_attention(groups):
    q, k, v = torch.randn(4, 2, groups, 1, 8), torch.randn(4, 2, 32, 8), torch.randn(4, 2, 32, 8)
    hidden = torch.arange(32) > torch.tensor([0, 3, 31, 17])[:, None]
    mask = torch.zeros(4, 1, 1, 1, 32).masked_fill_(hidden[:, None, None, None], -torch.inf)
    torch.testing.assert_close(fused_attention(q, k, v, mask), matmul_attention(q, k, v, mask), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_of_a_gpu_is_matmul_attention(groups, width):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 2, groups, width, 8, generator=generator)
    k, v = (torch.randn(4, 2, 32, 8, generator=generator) for _ in range(2))
    place = torch.tensor([0, 7, 31 - width, 16])[:, None] + torch.arange(width)
    hidden = torch.arange(32) > place[:, :, None]
    mask = torch.zeros(4, width, 32).masked_fill_(hidden, -torch.inf)[:, None, None]
    torch.testing.assert_close(shared_attention(q, k, v, mask), matmul_attention(q, k, v, mask), atol=1e-6, rtol=1e-5)
