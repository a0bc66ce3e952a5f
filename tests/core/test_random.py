"""Random numbers: known answers, an independent oracle, and the bits of the whole in every slice and shard."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core import random
from tilth.core.checksum import checksum
from tilth.core.errors import ArgumentError
from tilth.core.layout import Box
from tilth.core.random import (
    LONG,
    Stream,
    dropout_mask,
    fill_normal_,
    stream,
    stream_id,
    uniform_parts,
    uniform_rows,
)

quick = settings(max_examples=2 * settings.default.max_examples, deadline=None)
seeds = st.integers(-(2**63), 2**64 - 1)
ids = st.integers(0, 2**63 - 1)
starts = st.one_of(st.integers(0, 50), st.integers(2**34 - 20, 2**34 + 20), st.integers(0, 2**60))
KINDS = ("bits", "uniform", "normal")


def oracle(seed: int, stream_number: int, element: int) -> int:
    """Word ``element`` of a stream in plain Python integers, straight from the paper's round function."""
    block = (element // 4) % 2**64
    c = [block % 2**32, block >> 32, stream_number % 2**32, (stream_number >> 32) % 2**32]
    k = [seed % 2**32, (seed >> 32) % 2**32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[element % 4]


@contextlib.contextmanager
def lanes(count: int):
    """Passes of this many blocks, so that small requests are cut into many."""
    before = dict(random._LANES)
    random._LANES.update(cpu=count, cuda=count)
    try:
        yield
    finally:
        random._LANES.update(before)


@pytest.fixture
def torch_operations(monkeypatch):
    """The operations of an accelerator, on the CPU."""
    monkeypatch.setattr(random, "_NUMPY", random._TORCH)
    random._constants.cache_clear()
    yield
    random._constants.cache_clear()


def signed(low: int, high: int) -> int:
    value = high << 32 | low
    return value - 2**64 if value >= 2**63 else value


# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def known_answers(counter, key):
    maker = random._Lanes(key[1] << 32 | key[0], 1, torch.device("cpu"))
    as_array = [maker.ops.of(torch.tensor([signed(*pair)])) for pair in (counter[2:], counter[:2])]
    maker.run(as_array[0], as_array[1], maker.ops.of(torch.tensor([0])))
    return tuple(int(word[0]) for word in maker.words())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert known_answers(counter, key) == expected


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers_by_torch_operations(torch_operations, counter, key, expected):
    assert known_answers(counter, key) == expected


def test_known_answer_through_a_stream():
    assert tuple(Stream(0, 0).bits(0, 4).tolist()) == KNOWN[0][2]


@pytest.mark.parametrize("i", range(3))
def test_the_oracle_knows_them_too(i):
    counter, key, expected = KNOWN[i]
    element = 4 * (counter[1] << 32 | counter[0])
    words = [oracle(key[1] << 32 | key[0], counter[3] << 32 | counter[2], element + w) for w in range(4)]
    assert tuple(words) == expected


@quick
@given(seeds, ids, starts, st.integers(0, 30))
def test_bits_equal_the_oracle(seed, number, start, count):
    expected = [oracle(seed, number, start + j) for j in range(count)]
    assert Stream(seed, number).bits(start, count).tolist() == expected


def test_one_wrong_round_is_seen(monkeypatch):
    monkeypatch.setattr(random, "_ROUNDS", 9)
    random._constants.cache_clear()
    assert tuple(Stream(0, 0).bits(0, 4).tolist()) != KNOWN[0][2]
    random._constants.cache_clear()


@quick
@given(seeds, ids, starts, st.integers(0, 60), st.integers(0, 200), st.integers(3, 40), st.sampled_from(KINDS))
def test_a_slice_has_the_bits_of_the_whole(seed, number, start, skip, count, size, kind):
    make = getattr(Stream(seed, number), kind)
    whole = make(start, skip + count + 3)
    with lanes(size):
        assert torch.equal(make(start + skip, count), whole[skip : skip + count])


@pytest.mark.parametrize("kind", KINDS)
def test_long_slices_at_every_phase(kind):
    make = getattr(stream(5, "long"), kind)
    whole = make(0, 300_000)
    for start in (1, 2, 3, 131_069):
        assert torch.equal(make(start, 150_001), whole[start : start + 150_001])


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_torch_operations_agree(kind, monkeypatch):
    make = getattr(stream(1, "agree"), kind)
    expected = make(3, 70_000)
    monkeypatch.setattr(random, "_NUMPY", random._TORCH)
    random._constants.cache_clear()
    got = make(3, 70_000)
    mask = dropout_mask(stream(1, "agree"), torch.arange(100), 12, 0.3)
    monkeypatch.undo()
    random._constants.cache_clear()
    assert torch.equal(got, expected)
    assert torch.equal(mask, dropout_mask(stream(1, "agree"), torch.arange(100), 12, 0.3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_agrees(kind):
    make = getattr(stream(1, "agree"), kind)
    assert torch.equal(make(3, 5_000_000, device="cuda").cpu(), make(3, 5_000_000))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("inference", [False, True])
def test_threads_change_nothing(two_threads, inference):
    expected = stream(2, "threads").normal(1, 40_000)
    with torch.inference_mode(inference), lanes(256):
        got = stream(2, "threads").normal(1, 40_000)
    assert torch.equal(got, expected)


def test_an_error_in_a_thread_reaches_the_caller(two_threads):
    def broken(maker, out):
        raise ZeroDivisionError

    request = random._request(stream(0), broken, torch.float32, [0], torch.device("cpu"))
    with lanes(16), pytest.raises(ZeroDivisionError):
        request.new(10_000)


def test_uniform_is_the_high_24_bits():
    words = stream(0, "u").bits(0, 50_000)
    values = stream(0, "u").uniform(0, 50_000)
    assert torch.equal(values.double(), (words >> 8).double() * 2.0**-24)
    assert values.dtype == torch.float32
    assert 0 <= values.min() and values.max() < 1


def normal_oracle(words: np.ndarray) -> np.ndarray:
    """Box-Muller in float64 on 32-bit words [2n]."""
    first, second = words.astype(np.float64).reshape(-1, 2).T
    u = np.float64(np.float32(np.float32(first) * np.float32(2**-32)) + np.float32(2**-33))
    angle = 2 * math.pi * np.where(second >= 2**31, second - 2**32, second) / 2**32
    radius = np.sqrt(-2 * np.log(u))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).ravel()


def test_normal_is_box_muller():
    words = stream(0, "n").bits(0, 400_000).numpy()
    error = np.abs(stream(0, "n").normal(0, 400_000).numpy() - normal_oracle(words))
    assert error.max() < 5e-6


EDGES = sorted({v for e in range(33) for v in (2**e - 2, 2**e - 1, 2**e, 2**e + 1) if 0 <= v < 2**32})


def test_normal_at_the_edges_of_its_words():
    words = np.array(list(itertools.product(EDGES, [*EDGES[::7], 2**31 - 1, 2**31, 2**32 - 1])), np.int64)
    maker = random._Lanes(0, len(words) // 2 + 1, torch.device("cpu"))
    words = words[: len(words) // 2 * 2]
    n = len(words) // 2
    maker.x, maker.y, maker.spare = (b[: 2 * n].reshape(2, n) for b in maker.buffers)
    maker.x[...], maker.y[...] = words[:, 0].reshape(n, 2).T, words[:, 1].reshape(n, 2).T
    out = np.empty(4 * n, np.float32)
    random._normal(maker, out)
    assert np.isfinite(out).all()
    assert np.abs(out - normal_oracle(words)).max() < 5e-6
    assert np.abs(out).max() <= 6.77


def kolmogorov(values: torch.Tensor, distribution) -> float:
    """The Kolmogorov-Smirnov statistic times sqrt(n); above 1.95 with probability 0.001."""
    ordered = distribution(values.double().sort().values)
    grid = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return float((ordered - grid).abs().max()) * math.sqrt(len(ordered))


def test_uniform_statistics():
    values = stream(11, "statistics").uniform(0, 200_000)
    assert kolmogorov(values, lambda x: x) < 1.95
    a, b = values.view(-1, 2).T
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) * math.sqrt(len(a)) < 3.5


def test_normal_statistics():
    values = stream(12, "statistics").normal(0, 200_000)
    assert kolmogorov(values, lambda x: torch.special.ndtr(x)) < 1.95
    a, b = values.view(-1, 2).T
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) * math.sqrt(len(a)) < 3.5
    assert abs(float((values.double() ** 4).mean()) - 3) < 0.08


def test_streams_are_unlike_each_other():
    rows = torch.stack([stream(seed, "x", i).uniform(0, 5_000) for seed in range(3) for i in range(5)])
    off_diagonal = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(off_diagonal.abs().max()) * math.sqrt(5_000) < 4.5


def test_bits_of_every_position_are_fair():
    words = stream(13, "bits").bits(0, 40_000)
    ones = torch.stack([(words >> b & 1).double().mean() for b in range(32)])
    assert float((ones - 0.5).abs().max()) * 2 * math.sqrt(40_000) < 4.5


def test_stream_ids_are_stable():
    assert stream_id("init", "model.norm.weight") == 3466342081488897116
    assert stream_id() == 3162492252461194071
    assert stream_id("sample", 3, "x") == 2862833068951427222


def test_values_are_stable():
    """What was trained with one version replays with the next: these numbers never change."""
    normal = stream(0, "golden").normal(0, 4).view(torch.int32)
    assert normal.tolist() == [1053817987, 1030847774, 1047786986, -1123146597]
    assert checksum(stream(0, "golden").normal(0, 100_000)) == 9426525484811949194
    assert checksum(stream(0, "golden").uniform(0, 100_000)) == 7940614771822431464
    assert stream(0, "golden").permutation(8).tolist() == [3, 4, 6, 0, 1, 2, 5, 7]


def test_stream_ids_tell_paths_apart():
    paths = [
        (),
        ("a",),
        ("a", "b"),
        ("ab",),
        ("a", ""),
        ("", "a"),
        (1,),
        ("1",),
        ("i1",),
        (-1,),
        (1, 1),
        (11,),
        ("s1",),
    ]
    assert len({stream_id(*path) for path in paths}) == len(paths)
    assert stream_id(1) != stream_id(True)  # equal, but of two names


@given(st.lists(st.one_of(st.text(), st.integers()), max_size=4))
def test_stream_ids_fit_a_tensor(path):
    number = stream_id(*path)
    assert 0 <= number < 2**63
    assert stream(7, *path) == Stream(7, number)


@quick
@given(seeds, st.lists(ids, min_size=0, max_size=7), starts, st.integers(0, 20), st.integers(2, 40))
def test_rows_equal_their_streams(seed, numbers, start, count, size):
    rows = torch.tensor(numbers, dtype=torch.int64)
    expected = [Stream(seed, n).uniform(start, count).tolist() for n in numbers]
    with lanes(size):
        assert uniform_rows(seed, rows, start, count).tolist() == expected
        at = torch.full_like(rows, start)
        assert uniform_rows(seed, rows, at, count).tolist() == expected


@quick
@given(st.lists(starts, min_size=1, max_size=6), st.integers(1, 33), st.integers(3, 20))
def test_rows_may_start_anywhere(first, count, size):
    numbers = torch.arange(len(first)) * 977
    with lanes(size):
        got = uniform_rows(4, numbers, torch.tensor(first), count)
    for i, row in enumerate(got):
        assert torch.equal(row, Stream(4, 977 * i).uniform(first[i], count))


@quick
@given(st.integers(0, 300), seeds)
def test_permutation_is_the_order_of_its_keys(n, seed):
    order = stream(seed, "shuffle").permutation(n)
    words = stream(seed, "shuffle").bits(0, 2 * n).view(n, 2).tolist()
    keys = [signed(low, high) for high, low in words]
    assert order.tolist() == sorted(range(n), key=lambda i: (keys[i], i))


def test_permutation_breaks_ties_by_index(monkeypatch):
    monkeypatch.setattr(Stream, "bits", lambda self, start, count, device="cpu": torch.zeros(count, dtype=torch.int64))
    assert stream(0).permutation(50).tolist() == list(range(50))


def test_every_place_is_as_likely():
    first = torch.tensor([int(stream(s, "p").permutation(8)[0]) for s in range(2_000)])
    counts = torch.bincount(first, minlength=8).double()
    assert float(((counts - 250) ** 2 / 250).sum()) < 24.3  # chi-square, 7 degrees of freedom, 0.001


@quick
@given(seeds, st.integers(0, 100), st.sampled_from([1, 2, 7, 1000, 2**31]))
def test_integers(seed, start, high):
    words = [oracle(seed, stream_id("i"), start + j) for j in range(20)]
    assert stream(seed, "i").integers(start, 20, high).tolist() == [w * high >> 32 for w in words]


def test_parts_of_several_streams_are_drawn_at_once():
    streams, counts = [stream(3, "parts", i) for i in range(5)], [1, 8, 0, 7, 1000]
    drawn = uniform_parts(streams, counts)
    assert all(torch.equal(own, one.uniform(0, n)) for own, one, n in zip(drawn, streams, counts, strict=True))
    drawn = uniform_parts(streams[:2], [LONG - 3, LONG + 5])  # long ones, each by itself
    assert [own[-1] for own in drawn] == [one.uniform(0, n)[-1] for one, n in zip(streams, (LONG - 3, LONG + 5))]


@pytest.mark.parametrize("high", [0, -3, 2**31 + 1])
def test_integers_out_of_range(high):
    with raises(ArgumentError, "high"):
        stream(0).integers(0, 1, high)


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset))
    return shape, Box(offset, size)


@quick
@given(boxes(), st.integers(2, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_a_shard_has_the_bits_of_its_box(case, size, dtype):
    shape, box = case
    whole = fill_normal_(torch.empty(shape, dtype=dtype), stream(1, "w"), std=0.02)
    with lanes(size):
        shard = fill_normal_(torch.empty(box.size, dtype=dtype), stream(1, "w"), std=0.02, box=box, shape=shape)
    assert torch.equal(shard, whole[box.slices])


@quick
@given(st.integers(1, 200), st.data())
def test_a_flat_interval_is_a_box_of_the_flattened_shape(numel, data):
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = fill_normal_(torch.empty(numel), stream(1, "flat"))
    part = fill_normal_(torch.empty(stop - start), stream(1, "flat"), 1.0, Box((start,), (stop - start,)), (numel,))
    assert torch.equal(part, whole[start:stop])


def test_fill_is_the_stream_scaled():
    scaled = fill_normal_(torch.empty(3, 4), stream(1, "w"), 0.5)
    assert torch.equal(scaled.flatten(), stream(1, "w").normal(0, 12) * 0.5)


def test_fill_of_views_and_parameters():
    weight = torch.nn.Parameter(torch.empty(4, 6))
    assert fill_normal_(weight, stream(1, "w")) is weight
    transposed = fill_normal_(torch.empty(6, 4).t(), stream(1, "w"))
    assert torch.equal(transposed, weight)
    assert weight.requires_grad and weight.is_leaf


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((0,), (3,)), (4,)),
        (Box((3,), (2,)), (4,)),
        (Box((-1,), (2,)), (4,)),
        (Box((0, 0), (2, 1)), (2,)),
        (None, (3,)),
    ],
)
def test_a_box_that_does_not_fit(box, shape):
    with raises(ArgumentError, "box"):
        fill_normal_(torch.empty(2), stream(0), 1.0, box, shape)


@quick
@given(st.lists(st.integers(0, 10**9), max_size=8), st.integers(1, 19), st.floats(0, 1), st.integers(2, 30))
def test_dropout_follows_the_global_token(rows, width, p, size):
    tokens = torch.tensor(rows, dtype=torch.int64)
    with lanes(size):
        mask = dropout_mask(stream(3, "drop"), tokens, width, p)
    assert mask.dtype == torch.bool and mask.shape == (len(rows), width)
    for i, row in enumerate(rows):
        assert torch.equal(mask[i], stream(3, "drop").bits(row * width, width) >= round(p * 2**32))


def test_dropout_rate_and_ends():
    tokens = torch.arange(2_000)
    kept = dropout_mask(stream(0, "rate"), tokens, 64, 0.1).double().mean()
    assert abs(float(kept) - 0.9) < 4.5 * math.sqrt(0.09 / 128_000)
    assert dropout_mask(stream(0, "rate"), tokens, 8, 0.0).all()
    assert not dropout_mask(stream(0, "rate"), tokens, 8, 1.0).any()


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    stream(0).normal(0, 100)
    stream(0).permutation(100)
    fill_normal_(torch.empty(10, 10), stream(0))
    uniform_rows(0, torch.arange(5), 0, 3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_default_dtype_does_not_matter():
    expected = stream(0).normal(0, 100)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(stream(0).normal(0, 100), expected)
    finally:
        torch.set_default_dtype(torch.float32)
