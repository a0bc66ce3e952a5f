"""The checksum: the same for the same bits however they lie in memory, another one for any change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.core import checksum as module
from tilth.core.checksum import checksum
from tilth.core.random import stream

quick = settings(max_examples=3 * settings.default.max_examples, deadline=None)
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def values(n: int, dtype: torch.dtype) -> torch.Tensor:
    words = stream(1, "values").bits(0, 2 * n + 2).to(torch.uint8)
    if dtype == torch.bool:
        return words[:n] > 100
    size = torch.empty(0, dtype=dtype).element_size()
    many = stream(1, "values").bits(0, n * size + 8).to(torch.uint8)[: n * size].clone()
    return many.view(dtype)


def oracle(tensor: torch.Tensor) -> int:
    """The definition in Python integers."""
    import hashlib

    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 8)
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    mixed = [w * 0x9E3779B97F4A7C15 % 2**64 for w in words]
    keys = stream(0, "checksum").bits(0, 2 * min(len(words), module._ROW)).view(-1, 2).tolist()
    keys = [high << 32 | low | 1 for high, low in keys]
    sums = [
        sum(k * (w ^ w >> 32) for k, w in zip(keys, mixed[row : row + module._ROW])) % 2**64
        for row in range(0, len(words), module._ROW)
    ]
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    for total in sums:
        digest.update(total.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 1001])
def test_equals_its_definition(dtype, n):
    assert checksum(values(n, dtype)) == oracle(values(n, dtype))


@pytest.mark.parametrize("n", [16384 * 2 - 1, 16384 * 2, 16384 * 2 + 1, 16384 * 6 + 5])
def test_rows_and_their_ends(n):
    assert checksum(values(n, torch.float32)) == oracle(values(n, torch.float32))


@pytest.mark.parametrize("passes", [2, 3, 256])
@pytest.mark.parametrize("size", [0, 5, 8 * 16384, 8 * 16384 * 11 + 3])
def test_the_sums_of_any_device_are_those_of_a_cpu_whatever_the_size_of_a_pass(passes, size, monkeypatch):
    data = values(size, torch.uint8)
    monkeypatch.setattr(module, "_ROWS", passes)
    assert module._sums_there(data) == module._sums_here(data.numpy())


def test_data_that_is_not_aligned_is_read_where_it_is():
    data = values(8 * 16384 + 40, torch.uint8)
    assert checksum(data[3:]) == checksum(data[3:].clone())


def test_values_are_stable():
    """Stored checkpoints carry these numbers."""
    assert checksum(torch.arange(5, dtype=torch.float32)) == 15293388282716662468
    assert checksum(torch.zeros(0)) == 3685551283119242162
    assert checksum(torch.arange(100000)) == 14667948690081832033


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_only_the_values_count(dtype):
    tensor = values(6 * 35, dtype).view(6, 35)
    expected = checksum(tensor)
    odd = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(6, 35)
    assert odd.storage_offset() == 1 and checksum(odd) == expected
    assert checksum(tensor.t().contiguous().t()) == expected
    assert checksum(tensor.clone().view(dtype).requires_grad_(dtype.is_floating_point)) == expected


def test_dtype_and_shape_count():
    zeros = [torch.zeros(8, dtype=d) for d in (torch.int32, torch.float32)] + [torch.zeros(2, 4), torch.zeros(4, 2)]
    zeros += [torch.zeros(7), torch.zeros(8, 1), torch.zeros(()), torch.zeros(0), torch.zeros(0, 3)]
    assert len({checksum(z) for z in zeros}) == len(zeros)


@quick
@given(st.integers(1, 70_000), st.data())
def test_every_flipped_bit_is_seen(n, data):
    tensor = values(n, torch.float32)
    expected = checksum(tensor)
    at, bit = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 31))
    tensor.view(torch.int32)[at] ^= torch.tensor(1 << bit).to(torch.int32)
    assert checksum(tensor) != expected


@quick
@given(st.integers(2, 70_000), st.data())
def test_swapped_values_are_seen(n, data):
    tensor = values(n, torch.float32)
    a, b = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    swapped = tensor.clone()
    swapped[a], swapped[b] = tensor[b], tensor[a]
    same = torch.equal(swapped.view(torch.int32), tensor.view(torch.int32))
    assert (checksum(swapped) == checksum(tensor)) == same


@quick
@given(st.integers(0, 2_000), st.integers(0, 2_000))
def test_two_flipped_signs_are_seen(a, b):
    tensor = values(2_001, torch.float32)
    changed = tensor.clone()
    changed[a] = -changed[a]
    changed[b] = -changed[b]
    assert (checksum(changed) == checksum(tensor)) == (a == b)


def test_moved_and_dropped_values_are_seen():
    tensor = values(50_000, torch.float32)
    changed = [tensor.roll(1), tensor.flip(0), tensor[1:], tensor[:-1], torch.cat([tensor, torch.zeros(1)])]
    changed += [torch.cat([tensor[32_768:], tensor[:32_768]]), -tensor]
    assert len({checksum(t) for t in [tensor, *changed]}) == 1 + len(changed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("n", [2, 64, 4_096, 50_000])
def test_one_change_to_all_values_is_seen(dtype, n):
    """One bit flipped in every value: with odd multipliers alone, flips of the top bit cancel in pairs."""
    tensor = values(n, dtype)
    width = 8 * tensor.element_size()
    raw = tensor.view({8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
    flips = [-(1 << bit) if bit == width - 1 else 1 << bit for bit in range(width)]
    assert len({checksum(raw), *(checksum(raw ^ flip) for flip in flips)}) == width + 1
    assert checksum(-tensor) != checksum(tensor)


def test_nothing_collides_among_many():
    rows = stream(2, "many").bits(0, 40_000).view(20_000, 2)
    assert len({checksum(row) for row in rows[:4_000]}) == 4_000


def test_signed_zero_and_nan_bits_count():
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum(nan[:1]) != checksum(nan[1:])
    assert checksum(nan) == checksum(nan.clone())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_agrees():
    tensor = values(1_000_003, torch.float32)
    assert checksum(tensor.cuda()) == checksum(tensor)
