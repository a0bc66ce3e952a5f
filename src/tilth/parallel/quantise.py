"""Integers of few bits in place of float32 values, in groups with one scale (SDP4Bit, arXiv 2410.15526)."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.random import Stream, uniform_parts
from tilth.models.row_product import library, prepare, ready

BLOCK = 32
"""Values that are transformed together."""
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


def quantise(x: Tensor, counts: Sequence[int], bits: int, group: int, randoms: Sequence[Stream]) -> Tensor:
    """Round tensors of so many elements, side by side in float32 x [n], at random to multiples of a scale. Returns
    their codes, uint8, side by side: the scale of each group, float32, and packed integers.

    With L = 2^(bits-1) - 1 the scale is s = max |x| / L, and the integer floor(x / s + u), u uniform in [0, 1): its
    mean is x / s. Integers are stored above L: 0 .. 2 L. randoms: streams of one seed.
    """
    groups = [-(-count // group) for count in counts]
    lengths = [4 * own + -(-count * bits // 8) for own, count in zip(groups, counts)]
    if (kernels := kernels_for(x)) is not None:
        code = torch.empty(sum(lengths), dtype=torch.uint8)
        where = table(x, code, counts, lengths, [random.id for random in randoms])
        kernels.dither_encode(where.ctypes.data, len(counts), bits, group, randoms[0].seed, torch.get_num_threads())
        return code
    most = (1 << bits - 1) - 1
    padded = torch.cat([_padded(own, group) for own in x.split([*counts])]).view(-1, group)
    scales = padded.abs().amax(1) / most
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    whole = _cut((padded / steps).view(-1), groups, group, counts)
    whole.add_(torch.cat(uniform_parts(randoms, counts, x.device))).floor_().clamp_(-most, most).add_(most)
    several = [_padded(own, 8 // bits) for own in whole.to(torch.uint8).split([*counts])]
    packed = pack(torch.cat(several), bits).split([len(own) * bits // 8 for own in several])
    scales_of = scales.view(torch.uint8).split([4 * own for own in groups])
    return torch.cat([*chain.from_iterable(zip(scales_of, packed))])


def dequantise(code: Tensor, counts: Sequence[int], bits: int, group: int) -> Tensor:
    """Return float32 [n] of what ``quantise`` has rounded."""
    groups = [-(-count // group) for count in counts]
    sizes = [[4 * own, -(-count * bits // 8)] for own, count in zip(groups, counts)]
    if (kernels := kernels_for(code)) is not None:
        found = torch.empty(sum(counts))
        where = table(found, code, counts, [*map(sum, sizes)])
        kernels.dither_decode(where.ctypes.data, len(counts), bits, group, torch.get_num_threads())
        return found
    most, parts = (1 << bits - 1) - 1, code.split([*chain.from_iterable(sizes)])
    scales, packed = torch.cat(parts[::2]).view(torch.float32), torch.cat(parts[1::2])
    several = unpack(packed, bits, len(packed) * 8 // bits).split([own * 8 // bits for _, own in sizes])
    whole = torch.cat([_padded(own[:count], group) for own, count in zip(several, counts)]).float().sub_(most)
    return _cut(whole.view(-1, group).mul_(scales[:, None]).view(-1), groups, group, counts)


def _cut(padded: Tensor, groups: Sequence[int], group: int, counts: Sequence[int]) -> Tensor:
    """Return what was padded to whole groups."""
    parts = padded.split([own * group for own in groups])
    return torch.cat([own[:count] for own, count in zip(parts, counts)])


def transform(parts: Sequence[Tensor], factor: float) -> None:
    """Multiply whole blocks of 32 values of contiguous tensors [n] by Sylvester's Hadamard matrix H of 1 and -1,
    H H = 32, and by a factor, in place; the last n % 32 values stay.

    It takes sums and differences, and no matrix product, whose precision ``train.matmul`` may lower.
    """
    if not parts:
        return
    if parts[0].dtype == torch.float32 and (kernels := kernels_for(parts[0])) is not None:
        where = np.array([(part.data_ptr(), len(part), 0, 0) for part in parts], np.int64)
        kernels.hadamard(where.ctypes.data, len(parts), factor, torch.get_num_threads())
        return
    blocks = [part[: len(part) // BLOCK * BLOCK] for part in parts]
    x = torch.cat(blocks).float()
    for apart in (1 << i for i in range(BLOCK.bit_length() - 1)):
        a, b = x.view(-1, 2, apart).unbind(1)
        x = torch.stack([a + b, a - b], 1)
    torch._foreach_copy_(blocks, (x.view(-1) * factor).split([len(own) for own in blocks]))


def kernels_for(x: Tensor) -> ctypes.CDLL | None:
    """Return the kernels that code tensors of this device, with the bits of torch's functions; None: there are none."""
    if x.device.type != "cpu":
        return None
    prepare()
    return library() if ready() else None


def table(
    values: Tensor, code: Tensor, counts: Sequence[int], lengths: Sequence[int], more: Sequence[int] | int = 0
) -> np.ndarray:
    """Return what kernels need to know of tensors and codes side by side: ``Part`` of ``models/coding.cpp``.

    counts: of elements; lengths: bytes of codes. It holds addresses, so the tensors have to be contiguous and live.
    """
    found = _offsets(tuple(counts), tuple(lengths)).copy()
    found[:, 0] += values.data_ptr()
    found[:, 2] += code.data_ptr()
    found[:, 3] = more
    return found


@lru_cache(maxsize=256)
def _offsets(counts: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    """Return ``table`` of tensors at address 0."""
    sizes = np.array([counts, lengths], np.int64)
    starts = sizes.cumsum(1) - sizes
    return np.stack([4 * starts[0], sizes[0], starts[1], 0 * starts[1]], 1)
