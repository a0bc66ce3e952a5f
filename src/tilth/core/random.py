"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11) addressed by (seed, stream, global index).

Value e of a stream is ``philox(key=(seed lo, seed hi), counter=(e//4 lo, e//4 hi, stream lo, stream hi))[e % 4]``.
There is no state: a slice, shard or other order of evaluation has the bits of the whole, on any device and world size.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.core.errors import ArgumentError
from tilth.core.layout import Box, Shape, runs

Device = str | torch.device
Array = Any

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
LONG = 4096
"""Numbers of a stream, on average, from which on each stream is drawn by itself."""
_LANES = {"cpu": 1 << 16, "cuda": 1 << 20}  # blocks of four words per pass, few enough for the cache


def stream_id(*path: str | int) -> int:
    """Return a stable id in [0, 2**63) of a path such as ``("init", "model.norm.weight")``; it fits int64."""
    digest = hashlib.blake2b(digest_size=8, person=b"tilth.stream")
    for part in path:
        digest.update(_encoded(part))
    return int.from_bytes(digest.digest(), "little") >> 1


@functools.lru_cache(maxsize=1 << 12, typed=True)  # 1 and True are equal, their texts are not
def _encoded(part: str | int) -> bytes:
    """Return a part of a path as bytes."""
    encoded = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _sqrt(x: Tensor, out: Tensor) -> Tensor:
    """Compute the square root rounded once: torch's own is 1 ulp off on some CPUs, in one of six values."""
    return out.copy_(x.double().sqrt())


# Array operations by numpy on a CPU (a quarter of torch's dispatch cost) and by torch elsewhere, with ``out=``. Both
# agree on every bit, since each operation is exact or rounded once. of: the array that shares a tensor's memory.
_Ops = Any
_NUMPY: _Ops = SimpleNamespace(
    of=Tensor.numpy, add=np.add, sub=np.subtract, mul=np.multiply, div=np.divide, sqrt=np.sqrt, xor=np.bitwise_xor,
    mask=np.bitwise_and, right=np.right_shift, at_least=np.greater_equal, int32=np.int32, float32=np.float32,
)  # fmt: skip
_TORCH: _Ops = SimpleNamespace(
    of=Tensor.detach, add=torch.add, sub=torch.sub, mul=torch.mul, div=torch.div, sqrt=_sqrt, xor=torch.bitwise_xor,
    mask=torch.bitwise_and, right=torch.bitwise_right_shift, at_least=torch.ge, int32=torch.int32,
    float32=torch.float32,
)  # fmt: skip


class _Constants(NamedTuple):
    """Constants of the rounds as arrays: a Python number costs more per operation."""

    multipliers: tuple[Array, Array]
    keys: tuple[Array, ...]
    all32: Array
    high24: Array
    half: Array


@functools.lru_cache(maxsize=64)
def _constants(seed: int, device: torch.device) -> _Constants:
    """Return the constants; row 0 holds words (0, 1) and row 1 words (2, 3) in even rounds, vice versa in odd ones."""
    of = _NUMPY.of if device.type == "cpu" else _TORCH.of
    key = (seed & _MASK, seed >> 32 & _MASK)
    keys = [[k + i * w & _MASK for k, w in zip(key, _WEYL)] for i in range(_ROUNDS)]
    rounds = of(torch.tensor([k[::-1] if i % 2 == 0 else k for i, k in enumerate(keys)], device=device).unsqueeze(-1))
    even, odd = (of(torch.tensor(m, device=device).unsqueeze(-1)) for m in (_MULTIPLIERS, _MULTIPLIERS[::-1]))
    return _Constants(
        (even, odd), tuple(rounds), *(of(torch.tensor(v, device=device)) for v in (_MASK, _MASK & ~0xFF, 32))
    )


class _Lanes:
    """Memory for the blocks of one pass; lane j makes words 4j .. 4j+3."""

    def __init__(self, seed: int, lanes: int, device: torch.device) -> None:
        self.ops = _NUMPY if device.type == "cpu" else _TORCH
        self.constants = _constants(seed, device)
        self.buffers = self.ops.of(torch.empty(3, 2 * lanes, dtype=torch.int64, device=device))
        self.x: Array = None
        self.y: Array = None
        self.spare: Array = None

    def run(self, ids: Array, blocks: Array, step: Array) -> None:
        """Compute the words of blocks ``blocks[i] + step[j]`` of stream ``ids[i]``, row by row.

        Then ``x`` holds words 0 and 2 of every lane, ``y`` words 1 and 3 in the low half of each entry, int64 [2, n].
        """
        n = len(ids) * len(step)
        self.x, self.y, self.spare = (b[: 2 * n].reshape(2, n) for b in self.buffers)
        self.ops.add(blocks[:, None], step, out=self.x[0].reshape(-1, len(step)))
        self.x[1].reshape(-1, len(step))[...] = ids[:, None]
        self.ops.right(self.x, self.constants.half, out=self.y)
        self.ops.mask(self.x, self.constants.all32, out=self.x)
        self._rounds()

    def _rounds(self) -> None:
        """Run all rounds; each half follows from the product of the other, so halves swap rows instead of moving."""
        mul, right, xor, mask = self.ops.mul, self.ops.right, self.ops.xor, self.ops.mask
        multipliers, keys, all32, _, half = self.constants
        x, (x0, x1) = self.x, self.x
        y, product = ((b, b[0], b[1]) for b in (self.y, self.spare))
        for i, key in enumerate(keys):
            mul(x, multipliers[i & 1], out=product[0])
            right(product[0], half, out=x)
            xor(x0, y[2], out=x0)
            xor(x1, y[1], out=x1)
            mask(x, all32, out=x)
            xor(x, key, out=x)
            y, product = product, y
        self.y, self.spare = y[0], product[0]

    def words(self, bits: int = 32) -> tuple[Array, Array, Array, Array]:
        """Return words 0 to 3 of every lane, int64 [n] each, with all bits or only the high 24."""
        if bits == 24:
            self.ops.mask(self.x, self.constants.high24, out=self.x)
        self.ops.mask(self.y, self.constants.high24 if bits == 24 else self.constants.all32, out=self.y)
        return self.x[0], self.y[0], self.x[1], self.y[1]

    def floats(self, buffer: Array) -> Array:
        """View one of the three buffers as two float32 arrays [2, n]."""
        return buffer.view(self.ops.float32).reshape(2, 2, -1)


def _places(out: Array) -> Array:
    """View ``out`` [4n] as [4, n]: words 0 to 3 of every lane."""
    return out.reshape(-1, 4).T


def _bits(lanes: _Lanes, out: Array) -> None:
    for words, place in zip(lanes.words(), _places(out)):
        place[...] = words


def _keep(lanes: _Lanes, out: Array, threshold: int) -> None:
    for words, place in zip(lanes.words(), _places(out)):
        lanes.ops.at_least(words, threshold, out=place)


def _uniform(lanes: _Lanes, out: Array) -> None:
    for words, place in zip(lanes.words(24), _places(out)):
        place[...] = words
    lanes.ops.mul(out, 2.0**-32, out=out)


def _normal(lanes: _Lanes, out: Array, scale: float = 1.0) -> None:
    """Box-Muller on the words (2k, 2k+1): radius from the first, angle from the second, as a signed number."""
    ops = lanes.ops
    u, t = lanes.floats(lanes.spare)
    u[...], t[...] = lanes.x, lanes.y.view(ops.int32)[:, ::2]
    ops.add(ops.mul(u, 2.0**-32, out=u), 2.0**-33, out=u)
    ops.mul(t, 2.0**-32, out=t)
    free = (*lanes.floats(lanes.x), *lanes.floats(lanes.y))
    radius = _minus_two_log(ops, u, free)
    ops.mul(ops.sqrt(radius, out=radius), scale, out=radius)
    sine, cosine = _half_angle(ops, t, (u, *free[1:]))
    scaled = ops.mul(radius, sine, out=t)
    odd = ops.mul(scaled, cosine, out=cosine)
    even = ops.sub(radius, ops.mul(scaled, sine, out=sine), out=sine)
    for words, place in zip((even[0], odd[0], even[1], odd[1]), _places(out)):
        place[...] = words


# The functions below use only additions, multiplications, divisions and square roots, which IEEE 754 rounds in one way.
# So a normal value has the same bits in every slice and on every device. torch.log and torch.cos do not guarantee that
# (the last entries of an array may take another code path).

_SQRT_HALF = 0x3F3504F3  # the bits of the float32 1/sqrt 2
_LOG = (-4.000000476837158, -1.333045244216919, -0.8259008526802063)
_SINE = (4.442883014678955, -7.308245658874512, 3.606353998184204, -0.8461104035377502, 0.10982204228639603)
_COSINE = (1.4142135381698608, -6.978850841522217, 5.73945951461792, -1.8835527896881104, 0.3106778562068939)


def _polynomial(ops: _Ops, x: Array, coefficients: Sequence[float], out: Array) -> Array:
    """Horner's rule, lowest coefficient first."""
    ops.add(ops.mul(x, coefficients[-1], out=out), coefficients[-2], out=out)
    for c in coefficients[-3::-1]:
        ops.add(ops.mul(out, x, out=out), c, out=out)
    return out


def _minus_two_log(ops: _Ops, u: Array, free: Sequence[Array]) -> Array:
    """Compute -2 ln u >= 0 for float32 u in (0, 1]; overwrites u and ``free``, returns ``free[0]``.

    u = m * 2**e with m in [1/sqrt 2, sqrt 2], and -2 ln m = -4 atanh((m - 1) / (m + 1)).
    """
    m, s, square, exponent = *free[:3], free[3].view(ops.int32)
    bits = u.view(ops.int32)
    ops.mask(ops.sub(bits, _SQRT_HALF, out=exponent), -(1 << 23), out=exponent)  # e * 2**23: its place in a float32
    ops.sub(bits, exponent, out=m.view(ops.int32))
    u[...] = exponent
    ops.mul(u, -2 * math.log(2) * 2.0**-23, out=u)
    ops.sub(m, 1.0, out=s)
    ops.div(s, ops.add(m, 1.0, out=m), out=s)
    _polynomial(ops, ops.mul(s, s, out=square), _LOG, out=m)
    return ops.add(ops.mul(m, s, out=m), u, out=m)


def _half_angle(ops: _Ops, t: Array, free: Sequence[Array]) -> tuple[Array, Array]:
    """Compute sqrt(2) times sine and cosine of pi * t, to 2e-7, for t in [-1/2, 1/2], in ``free``."""
    square = ops.mul(t, t, out=free[0])
    sine = _polynomial(ops, square, _SINE, out=free[1])
    return ops.mul(sine, t, out=sine), _polynomial(ops, square, _COSINE, out=free[2])


Write = Callable[[_Lanes, Array], None]


class _Tile(NamedTuple):
    rows: slice
    columns: slice
    blocks: int  # per row, to cover the columns

    @property
    def lanes(self) -> int:
        return (self.rows.stop - self.rows.start) * self.blocks


@dataclass(frozen=True)
class _Request:
    """Values ``starts[i] + j`` of stream ``ids[i]`` for row i and column j, computed by ``write`` in ``dtype``."""

    write: Write
    dtype: torch.dtype
    seed: int
    ids: Tensor
    starts: Tensor
    phase: int | None  # all starts modulo 4 if they agree, else None

    def new(self, count: int) -> Tensor:
        """Return a new tensor [rows, count]."""
        return self.into(torch.empty(len(self.ids), count, dtype=self.dtype, device=self.ids.device))

    def into(self, out: Tensor) -> Tensor:
        """Fill ``out`` [rows, count] of any dtype, tile by tile, on a CPU in torch's number of threads."""
        on_cpu = out.device.type == "cpu"
        tiles = list(self._tiles(len(out), out.shape[1], _LANES["cpu" if on_cpu else "cuda"]))
        workers = min(torch.get_num_threads(), len(tiles) // 2) if on_cpu else 1
        if workers < 2:
            self._fill(out, tiles)
        else:
            # Threads do not inherit the caller's inference mode, without which they may not write to ``out``.
            fill = torch.inference_mode(torch.is_inference_mode_enabled())(self._fill)
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(lambda worker: fill(out, tiles[worker::workers]), range(workers)))
        return out

    @torch.no_grad()
    def _fill(self, out: Tensor, tiles: Sequence[_Tile]) -> None:
        capacity = max((tile.lanes for tile in tiles), default=0)
        lanes = _Lanes(self.seed, capacity, out.device)
        values = torch.empty(4 * capacity, dtype=self.dtype, device=out.device)
        of = lanes.ops.of
        ids, first = of(self.ids), of(self.starts >> 2)
        step = of(torch.arange(max((tile.blocks for tile in tiles), default=0), device=out.device))
        for tile in tiles:
            lanes.run(ids[tile.rows], first[tile.rows] + tile.columns.start // 4, step[: tile.blocks])
            target = out[tile.rows, tile.columns]
            if target.dtype == self.dtype and target.numel() == 4 * tile.lanes and target.is_contiguous():
                self.write(lanes, of(target.view(-1)))
            else:
                made = values[: 4 * tile.lanes]
                self.write(lanes, of(made))
                target.copy_(self._cut(made.view(-1, 4 * tile.blocks), tile))

    def _cut(self, values: Tensor, tile: _Tile) -> Tensor:
        """Select the wanted columns of whole blocks."""
        width = tile.columns.stop - tile.columns.start
        if self.phase is not None:
            return values[:, self.phase : self.phase + width]
        phases = self.starts[tile.rows, None] & 3
        return values.gather(1, phases + torch.arange(width, device=values.device))

    def _tiles(self, rows: int, count: int, lanes: int) -> Iterator[_Tile]:
        """Cut [rows, count] into tiles of about ``lanes`` blocks; columns are cut at whole blocks."""
        spill = 6 if self.phase is None else self.phase + 3
        width = max(1, min(count, 4 * lanes))
        height = max(1, lanes // ((width + spill) // 4))
        for row in range(0, rows, height):
            for at in range(0, count, width):
                columns = slice(at, min(count, at + width))
                yield _Tile(slice(row, min(rows, row + height)), columns, (columns.stop - at + spill) // 4)


@dataclass(frozen=True)
class Stream:
    """One stream of random numbers: value ``e`` depends on (seed, id, e) only."""

    seed: int
    id: int

    def _slice(self, write: Write, dtype: torch.dtype, start: int, count: int, device: Device) -> Tensor:
        return _request(self, write, dtype, [start], torch.device(device)).new(count)[0]

    def bits(self, start: int, count: int, device: Device = "cpu") -> Tensor:
        """Return 32-bit words ``start .. start + count``: int64 [count]."""
        return self._slice(_bits, torch.int64, start, count, device)

    def uniform(self, start: int, count: int, device: Device = "cpu") -> Tensor:
        """Return float32 [count] in [0, 1): multiples of 2**-24."""
        return self._slice(_uniform, torch.float32, start, count, device)

    def normal(self, start: int, count: int, device: Device = "cpu") -> Tensor:
        """Return standard normal values, float32 [count], of absolute value <= 6.77."""
        return self._slice(_normal, torch.float32, start, count, device)

    def integers(self, start: int, count: int, high: int, device: Device = "cpu") -> Tensor:
        """Return int64 [count] in [0, high), 1 <= high <= 2**31: ``word * high >> 32``, with a bias < high / 2**32."""
        if not 1 <= high <= 1 << 31:
            raise ArgumentError(f"high={high}: must be between 1 and 2**31", key="high")
        return self.bits(start, count, device).mul_(high).bitwise_right_shift_(32)

    def permutation(self, n: int, device: Device = "cpu") -> Tensor:
        """Return 0 .. n-1 in the order of their 64-bit keys (words 2i and 2i+1), equal keys by index: int64 [n]."""
        words = self.bits(0, 2 * n, device).view(n, 2)
        return torch.argsort((words[:, 0] << 32) | words[:, 1], stable=True)


def _request(stream: Stream, write: Write, dtype: torch.dtype, starts: Sequence[int], device: torch.device) -> _Request:
    rows = torch.tensor(starts, dtype=torch.int64, device=device)
    phases = {start & 3 for start in starts}
    phase = phases.pop() if len(phases) == 1 else None
    return _Request(write, dtype, stream.seed, torch.full_like(rows, stream.id), rows, phase)


def stream(seed: int, *path: str | int) -> Stream:
    """Return the stream of a seed and a path, for example ``stream(0, "init", "model.norm.weight")``."""
    return Stream(seed, stream_id(*path))


def uniform_rows(seed: int, ids: Tensor, start: int | Tensor, count: int) -> Tensor:
    """Draw ``Stream(seed, ids[i]).uniform(start, count)`` for every row: ids int64 [B] -> float32 [B, count].

    start: one index for all rows, or int64 [B].
    """
    if isinstance(start, Tensor):
        return _Request(_uniform, torch.float32, seed, ids, start, None).new(count)
    return _Request(_uniform, torch.float32, seed, ids, torch.full_like(ids, start), start & 3).new(count)


def uniform_parts(streams: Sequence[Stream], counts: Sequence[int], device: Device = "cpu") -> list[Tensor]:
    """Draw ``uniform(0, count)`` of each stream, all of one seed, many short ones at once: float32 [count] each."""
    if sum(counts) >= LONG * len(counts):
        return [stream.uniform(0, count, device) for stream, count in zip(streams, counts)]
    sizes = [-(-count // 4) for count in counts]
    blocks = torch.tensor(sizes, device=device)
    ids, firsts = torch.tensor([stream.id for stream in streams], device=device), blocks.cumsum(0) - blocks
    ids, firsts = (one.repeat_interleave(blocks, output_size=sum(sizes)) for one in (ids, firsts))
    starts = torch.arange(sum(sizes), device=device) - firsts
    request = _Request(_uniform, torch.float32, streams[0].seed, ids, 4 * starts, 0)
    return [own[:count] for own, count in zip(request.new(4).view(-1).split([4 * size for size in sizes]), counts)]


def fill_normal_(
    tensor: Tensor, stream: Stream, std: float = 1.0, box: Box | None = None, shape: Shape | None = None
) -> Tensor:
    """Fill in place with N(0, std**2), computed in float32 and rounded to the dtype; return the tensor.

    ``tensor`` is the piece ``box`` of a global tensor of this ``shape`` (default: all of it) and gets its bits there.
    A flat (ragged) interval of a tensor is a box of the flattened shape ``(numel,)``.
    """
    shape = tuple(shape if shape is not None else tensor.shape)
    box = box or Box.whole(shape)
    if tuple(tensor.shape) != box.size or len(shape) != len(box.size) or not Box.whole(shape).contains(box):
        message = f"a tensor of shape {tuple(tensor.shape)} is not the {box} of shape {shape}"
        raise ArgumentError(message, key="box")
    starts, length = runs(box, shape)
    write = functools.partial(_normal, scale=float(std))
    request = _request(stream, write, torch.float32, starts, tensor.device)
    with torch.no_grad():
        if tensor.is_contiguous():
            request.into(tensor.view(len(starts), length))
        else:
            tensor.copy_(request.new(length).view(tensor.shape))
    return tensor


def dropout_mask(stream: Stream, rows: Tensor, width: int, p: float) -> Tensor:
    """Return bool [N, width], True (kept) with probability 1 - p; rows: global token indices, int64 [N].

    Entry (i, j) follows from value ``rows[i] * width + j`` of the stream, however tokens are split over ranks.
    """
    write = functools.partial(_keep, threshold=round(p * 2**32))
    phase = 0 if width % 4 == 0 else None
    return _Request(write, torch.bool, stream.seed, torch.full_like(rows, stream.id), rows * width, phase).new(width)
