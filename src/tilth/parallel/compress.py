"""Compressors of gradients: what a rank sends in place of float32 values (BytePS-Compress, arXiv 2105.07829).

A compressor C is unbiased, E C(x) = x, or a contraction, E ||C(x) - x||^2 <= (1 - delta) ||x||^2. An unbiased one of
second moment E ||C(x)||^2 <= ||x||^2 / delta is a contraction after a multiplication by delta, which is how error
feedback uses it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tilth.config.code import describe
from tilth.config.open_sets import COMPRESSORS
from tilth.config.plugins import call_declared, declared
from tilth.config.roles import resolve
from tilth.core.errors import PluginError, RecipeError
from tilth.core.random import Stream, stream
from tilth.parallel.quantise import dequantise, kernels_for, pack, quantise, table, unpack

PROBED = 8
"""A declared compressor is tried with fewer values than this before training."""


class Compressor:
    """Code of the values of one tensor. A subclass says what it promises; conformance tests check that."""

    unbiased = False
    """True: the mean of ``decode(encode(x))`` over random numbers is x."""
    summable = False
    """True: codes are floating-point values that are linear in x, and the code of a sum is the sum of codes. All ranks
    then draw the same random numbers, and codes are summed on their way, in the dtype of gradients."""

    def delta(self, count: int) -> float:
        """Return the delta of ``count`` values, as the module says: in (0, 1]."""
        raise NotImplementedError

    def encode(self, x: Tensor, random: Stream) -> Tensor:
        """Return the code of float32 x [n]: a 1-D tensor whose dtype and length depend on n alone."""
        raise NotImplementedError

    def decode(self, code: Tensor, count: int, random: Stream) -> Tensor:
        """Return float32 [count] from a code, of a summed one its dtype; random: as in ``encode``."""
        raise NotImplementedError


class Batched(Compressor):
    """Compressor that codes several tensors in few calls."""

    def encode_all(self, x: Tensor, counts: Sequence[int], randoms: Iterable[Stream]) -> Tensor:
        """Return the codes, side by side, of tensors of so many elements that are side by side in contiguous x [n]."""
        raise NotImplementedError

    def decode_all(self, code: Tensor, counts: Sequence[int]) -> Tensor:
        """Return float32 [n] from codes side by side."""
        raise NotImplementedError

    def encode(self, x: Tensor, random: Stream) -> Tensor:
        return self.encode_all(x.contiguous(), [len(x)], [random])

    def decode(self, code: Tensor, count: int, random: Stream) -> Tensor:
        return self.decode_all(code.contiguous(), [count])


class OneBit(Batched):
    """Signs and the mean absolute value: n / 8 + 4 bytes. 0 has the sign of positive values."""

    def delta(self, count: int) -> float:
        return 1 / count  # ||x||_1^2 / (n ||x||_2^2), of a vector with a single value

    def encode_all(self, x: Tensor, counts: Sequence[int], randoms: Iterable[Stream]) -> Tensor:
        parts, lengths = x.split([*counts]), [4 + -(-count // 8) for count in counts]
        scales = torch.stack([own.abs().mean() for own in parts])
        if (kernels := kernels_for(x)) is not None:
            code = torch.empty(sum(lengths), dtype=torch.uint8)
            where = table(x, code, counts, lengths)
            kernels.signs_encode(where.ctypes.data, len(counts), scales.data_ptr(), torch.get_num_threads())
            return code
        signs = [pack((own < 0).to(torch.uint8), 1) for own in parts]
        return torch.cat([*chain.from_iterable(zip(scales.view(torch.uint8).split(4), signs))])

    def decode_all(self, code: Tensor, counts: Sequence[int]) -> Tensor:
        lengths = [4 + -(-count // 8) for count in counts]
        if (kernels := kernels_for(code)) is not None:
            found = torch.empty(sum(counts))
            where = table(found, code, counts, lengths)
            kernels.signs_decode(where.ctypes.data, len(counts), torch.get_num_threads())
            return found
        parts = [(own[:4].clone().view(torch.float32), own[4:]) for own in code.split(lengths)]
        signs = [scale * (1 - 2 * unpack(own, 1, n).float()) for (scale, own), n in zip(parts, counts)]
        return torch.cat(signs)


class TopK(Batched):
    """The values of greatest magnitude, of equal ones the first, with their places, ascending: 8 bytes each."""

    def __init__(self, *, share: float = 0.01) -> None:
        """share: of the values."""
        self.share = checked("share", share, 0 < share <= 1, "above 0 and at most 1")

    def _kept(self, count: int) -> int:
        return math.ceil(self.share * count)

    def delta(self, count: int) -> float:
        return self._kept(count) / count

    def encode_all(self, x: Tensor, counts: Sequence[int], randoms: Iterable[Stream]) -> Tensor:
        kept = [*map(self._kept, counts)]
        if (kernels := kernels_for(x)) is None:
            return torch.cat([_greatest(own, most) for own, most in zip(x.split([*counts]), kept)])
        code = torch.empty(2 * sum(kept), dtype=torch.int32)
        where = table(x, code, counts, [8 * own for own in kept], kept)
        kernels.greatest_encode(where.ctypes.data, len(counts), torch.get_num_threads())
        return code

    def decode_all(self, code: Tensor, counts: Sequence[int]) -> Tensor:
        found = torch.zeros(sum(counts), device=code.device)
        codes = code.split([2 * self._kept(count) for count in counts])
        for own, (places, values) in zip(found.split([*counts]), (one.chunk(2) for one in codes)):
            own.index_copy_(0, places.long(), values.view(torch.float32))
        return found


class RandomK(Compressor):
    """One random value of each of k intervals of equal length, times that length: 4 bytes each, without places, which
    all ranks draw alike."""

    unbiased = summable = True

    def __init__(self, *, share: float = 0.01) -> None:
        """share: of the values."""
        self.share = checked("share", share, 0 < share <= 1, "above 0 and at most 1")

    def _intervals(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where intervals begin and their lengths, int64 [k] each: n / k, rounded down or up."""
        kept = math.ceil(self.share * count)
        ends = torch.arange(kept + 1, device=device) * count // kept
        return ends[:-1], ends.diff()

    def _places(self, count: int, random: Stream, device: torch.device) -> tuple[Tensor, Tensor]:
        starts, lengths = self._intervals(count, device)
        return starts + (random.bits(0, len(starts), device) * lengths).bitwise_right_shift_(32), lengths

    def delta(self, count: int) -> float:
        return 1 / int(self._intervals(count, torch.device("cpu"))[1].max())

    def encode(self, x: Tensor, random: Stream) -> Tensor:
        places, lengths = self._places(len(x), random, x.device)
        return x[places] * lengths

    def decode(self, code: Tensor, count: int, random: Stream) -> Tensor:
        places, _ = self._places(count, random, code.device)
        return torch.zeros(count, dtype=code.dtype, device=code.device).index_copy_(0, places, code)


class Dither(Batched):
    """Linear dithering: multiples of the greatest magnitude of a group, rounded at random: bits / 8 bytes a value, and
    4 a group."""

    unbiased = True

    def __init__(self, *, bits: int = 4, group: int = 128) -> None:
        """bits: of a value with its sign; group: values with one scale."""
        self.bits = checked("bits", bits, bits in (2, 4, 8), "2, 4 or 8")
        self.group = checked("group", group, group > 0, "1 or more")

    def delta(self, count: int) -> float:
        levels = 2 ** (self.bits - 1) - 1
        return 1 / (1 + min(count, self.group) / (4 * levels**2))  # each rounding has a variance of a quarter at most

    def encode_all(self, x: Tensor, counts: Sequence[int], randoms: Iterable[Stream]) -> Tensor:
        return quantise(x, counts, self.bits, self.group, [*randoms])

    def decode_all(self, code: Tensor, counts: Sequence[int]) -> Tensor:
        return dequantise(code, counts, self.bits, self.group)


def four_bits() -> Compressor:
    """Return the code of changes of weights: 4 bits a value, and 4 bytes per 2,048."""
    return Dither(bits=4, group=2048)


def _greatest(x: Tensor, kept: int) -> Tensor:
    """Return the places of the greatest magnitudes of x [n], and their values: int32 [2 kept]."""
    bits = x.view(torch.int32) & 0x7FFFFFFF  # they have the order of magnitudes, and NaN has a place
    least = bits.topk(kept, sorted=False).values.min()
    above, ties = (bits > least).nonzero()[:, 0], (bits == least).nonzero()[:, 0]
    places = torch.cat([above, ties[: kept - len(above)]]).sort().values
    return torch.cat([places.int(), x[places].view(torch.int32)])


def checked(name: str, value: Any, right: bool, wanted: str) -> Any:
    """Return the value of an option. RecipeError: it is not right; wanted: what is."""
    if not right:
        key = f"policy.comm.options.{name}"
        raise RecipeError(f"{key} = {value} is not {wanted}", key=key)
    return value


def compressor_of(name: str, options: Mapping[str, Any]) -> Any:
    """Return the ``Compressor`` of ``policy.comm.gradients``, or ``sync.TwoLevels``. PluginError: a declared one fails,
    or does not what a ``Compressor`` says (``_probed``); RecipeError: an option is wrong."""
    own = declared("compressor").get(name)
    if own is None:
        return resolve(COMPRESSORS[name].made)(**options)
    made, shrinks = call_declared(own, **options), "residual" in COMPRESSORS[name].state
    try:
        wrong = next(filter(None, (_probed(made, count, shrinks) for count in range(1, PROBED))), None)
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        message = f"{own.title}: {describe(error, own.file)}"
        raise PluginError(message, key=f"compressor.{name}") from error
    if wrong is not None:
        raise PluginError(f"{own.title}: {wrong[1]}", key=f"compressor.{name}.{wrong[0]}")
    return made


def _probed(made: Compressor, count: int, shrinks: bool) -> tuple[str, str] | None:
    """Return which part of a compressor is wrong for so many values, and how; None: no part. shrinks: ``delta`` of one
    without bias is used."""
    random = stream(0, "probe", count)
    x, y = random.normal(0, 2 * count).chunk(2)
    given = x.clone()
    code = made.encode(given, random)
    if not torch.equal(given, x):
        return "encode", "encode writes to its values, which are the gradients; let it work on a copy"
    kept, others = code.clone(), {"zeros": made.encode(torch.zeros_like(x), random), "others": made.encode(y, random)}
    for what, other in others.items():
        if (other.numel(), other.dtype) != (code.numel(), code.dtype):
            sizes = f"{code.numel()} {code.dtype} for {count} values, and {other.numel()} {other.dtype} for {what}"
            return "encode", f"encode returns {sizes}; length and dtype must depend on the number of values alone"
    found = made.decode(code, count, random)
    for what, own in ((f"{count} values", found), (f"{count} zeros", made.decode(others["zeros"], count, random))):
        if (shape := tuple(own.shape)) != (count,):
            return "decode", f"decode returns shape {shape} for {count} values; it must be ({count},)"
        if not own.isfinite().all():
            return "decode", f"decode returns values that are not finite for {what}"
    if not torch.equal(code, kept):
        return "decode", "decode writes to its code, which is sent afterwards; let it work on a copy"
    if not torch.equal(made.encode(x, random), kept) or not torch.equal(made.decode(kept, count, random), found):
        return "random", "equal values have another code, or an equal code other values; draw from ``random`` alone"
    whole = made.encode(x + y, random) if made.summable else None
    if whole is not None and not (whole.is_floating_point() and _linear(kept, others["others"], whole)):
        return "summable", "the sum of two codes is not the code of the sum; it is not summable"
    if made.unbiased and shrinks and not 0 < made.delta(count) <= 1:
        return "delta", f"delta({count}) = {made.delta(count)}; it must be above 0 and at most 1"
    return None


def _linear(one: Tensor, other: Tensor, whole: Tensor) -> bool:
    """Return True if two codes add up to the code of the sum of their values, but for the rounding of their dtype."""
    kind = torch.finfo(whole.dtype)
    one, other, whole = one.float(), other.float(), whole.float()  # they are summed in the dtype of gradients
    near = max(1e-4, kind.eps) * (one.abs() + other.abs()) + max(1e-5, 2 * kind.eps * kind.smallest_normal)
    return bool(((one + other - whole).abs() <= near).all())
