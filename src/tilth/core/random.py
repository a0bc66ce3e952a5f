"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11) addressed by (seed, stream, global index).

Value e of a stream is ``philox(key=(seed lo, seed hi), counter=(e//4 lo, e//4 hi, stream lo, stream hi))[e % 4]``. There
is no state: any slice, shard or order of evaluation gives the bits of the whole, on any device and at any world size.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilth.core.layout import Box

Device = str | torch.device
Shape = tuple[int, ...]
Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 1 << 15
"""Blocks of four words per pass: what is in flight stays in the cache."""


def stream_id(*path: str | int) -> int:
    """A stable id in [0, 2**63) of a path such as ``("init", "model.norm.weight")``; fits an int64 tensor."""
    digest = hashlib.blake2b(digest_size=8, person=b"tilth.stream")
    for part in path:
        encoded = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little") >> 1


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32. Counter words and results are int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    for i in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        k0, k1 = ((k + i * w) & _MASK for k, w in zip(key, _WEYL))
        c0, c1 = (((p1 >> 32) ^ c1) & _MASK) ^ k0, p1 & _MASK
        c2, c3 = (((p0 >> 32) ^ c3) & _MASK) ^ k1, p0 & _MASK
    return c0, c1, c2, c3


def _blocks(seed: int, ids: Tensor, first: Tensor, count: int) -> Tensor:
    """Words of ``count`` blocks from block ``first[i]`` of stream ``ids[i]``: int64 [rows, count * 4]."""
    block = first[:, None] + torch.arange(count, device=first.device)
    high = ids[:, None].expand_as(block)
    counter = (block & _MASK, block >> 32 & _MASK, high & _MASK, high >> 32 & _MASK)
    words = philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))
    return torch.stack(words, -1).flatten(1)


def _uniform(words: Tensor) -> Tensor:
    return (words >> 8).to(torch.float32) * 2.0**-24


def _normal(words: Tensor) -> Tensor:
    """Box-Muller on the words (2k, 2k+1)."""
    pairs = words.unflatten(-1, (-1, 2))
    radius = (((pairs[..., 0] >> 8) + 1).to(torch.float64) * 2.0**-24).log().mul(-2).sqrt()
    angle = (pairs[..., 1] >> 8).to(torch.float64) * (2.0**-24 * 2 * math.pi)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2).to(torch.float32)


def _raw(words: Tensor) -> Tensor:
    return words


_KINDS = {"bits": (_raw, torch.int64), "uniform": (_uniform, torch.float32), "normal": (_normal, torch.float32)}


def _rows(kind: str, seed: int, ids: Tensor, starts: Tensor, count: int) -> Tensor:
    """Values ``starts[i] .. starts[i] + count`` of stream ``ids[i]``: [rows, count]."""
    convert, dtype = _KINDS[kind]
    out = torch.empty(len(ids), count, dtype=dtype, device=ids.device)
    per_row = (count + 6) // 4
    for row in range(0, len(ids), max(1, _LANES // per_row)):
        some = slice(row, row + max(1, _LANES // per_row))
        for at in range(0, count, _LANES * 4):
            width = min(count - at, _LANES * 4)
            begin = starts[some] + at
            values = convert(_blocks(seed, ids[some], begin >> 2, (width + 6) // 4))
            column = (begin & 3)[:, None] + torch.arange(width, device=ids.device)
            out[some, at : at + width] = values.gather(1, column)
    return out


@dataclass(frozen=True)
class Stream:
    """One stream of random numbers: value ``e`` depends on (seed, id, e) only."""

    seed: int
    id: int

    def _slice(self, kind: str, start: int, count: int, device: Device) -> Tensor:
        ids = torch.tensor([self.id], dtype=torch.int64, device=device)
        return _rows(kind, self.seed, ids, torch.tensor([start], dtype=torch.int64, device=device), count)[0]

    def bits(self, start: int, count: int, device: Device = "cpu") -> Tensor:
        """32-bit words ``start .. start + count``: int64 [count]."""
        return self._slice("bits", start, count, device)

    def uniform(self, start: int, count: int, device: Device = "cpu") -> Tensor:
        """float32 [count] in [0, 1): multiples of 2**-24."""
        return self._slice("uniform", start, count, device)

    def normal(self, start: int, count: int, device: Device = "cpu") -> Tensor:
        """float32 [count], standard normal."""
        return self._slice("normal", start, count, device)

    def integers(self, start: int, count: int, high: int, device: Device = "cpu") -> Tensor:
        """int64 [count] in [0, high), 1 <= high <= 2**31: ``word * high >> 32``, so the bias is under high / 2**32."""
        if not 1 <= high <= 1 << 31:
            raise ValueError(f"high={high}: must be between 1 and 2**31")
        return self.bits(start, count, device) * high >> 32

    def permutation(self, n: int, device: Device = "cpu") -> Tensor:
        """int64 [n]: 0 .. n-1 in the order of their 64-bit keys (words 2i and 2i+1), equal keys by index."""
        words = self.bits(0, 2 * n, device).view(n, 2)
        return torch.argsort((words[:, 0] << 32) | words[:, 1], stable=True)


def stream(seed: int, *path: str | int) -> Stream:
    """The stream of this seed named by a path, for example ``stream(0, "init", "model.norm.weight")``."""
    return Stream(seed, stream_id(*path))


def uniform_rows(seed: int, ids: Tensor, start: int | Tensor, count: int) -> Tensor:
    """``Stream(seed, ids[i]).uniform(start, count)`` for every row: ids int64 [B] -> float32 [B, count], one call.

    ``start`` is one index for all rows or an int64 [B] tensor.
    """
    starts = start if isinstance(start, Tensor) else torch.full_like(ids, start)
    return _rows("uniform", seed, ids, starts, count)


def fill_normal_(
    tensor: Tensor, stream: Stream, std: float = 1.0, box: Box | None = None, shape: Shape | None = None
) -> Tensor:
    """Fill in place with N(0, std**2), computed in float32 and rounded to the dtype; returns the tensor.

    ``tensor`` is the piece ``box`` of a global tensor of this ``shape`` (default: all of it) and gets the bits that the
    global tensor has there. A flat (ragged) interval of a tensor is a box of the flattened shape ``(numel,)``.
    """
    return _fill(tensor, "normal", stream, box, shape, std, 0.0)


def fill_uniform_(
    tensor: Tensor,
    stream: Stream,
    low: float = 0.0,
    high: float = 1.0,
    box: Box | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """Fill in place with values uniform in [low, high); otherwise as ``fill_normal_``."""
    return _fill(tensor, "uniform", stream, box, shape, high - low, low)


def _fill(
    tensor: Tensor, kind: str, stream: Stream, box: Box | None, shape: Shape | None, scale: float, shift: float
) -> Tensor:
    shape = tuple(shape if shape is not None else tensor.shape)
    box = box or Box.whole(shape)
    inside = all(o >= 0 and o + s <= n for o, s, n in zip(box.offset, box.size, shape, strict=True))
    if tuple(tensor.shape) != box.size or not inside:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not the {box} of shape {shape}")
    starts, length = _runs(box, shape)
    rows = torch.tensor(starts, dtype=torch.int64, device=tensor.device)
    values = _rows(kind, stream.seed, torch.full_like(rows, stream.id), rows, length)
    with torch.no_grad():
        tensor.copy_(values.mul_(scale).add_(shift).view(tensor.shape))
    return tensor


def _runs(box: Box, shape: Shape) -> tuple[list[int], int]:
    """A box as intervals of the flat index of the global tensor: their starts, in order, and their common length."""
    if box.numel == 0:
        return [], 0
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    split = len(shape)
    while split and (split == len(shape) or box.size[split] == shape[split]):
        split -= 1
    length = math.prod(box.size[split:])
    base = sum(o * s for o, s in zip(box.offset, strides))
    steps = [[i * s for i in range(n)] for n, s in zip(box.size[:split], strides)]
    return [base + sum(step) for step in itertools.product(*steps)], length


def dropout_mask(stream: Stream, rows: Tensor, width: int, p: float) -> Tensor:
    """bool [N, width], True (kept) with probability 1 - p; rows int64 [N] are global token indices.

    Entry (i, j) is decided by value ``rows[i] * width + j`` of the stream: it does not depend on how tokens are split.
    """
    return _rows("bits", stream.seed, torch.full_like(rows, stream.id), rows * width, width) >= round(p * 2**32)
