"""Integers of few bits in place of float32 values, in groups with one scale (SDP4Bit, arXiv 2410.15526)."""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.random import Stream, uniform_parts
from tilth.models.row_product import library, prepare, ready

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""Bits of a value -> integers with as many bytes as a byte has values."""


def _padded(x: Tensor, several: int) -> Tensor:
    """Return x [n] with zeros behind it, up to a multiple of ``several``; x itself where it is one."""
    return F.pad(x, (0, -len(x) % several)) if len(x) % several else x


def _shifts(bits: int) -> list[tuple[int, int]]:
    """Return the shifts that bring values of neighbouring bytes together, first of two, then of four, of eight; and the
    mask of what they are shifted from."""
    found, width, apart = [], bits, 8
    while width < 8:
        mask = sum((1 << width) - 1 << at for at in range(0, 64 // bits, apart))
        found.append((apart - width, mask))
        width, apart = 2 * width, 2 * apart
    return found


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 values [n] below 2**bits, the first in the lowest bits, with zeros behind the last: uint8
    [ceil(n bits / 8)]. bits: 1, 2, 4 or 8."""
    if bits == 8:
        return values
    padded, kind = _padded(values, 8 // bits).contiguous(), _WORDS[bits]
    words = (padded.clone() if padded.storage_offset() % kind.itemsize else padded).view(kind)
    for shift, _ in _shifts(bits):
        words = words | words >> shift
    return words.to(torch.uint8)  # the lowest byte


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Invert ``pack``: uint8 [count]."""
    if bits == 8:
        return packed
    words = packed.to(_WORDS[bits])
    for shift, mask in reversed(_shifts(bits)):
        words = (words | words << shift) & mask
    return words.view(torch.uint8)[:count]


def quantise(parts: Sequence[Tensor], bits: int, group: int, randoms: Sequence[Stream]) -> list[Tensor]:
    """Round float32 tensors [n] at random to multiples of a scale. Returns a code of each, uint8: the scale of each
    group, float32, and packed integers.

    With L = 2^(bits-1) - 1 the scale is s = max |x| / L, and the integer floor(x / s + u), u uniform in [0, 1): its
    mean is x / s. Integers are stored above L: 0 .. 2 L. randoms: streams of one seed.
    """
    counts = [len(x) for x in parts]
    groups = [-(-count // group) for count in counts]
    lengths = [4 * own + -(-count * bits // 8) for own, count in zip(groups, counts)]
    if (kernels := kernels_for(parts)) is not None:
        codes = torch.empty(sum(lengths), dtype=torch.uint8).split(lengths)
        sizes = (len(parts), bits, group, randoms[0].seed, torch.get_num_threads())
        kernels.dither_encode(table(parts, codes, [random.id for random in randoms]), *sizes)
        return [*codes]
    most, device = (1 << bits - 1) - 1, parts[0].device
    padded = torch.cat([_padded(x, group) for x in parts]).view(-1, group)
    scales = padded.abs().amax(1) / most
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    whole = torch.cat(_cut((padded / steps).view(-1), groups, group, counts))
    whole.add_(torch.cat(uniform_parts(randoms, counts, device))).floor_().clamp_(-most, most).add_(most)
    several = [_padded(own, 8 // bits) for own in whole.to(torch.uint8).split(counts)]
    packed = pack(torch.cat(several), bits).split([len(own) * bits // 8 for own in several])
    return [torch.cat(own) for own in zip(scales.view(torch.uint8).split([4 * own for own in groups]), packed)]


def dequantise(codes: Sequence[Tensor], bits: int, group: int, counts: Sequence[int]) -> list[Tensor]:
    """Return float32 [count] of what ``quantise`` has rounded."""
    if (kernels := kernels_for(codes)) is not None:
        found = torch.empty(sum(counts)).split([*counts])
        kernels.dither_decode(table(found, codes), len(codes), bits, group, torch.get_num_threads())
        return [*found]
    most, groups = (1 << bits - 1) - 1, [-(-count // group) for count in counts]
    scales = torch.cat([code[: 4 * own] for code, own in zip(codes, groups)]).view(torch.float32)
    packed = [code[4 * own :] for code, own in zip(codes, groups)]
    lengths = [len(own) * 8 // bits for own in packed]
    several = unpack(torch.cat(packed), bits, sum(lengths)).split(lengths)
    whole = torch.cat([_padded(own[:count], group) for own, count in zip(several, counts)]).float().sub_(most)
    return _cut(whole.view(-1, group).mul_(scales[:, None]).view(-1), groups, group, counts)


def _cut(padded: Tensor, groups: Sequence[int], group: int, counts: Sequence[int]) -> list[Tensor]:
    """Return what was padded to whole groups."""
    return [own[:count] for own, count in zip(padded.split([own * group for own in groups]), counts)]


def kernels_for(tensors: Sequence[Tensor]) -> ctypes.CDLL | None:
    """Return the kernels that code contiguous tensors of this device, with the bits of torch's functions; None: there
    are none."""
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    prepare()
    return library() if ready() else None


def table(values: Sequence[Tensor], codes: Sequence[Tensor], more: Iterable[int] = repeat(0)) -> ctypes.Array[Any]:
    """Return what kernels need to know of tensors: ``Part`` of ``models/coding.cpp``."""
    rows = [(x.data_ptr(), len(x), code.data_ptr(), number) for x, code, number in zip(values, codes, more)]
    return (ctypes.c_long * (4 * len(rows)))(*chain.from_iterable(rows))
