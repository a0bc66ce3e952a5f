"""A 64-bit checksum of the bits of a tensor: equal on every device, for weights that were published or stored.

The bits are read as 64-bit words. A row of words w becomes ``sum_i k[i] * fold(w[i] * _MIX) mod 2**64`` with odd
pseudo-random k (multilinear hashing) and ``fold(x) = x ^ x >> 32``: one changed word always changes it, and any other
change, such as two words swapped, with a probability of about 1 - 2**-32 or better. Without the mixing, top bits would
not count: all signs flipped would go unseen. The sums of all rows, dtype and shape are then hashed with BLAKE2b.
"""

import functools
import hashlib
import itertools

import torch
from torch import Tensor

from tilth.core.random import stream

_ROW = 1 << 14
_ROWS_PER_PASS = {"cpu": 1, "cuda": 256}
"""On a CPU just so few that torch does not start threads for a millisecond of work."""
_LOW = 0xFFFFFFFF
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio, as a signed number."""


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    words = stream(0, "checksum").bits(0, 2 * _ROW).view(_ROW, 2)
    return (words[:, 0] << 32 | words[:, 1] | 1).to(device)


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A number in [0, 2**64) of dtype, shape and every bit of the values, whatever the device.

    Scratch memory is bounded (1 MB on a CPU, 100 MB elsewhere); a non-contiguous tensor is copied once.
    """
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rows = len(data) // (8 * _ROW)
    step = _ROWS_PER_PASS["cpu" if data.device.type == "cpu" else "cuda"]
    cuts = [*range(0, rows, step), rows, -(-len(data) // (8 * _ROW))]
    sums = [_row_sums(data[8 * _ROW * a : 8 * _ROW * b]) for a, b in itertools.pairwise(cuts) if a < b]
    if sums:
        digest.update(torch.cat(sums).cpu().numpy().astype("<i8").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _row_sums(data: Tensor) -> Tensor:
    """The sum of every row in these bytes, int64 [rows]: whole rows, or one that is shorter."""
    mixed = _words(data) * _MIX
    mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW))
    width = min(len(mixed), _ROW)
    return mixed.view(-1, width).mul_(_multipliers(data.device)[:width]).sum(1)


def _words(data: Tensor) -> Tensor:
    """Bytes as int64, filled up with zero bytes, copied only where they are not aligned."""
    missing = -len(data) % 8
    if missing:
        data = torch.cat([data, data.new_zeros(missing)])
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


SKETCH = 64
"""Projections of a sketch: relative errors are estimated within about a tenth of their size."""


@torch.no_grad()
def sketch(tensor: Tensor) -> Tensor:
    """Random projections of a tensor's values, float64 [SKETCH], whose differences tell how far two tensors are apart.

    Each is a sum of the values with pseudo-random signs, so its mean square is the squared norm of the tensor.
    """
    data, found = tensor.detach().reshape(-1), torch.zeros(SKETCH, dtype=torch.float64)
    columns, rows = _columns(), _ROWS_PER_PASS["cuda"]
    for place in range(0, len(data), _ROW * rows):
        part = data[place : place + _ROW * rows].double()
        part = torch.nn.functional.pad(part, (0, -len(part) % _ROW)).view(-1, _ROW)
        projected = part @ columns.to(part.device)
        found += (projected.cpu() * _signs("rows", place // _ROW, len(part))).sum(0)
    return found


@functools.lru_cache(maxsize=1)
def _columns() -> Tensor:
    return _signs("columns", 0, _ROW)


def _signs(name: str, start: int, count: int) -> Tensor:
    """1 or -1, float64 [count, SKETCH]."""
    return (stream(0, "sketch", name).bits(start * SKETCH, count * SKETCH).view(-1, SKETCH) & 1).double() * 2 - 1


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| of the tensors of two sketches; 0 where both are 0."""
    difference, size = float((found - expected).norm()), float(expected.norm())
    return difference / size if size else difference
