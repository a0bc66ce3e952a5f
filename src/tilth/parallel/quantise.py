"""Integers of few bits in place of float32 values, in groups with one scale (SDP4Bit, arXiv 2410.15526)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.random import Stream

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


def quantise(x: Tensor, bits: int, group: int, random: Stream) -> tuple[Tensor, Tensor]:
    """Round float32 x [n] at random to multiples of a scale: packed integers, uint8, and the scale of each group.

    With L = 2^(bits-1) - 1 the scale is s = max |x| / L, and the integer floor(x / s + u), u uniform in [0, 1): its
    mean is x / s. Integers are stored above L: 0 .. 2 L.
    """
    most, count = (1 << bits - 1) - 1, len(x)
    padded = _padded(x, group).view(-1, group)
    scales = padded.abs().amax(1) / most
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    whole = (padded / steps).view(-1)[:count]
    whole.add_(random.uniform(0, count, x.device)).floor_().clamp_(-most, most).add_(most)
    return pack(whole.to(torch.uint8), bits), scales


def dequantise(packed: Tensor, scales: Tensor, bits: int, group: int, count: int) -> Tensor:
    """Return float32 [count] of what ``quantise`` has rounded."""
    most = (1 << bits - 1) - 1
    whole = _padded(unpack(packed, bits, count), group).float().sub_(most)
    return whole.view(-1, group).mul_(scales[:, None]).view(-1)[:count]
