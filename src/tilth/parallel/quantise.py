"""Integers of few bits in place of float32 values, in groups with one scale (SDP4Bit, arXiv 2410.15526)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.random import Stream


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 values [n] below 2**bits, the first in the lowest bits, with zeros behind the last: uint8
    [ceil(n bits / 8)]. bits: 1, 2, 4 or 8."""
    if bits == 8:
        return values
    per = 8 // bits
    rows = F.pad(values, (0, -len(values) % per)).view(-1, per)
    packed = rows[:, 0].clone()
    for i in range(1, per):
        packed |= rows[:, i] << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Invert ``pack``: uint8 [count]."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & (1 << bits) - 1).flatten()[:count]


def quantise(x: Tensor, bits: int, group: int, random: Stream) -> tuple[Tensor, Tensor]:
    """Round float32 x [n] at random to multiples of a scale: packed integers, uint8, and the scale of each group.

    With L = 2^(bits-1) - 1 the scale is s = max |x| / L, and the integer floor(x / s + u), u uniform in [0, 1): its
    mean is x / s. Integers are stored above L: 0 .. 2 L.
    """
    most, count = (1 << bits - 1) - 1, len(x)
    padded = F.pad(x, (0, -count % group)).view(-1, group)
    scales = padded.abs().amax(1) / most
    noise = F.pad(random.uniform(0, count, x.device), (0, -count % group)).view(-1, group)
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    whole = (padded / steps).add_(noise).floor_().clamp_(-most, most).add_(most)
    return pack(whole.to(torch.uint8).flatten()[:count], bits), scales


def dequantise(packed: Tensor, scales: Tensor, bits: int, group: int, count: int) -> Tensor:
    """Return float32 [count] of what ``quantise`` has rounded."""
    most = (1 << bits - 1) - 1
    whole = unpack(packed, bits, count).float().sub_(most)
    return (F.pad(whole, (0, -count % group)).view(-1, group) * scales[:, None]).flatten()[:count]
