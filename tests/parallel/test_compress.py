"""Conformance of compressors: those of Tilth, and the worked example of docs/extending.md."""

import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config.test_plugins import _nothing_left_behind  # noqa: F401  (a fixture)
from tests.documents import blocks
from tests.errors import raises
from tilth.config.plugins import PluginError, compressor
from tilth.core.errors import RecipeError
from tilth.core.random import stream
from tilth.models import row_product
from tilth.parallel.compress import Compressor, compressor_of
from tilth.parallel.quantise import dequantise, pack, quantise, unpack

(TERNARY,) = (block.text for block in blocks("docs/extending.md") if block.first == "# ternary.py")
NAMES = {
    "onebit": {},
    "topk": {"share": 0.1},
    "randomk": {"share": 0.1},
    "dither": {},
    "dither2": {"bits": 2, "group": 8},
    "dither8": {"bits": 8},
    "ternary": {},
}
COUNTS = (1, 2, 7, 128, 129, 1000)


@pytest.fixture(autouse=True)
def ternary(_nothing_left_behind):  # noqa: F811
    exec(TERNARY, vars(types.ModuleType("ternary")))


def made(name):
    return compressor_of(name.rstrip("28"), NAMES[name])


def values(count, heavy=False):
    """Normal values; heavy: a few that are far larger."""
    x = stream(1, "values", count).normal(0, count)
    return x * x.abs() ** 3 if heavy else x


def passed(one, x, *path):
    """x after one way."""
    random = stream(0, *path)
    return one.decode(one.encode(x, random), len(x), random)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heavy", [False, True])
def test_what_is_left_out_is_within_the_bound(name, heavy):
    one, draws = made(name), 32
    for count in COUNTS:
        x, delta = values(count, heavy), one.delta(count)
        assert 0 < delta <= 1
        factor = delta if one.unbiased else 1.0
        lost = [float((factor * passed(one, x, "draw", i) - x).square().sum()) for i in range(draws)]
        most = (1 - delta) * float(x.square().sum())
        spread = torch.tensor(lost).std().item() / math.sqrt(draws)
        assert sum(lost) / draws <= most + 4 * spread + 1e-5 * float(x.square().sum())
        assert one.unbiased or max(lost) <= most + 1e-5 * float(x.square().sum())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("onebit", "topk")])
def test_the_mean_of_many_draws_is_the_value(name):
    one, draws = made(name), 150
    for count in (1, 7, 129):
        x = values(count)
        every = torch.stack([passed(one, x, "draw", i) for i in range(draws)]).double()
        error, spread = (every.mean(0) - x).abs(), every.std(0) / math.sqrt(draws)
        rare = 5 * (every.amax(0) - every.amin(0)).max() / draws  # a few moves that no draw has shown
        assert (error <= 5 * spread + rare + 1e-6 * x.abs().max()).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_code_depends_on_the_number_of_values_alone_and_zeros_stay(name):
    one = made(name)
    for count in COUNTS:
        tiny = values(count) * 1e-38
        codes = [one.encode(x, stream(0, "one")) for x in (values(count), torch.zeros(count), tiny, -tiny)]
        assert len({(code.dtype, len(code)) for code in codes}) == 1 and all(code.ndim == 1 for code in codes)
        assert not passed(one, torch.zeros(count), "one").any()
        back = passed(one, tiny, "one")
        assert back.dtype == torch.float32 and back.isfinite().all() and back.shape == (count,)


@pytest.mark.parametrize("name", NAMES)
def test_random_numbers_decide_all_that_is_random(name):
    one, x = made(name), values(300)
    first, again, other = (passed(one, x, "step", i) for i in (1, 1, 2))
    assert torch.equal(first, again) and torch.equal(first, other) == (not one.unbiased)


def test_codes_that_are_summed_are_that_of_the_sum():
    one, x, y, random = made("randomk"), values(301), values(301, heavy=True), stream(0, "step")
    assert one.summable and not any(made(name).summable for name in NAMES if name != "randomk")
    summed = one.encode(x, random) + one.encode(y, random)
    torch.testing.assert_close(one.decode(summed, 301, random), one.decode(one.encode(x + y, random), 301, random))


BYTES = {"onebit": 4 + 125, "topk": 100 * 8, "randomk": 100 * 4, "dither": 8 * 4 + 500, "dither8": 8 * 4 + 1000}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_thousand_values(name):
    assert made(name).encode(values(1000), stream(0, "step")).nbytes == BYTES[name]


def test_signs_of_zeros_and_of_the_last_bits():
    x = torch.tensor([0.0, -3.0, -0.0, 3.0, -3.0, 3.0, -3.0, -3.0, 3.0])
    back = passed(made("onebit"), x, "step")
    torch.testing.assert_close(back, torch.where(x < 0, -1.0, 1.0) * x.abs().mean())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 40), st.integers(0, 8), st.data())
def test_pack_and_unpack_any_number_of_values_at_any_offset(bits, count, offset, data):
    drawn = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    given_ = torch.tensor(drawn, dtype=torch.int64)
    packed = pack(torch.nn.functional.pad(given_.to(torch.uint8), (offset, 0))[offset:], bits)
    assert packed.dtype == torch.uint8 and len(packed) == -(-count * bits // 8)
    rows = torch.nn.functional.pad(given_, (0, -count % (8 // bits))).view(-1, 8 // bits)
    assert packed.tolist() == (rows << torch.arange(0, 8, bits)).sum(1).tolist()
    assert torch.equal(unpack(packed, bits, count), given_.to(torch.uint8))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_moves_a_value_by_less_than_the_scale(bits):
    x, random = values(1001, heavy=True), stream(0, "step")
    code = quantise(x, [1001], bits, 128, [random])
    back = dequantise(code, [1001], bits, 128)
    scales = code[: 4 * 8].view(torch.float32)
    assert ((back - x).abs() <= scales.repeat_interleave(128)[:1001] * (1 + 1e-5)).all()
    assert back.abs().max() == x.abs().max()  # the greatest of a group is kept


@pytest.mark.parametrize("name", ["onebit", "topk", "dither", "dither2", "dither7", "dither8"])
def test_kernels_have_the_bits_of_torch_s_functions_for_many_tensors_too(name, monkeypatch):
    row_product.prepare()
    if not row_product.ready():
        pytest.skip("the kernels cannot be built here")
    one = compressor_of("dither", {"group": 7}) if name == "dither7" else made(name)
    counts = [1, 2, 7, 255, 256, 257, 300, 1000, 5001]
    parts = [values(count, heavy=count % 2 > 0) for count in counts]
    parts[4] *= 1e-38
    parts[6][:200] = 0.0
    parts[7] = parts[7].round()  # equal magnitudes
    randoms = [stream(0, "step", i) for i in range(len(counts))]

    def both():
        code = one.encode_all(torch.cat(parts), counts, randoms)
        return code, one.decode_all(code, counts)

    fast = both()
    assert torch.equal(fast[0], torch.cat([one.encode(x, random) for x, random in zip(parts, randoms)]))
    monkeypatch.setattr(row_product, "_library", None)
    assert all(map(torch.equal, fast, both()))


# ---- what is refused ----


WRONG = {"topk": {"share": 0.0}, "randomk": {"share": 1.5}, "dither": {"bits": 3}}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_cannot_be(name):
    (option,) = WRONG[name]
    with raises(RecipeError, f"policy.comm.options.{option}"):
        compressor_of(name, WRONG[name])


class Short(Compressor):
    def encode(self, x, random):
        return x

    def decode(self, code, count, random):
        return code[: count // 2]


class Fails(Short):
    def decode(self, code, count, random):
        return code[None].missing


class Plain(Compressor):
    """Values as they are."""

    def delta(self, count):
        return 1.0

    def encode(self, x, random):
        return x

    def decode(self, code, count, random):
        return code


class WritesValues(Plain):
    def encode(self, x, random):
        return x.mul_(2)


class WritesCode(Plain):
    def decode(self, code, count, random):
        return code.mul_(2)


class OwnNumbers(Plain):
    def encode(self, x, random):
        return x + torch.rand(len(x))


class SummedSigns(Plain):
    summable = True

    def encode(self, x, random):
        return x.sign()


class SummedIntegers(SummedSigns):
    def encode(self, x, random):
        return (x * 0).to(torch.int8)


class SummedSquares(SummedSigns):
    def encode(self, x, random):
        return (x * x).bfloat16()

    def decode(self, code, count, random):
        return code.float()


class WithoutZeros(Plain):
    """Its code is as long as there are values that are not 0."""

    def encode(self, x, random):
        return x[x != 0]

    def decode(self, code, count, random):
        return torch.nn.functional.pad(code, (0, count - len(code)))


class Positive(WithoutZeros):
    def encode(self, x, random):
        return x[x >= 0]


class HalfOfZeros(Plain):
    """Its code has another dtype where all values are 0."""

    def encode(self, x, random):
        return x.clone() if x.any() else x.half()


class DividesByNorm(Plain):
    def encode(self, x, random):
        return x / x.norm()


class Infinite(Plain):
    def decode(self, code, count, random):
        return code * torch.inf


class Grows(Plain):
    unbiased = True

    def delta(self, count):
        return 2.0


PROBED = {
    Short: ".decode", Fails: "", WritesValues: ".encode", WritesCode: ".decode", OwnNumbers: ".random",
    SummedSigns: ".summable", SummedIntegers: ".summable", Grows: ".delta", WithoutZeros: ".encode",
    Positive: ".encode", HalfOfZeros: ".encode", DividesByNorm: ".decode", Infinite: ".decode",
    SummedSquares: ".summable",
}  # fmt: skip


class Summed(Plain):
    summable = unbiased = True


class SummedHalves(Plain):
    """Linear but for the rounding of its dtype."""

    summable, dtype = True, torch.bfloat16

    def encode(self, x, random):
        return x.to(self.dtype)

    def decode(self, code, count, random):
        return code.float()


class SummedEighths(SummedHalves):
    dtype = torch.float8_e4m3fn


@pytest.mark.parametrize("kind", [Plain, Summed, SummedHalves, SummedEighths])
def test_a_declared_one_that_does_what_it_says(kind):
    compressor("mine")(kind)
    assert isinstance(compressor_of("mine", {}), kind)


@pytest.mark.parametrize(("kind", "key"), [(kind, f"compressor.mine{part}") for kind, part in PROBED.items()])
def test_a_declared_one_that_returns_another_shape_or_fails(kind, key):
    compressor("mine")(kind)
    with raises(PluginError, key):
        compressor_of("mine", {})


def test_a_declaration_names_its_state():
    with raises(PluginError, "compressor.mine.state"):
        compressor("mine", state=("momentum",))
    with raises(PluginError, "compressor.topk.shipped"):
        compressor("topk")
