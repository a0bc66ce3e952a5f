"""Products and functions that give a row the same bits whatever is computed beside it: parity mode on a CPU.

Matrix libraries choose a kernel, and with it the order of a sum, by the shape of a product, the processor and the
number of threads; a rule measured on one maker's processor fails on another's. So every product is divided into blocks,
each of one of a fixed set of shapes, the last one padded with zeros. The reference block has 16 rows (8 or 4 where rows
depend on their place among 16) and, in attention, 256 keys. Any other block is used only if a trial on this machine,
once for each shape, gives rows the bits that they have in the reference block; so is a kernel of our own that computes
the last few rows without padding (``models.row_product``). ``models.parity`` refuses a model with a shape that has no
reference block.

Functions of single elements (SiLU, GELU, sigmoid) are computed by vectors, and by other code at the end of a tensor
and of each thread's share: ``elementwise`` pads, so that no element is there.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.core.errors import RecipeError
from tilth.models.casts import cast
from tilth.models.row_product import LEAST, MOST, WHEN_LOADED, orders, ready, row_product, row_scores, row_values
from tilth.plan.kernels import CHUNK_ELEMENTS, KEYS, ROW_MULTIPLE, TAIL, round_up

SIZES = (1024, 512, 256, 128, 64, 32, ROW_MULTIPLE)
"""Rows of whole blocks."""
TAILS = (TAIL, 8, 12, ROW_MULTIPLE)
"""Rows of the last block."""
REFERENCES = (ROW_MULTIPLE, 8, 4)
KEY_BLOCK = 256
"""Keys of a block of attention: also the order in which a row's values are added."""
SAMPLES = 4
"""Rows of a trial, and most of their copies side by side (attention)."""
COLUMNS = 256
"""Columns of a trial that differ."""
LANES = 64
"""Elements of two vectors of the widest instructions, at which a loop over elements steps."""
GRAIN = 32768
"""Elements from which on torch divides a loop over elements among threads."""


class _Mode(threading.local):
    on = False


_mode = _Mode()


@contextmanager
def steady() -> Iterator[None]:
    """Let ``linear`` and ``elementwise`` of this thread keep the bits of a row at any number of rows on a CPU."""
    before, _mode.on = _mode.on, True
    try:
        yield
    finally:
        _mode.on = before


# ---- trials ----


class ProductShape(NamedTuple):
    """Rows [n, width] times one matrix [width, out]: a linear layer, or attention's scores or values of a head."""

    kind: str
    """"linear", "scores" (the matrix is that of keys, transposed) or "values" (the sum is over keys)."""
    out: int
    width: int
    dtype: torch.dtype
    threads: int
    biased: bool = False

    def __str__(self) -> str:
        what = f"products of rows with a weight [{self.out}, {self.width}]"
        heads = f"attention {self.kind} of heads {self.width if self.kind == 'scores' else self.out} wide"
        return f"{what if self.kind == 'linear' else heads} in {str(self.dtype).removeprefix('torch.')}"


def mm(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute x [n, in] times weight [out, in], plus bias."""
    # Not F.linear: selective recomputation counts its products, and a trial happens once only.
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """Return left [n, rows, width] times right [n, width, out]."""
    return torch.bmm(left, right, out=left.new_empty(*left.shape[:2], right.shape[2]))


def _terms(shape: ProductShape) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows [SAMPLES, width], a weight [out, width] and a bias, with random terms whose sum is 0: what comes out
    is rounding alone, so that another order shows in bf16 too."""
    some, half, columns = torch.Generator().manual_seed(0), shape.width // 2, min(shape.out, COLUMNS)
    left, right, bias = (torch.randn(size, generator=some) for size in ((SAMPLES, half), (columns, half), (columns,)))
    left, right, bias = (x.to(shape.dtype) for x in (left, right, bias))
    order = torch.randperm(2 * half, generator=some)
    x, weight = (torch.cat(both, 1)[:, order] for both in ((left, left), (right, -right)))
    if shape.biased and half:  # one more term takes the bias away
        x[:, order == 0], weight[:, order == 0] = 1, -bias[:, None]
        x[:, order == half] = 0
    x, weight = (F.pad(both, (0, shape.width % 2)) for both in (x, weight))
    times = -(-shape.out // columns)
    return x, weight.repeat(times, 1)[: shape.out], bias.repeat(times)[: shape.out] if shape.biased else None


class _Tried:
    """Rows of a trial in blocks of any size; ``keys`` of attention are seen."""

    def __init__(self, shape: ProductShape, keys: int) -> None:
        self.shape, (self.rows, self.weight, self.bias) = shape, _terms(shape)
        if shape.kind == "values":
            self.rows[:, keys:] = 0

    def results(self, x: Tensor, keys: int) -> Iterator[Tensor]:
        """Yield the result [rows, out] of a block x, alone and, in attention, beside others."""
        shape = self.shape
        if shape.kind == "linear":
            yield mm(x, self.weight, self.bias, x.new_empty(len(x), shape.out))
            return
        cut = self.weight[:keys] if shape.kind == "scores" else self.weight[:, :keys]
        x = x if shape.kind == "scores" else x[:, :keys].contiguous()
        right = cut.t() if shape.kind == "scores" else cut.t().contiguous()
        for n in (1, 2, 2 * shape.threads + 1):
            # Copies of the transposed matrix stay transposed.
            several = cut.repeat(n, 1, 1).mT if shape.kind == "scores" else right.repeat(n, 1, 1)
            yield from bmm(x.repeat(n, 1, 1), several)


@lru_cache(4096)
def reference(shape: ProductShape, keys: int = KEY_BLOCK) -> tuple[int, Tensor] | None:
    """Return the rows of the reference block and the results [SAMPLES, out] of a trial's rows in it, of which the first
    ``keys`` are seen in attention; None if in every block rows depend on their place or on the blocks beside it."""
    tried = _Tried(shape, keys)
    for size in REFERENCES:
        found = [torch.stack([*tried.results(row.repeat(size, 1), KEY_BLOCK)]) for row in tried.rows]
        if all(torch.equal(some, some[:1, :1].expand_as(some)) for some in found):
            return size, torch.stack([some[0, 0] for some in found])
    return None


def _reference(shape: ProductShape, keys: int) -> tuple[int, Tensor] | None:
    return reference(shape, keys) if shape.kind == "values" else reference(shape)


@lru_cache(4096)
def keeps_bits(shape: ProductShape, rows: int, keys: int = KEY_BLOCK) -> bool:
    """Return True if rows have in a block of this size the bits that they have in the reference block.

    Tried on ``shape.threads`` threads, which this thread has now.
    """
    known = _reference(shape, keys)
    if known is None or rows * shape.out > CHUNK_ELEMENTS:
        return known is not None and rows == known[0]
    tried, times = _Tried(shape, keys), rows // SAMPLES
    expected = known[1][:, :keys] if shape.kind == "scores" else known[1]
    found = tried.results(tried.rows.repeat(times, 1), keys)
    return all(torch.equal(some, expected.repeat(len(some) // SAMPLES, 1)) for some in found)


class PaddedBlock(NamedTuple):
    start: int
    stop: int
    size: int
    """Rows or keys of the product, above ``stop - start`` if it is padded."""
    terms: int = 0
    """Of a sum in a ``row_product``; 0: the library's product."""


@lru_cache(4096)
def summed(shape: ProductShape, rows: int) -> int:
    """Return the terms of a sum with which so many rows keep bits in ``models.row_product``; 0: there are none."""
    known = reference(shape)
    if known is None or shape.dtype != torch.float32 or not 0 < rows <= MOST or not ready():
        return 0
    if shape.kind == "values" and shape.out % LEAST:
        return 0
    tried = _Tried(shape, KEY_BLOCK)
    x, expected = (some.repeat(-(-rows // SAMPLES), 1)[:rows] for some in (tried.rows, known[1]))

    def result(terms: int) -> Tensor:
        if shape.kind == "linear":
            return row_product(x, tried.weight, tried.bias, torch.empty_like(expected), terms, shape.threads)
        if shape.kind == "scores":
            return row_scores(x[None], tried.weight[None], terms, shape.threads)[0]
        return row_values(x[None], tried.weight.t()[None], terms, KEY_BLOCK, shape.threads)[0]

    return next((terms for terms in orders(shape.out, shape.width) if torch.equal(result(terms), expected)), 0)


@lru_cache(4096)
def row_blocks(shape: ProductShape, rows: int, keys: int = KEY_BLOCK) -> tuple[PaddedBlock, ...]:
    """Divide rows into blocks that keep bits. Raises RecipeError if there is no reference block."""
    known = _reference(shape, keys)
    if known is None:
        raise refusal(str(shape), shape.threads)
    found, at = list[PaddedBlock](), 0
    for size in SIZES:
        while rows - at >= size and (size == known[0] or keeps_bits(shape, size, keys)):
            found.append(PaddedBlock(at, at + size, size))
            at += size
    if at < rows and shape.kind == "linear" and (terms := summed(shape, rows - at)):
        return (*found, PaddedBlock(at, rows, rows - at, terms))
    while at < rows:
        least = (size for size in TAILS if size >= rows - at and keeps_bits(shape, size, keys))
        size = next(least, known[0])
        found.append(PaddedBlock(at, min(at + size, rows), size))
        at += size
    return tuple(found)


@lru_cache(4096)
def key_blocks(shape: ProductShape, keys: int) -> tuple[PaddedBlock, ...]:
    """Divide keys into blocks of ``KEY_BLOCK`` and a last one, the smallest whose products keep bits."""
    found = [PaddedBlock(at, at + KEY_BLOCK, KEY_BLOCK) for at in range(0, keys - KEY_BLOCK + 1, KEY_BLOCK)]
    if rest := keys % KEY_BLOCK:
        known = reference(shape)
        fits = (size for size in range(round_up(rest, KEYS), KEY_BLOCK, KEYS) if known and _fits(shape, size))
        found.append(PaddedBlock(keys - rest, keys, next(fits, KEY_BLOCK)))
    return tuple(found)


def _fits(shape: ProductShape, keys: int) -> bool:
    known = _reference(shape, keys)
    return known is not None and keeps_bits(shape, known[0], keys)


def refusal(what: str, threads: int) -> RecipeError:
    """Return the error of products whose rows have no bits of their own."""
    return RecipeError(
        f"train.parity = true: on this CPU with {threads} threads, the bits of a row depend on the rows beside it in "
        f"{what}; try another train.threads or width, or do without parity "
        "(train.parity = false, tilth serve --fast)",
        key="train.parity",
    )


# ---- linear layers ----


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [N, in] times weight [out, in], plus bias, both cast to x's dtype: [N, out]."""
    weight, bias = cast(weight, x.dtype), None if bias is None else cast(bias, x.dtype)
    return steady_linear(x, weight, bias) if _mode.on else F.linear(x, weight, bias)


def joined_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """Return ``linear`` of weights (and biases) that were joined, of ``sizes`` outputs, with the bits of each alone."""
    if _mode.on and x.device.type == "cpu" and not torch.compiler.is_compiling():
        out, width = weight.shape
        shape = ProductShape("linear", out, width, x.dtype, torch.get_num_threads(), bias is not None)
        if not _joins(shape, tuple(sizes)):
            biases = [None] * len(sizes) if bias is None else bias.split(sizes)
            return torch.cat([linear(x, *part) for part in zip(weight.split(sizes), biases)], 1)
    return linear(x, weight, bias)


@lru_cache(4096)
def _joins(shape: ProductShape, sizes: tuple[int, ...]) -> bool:
    """Return True if outputs of joined weights have the bits that they have alone: a library may order the sums of more
    outputs otherwise (MKL, AVX2)."""
    known, tried, at = reference(shape), _Tried(shape, KEY_BLOCK), 0
    for size in sizes:
        some, alone = slice(at, at + size), reference(shape._replace(out=size))
        if known is None or alone is None:
            return False
        x, bias = tried.rows.repeat(alone[0] // SAMPLES, 1), None if tried.bias is None else tried.bias[some]
        found = mm(x, tried.weight[some], bias, x.new_empty(len(x), size))
        if not torch.equal(found[:SAMPLES], known[1][:, some]):
            return False
        at += size
    return True


def steady_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [N, in] times weight [out, in], plus bias, all of one dtype: [N, out].

    A row has the same bits for every N, on the CPU and with the number of threads that it has now.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not weight.numel():
        return F.linear(x, weight, bias)  # compiled code has no parity mode, a rank without words no sums
    sizes = weight.shape[0], weight.shape[1], x.dtype, torch.get_num_threads(), bias is not None
    blocks = _blocks(*sizes, x.shape[0], _mode.on)
    if not blocks:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _linear(x, weight, bias, blocks)
    return _Linear.apply(x, weight, bias, blocks)


@lru_cache(4096)
def _blocks(
    out: int, width: int, dtype: torch.dtype, threads: int, biased: bool, rows: int, on: bool
) -> tuple[PaddedBlock, ...]:
    """Return the blocks of a linear layer's product; none where the library's product of all rows does."""
    shape = ProductShape("linear", out, width, dtype, threads, biased)
    if not on and reference(shape) is None:  # the head of an engine or trainer without parity
        return ()
    blocks = row_blocks(shape, rows)
    return () if len(blocks) == 1 and blocks[0].size == rows and not blocks[0].terms else blocks


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: tuple[PaddedBlock, ...]) -> Tensor:
    found = x.new_empty(x.shape[0], weight.shape[0])
    if blocks[0].terms:
        return row_product(x, weight, bias, found, blocks[0].terms, torch.get_num_threads())
    for start, stop, size, terms in blocks:
        if terms:
            row_product(x[start:stop], weight, bias, found[start:stop], terms, torch.get_num_threads())
        elif size == stop - start:
            mm(x[start:stop], weight, bias, found[start:stop])
        else:
            room = x.new_empty(size, weight.shape[0])
            found[start:stop] = mm(_filled(x[start:stop], size), weight, bias, room)[: stop - start]
    return found


def _filled(x: Tensor, size: int) -> Tensor:
    """Return x [..., n, width] with zeros up to ``size`` rows."""
    return F.pad(x, (0, 0, 0, size - x.shape[-2])) if size > x.shape[-2] else x


def _cat(parts: list[Tensor], dim: int, none: Tensor) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else none


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: tuple[PaddedBlock, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), wanted = ctx.saved_tensors, ctx.needs_input_grad
        return (
            grad @ weight if wanted[0] else None,
            grad.t() @ x if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
            None,
        )


# ---- attention ----


@lru_cache(4096)
def of_heads(kind: str, width: int, dtype: torch.dtype, threads: int) -> ProductShape:
    """Return the product of heads of a width, or of the next multiple of 4, 8 or 16 that has a reference block: a head
    is padded with zeros to it."""
    widths = dict.fromkeys([width, *(round_up(width, multiple) for multiple in (4, 8, 16))])
    sizes = [(KEY_BLOCK, some) if kind == "scores" else (some, KEY_BLOCK) for some in widths]
    shapes = [ProductShape(kind, *size, dtype, threads) for size in sizes]
    return next((shape for shape in shapes if reference(shape) is not None), shapes[0])


def steady_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return q [n, rows, width] times the transpose of k [n, keys, width]: [n, rows, keys].

    A row has the same bits for every n and number of rows, a score for every number of keys.
    """
    shape = of_heads("scores", q.shape[2], q.dtype, torch.get_num_threads())
    if k.shape[1] >= LEAST and (terms := _few(shape, q.shape[1], q.shape[2])):
        return row_scores(q, k, terms, shape.threads)
    q, k = (_widened(x, shape.width) for x in (q, k))
    return _over_keys(q, k.transpose(1, 2), shape)


def stacked_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [n, rows, in] times n weights [n, out, in], each its own rows: [n, rows, out]."""
    return steady_scores(x, weight) if _mode.on else torch.bmm(x, weight.mT)


def steady_values(weights: Tensor, v: Tensor) -> Tensor:
    """Return weights [n, rows, keys] times v [n, keys, width]: [n, rows, width].

    A row has the same bits for every n, number of rows and number of keys behind whose weights are 0.
    """
    shape, width = of_heads("values", v.shape[2], v.dtype, torch.get_num_threads()), v.shape[2]
    if terms := _few(shape, weights.shape[1], width):
        return row_values(weights, v, terms, KEY_BLOCK, shape.threads)
    found = _over_keys(weights, _widened(v, shape.out), shape)
    return found if shape.out == width else found[..., :width]


def _few(shape: ProductShape, rows: int, width: int) -> int:
    """Return ``summed`` of attention without a gradient whose heads, so wide, are not padded."""
    widest = shape.width if shape.kind == "scores" else shape.out
    return 0 if torch.is_grad_enabled() or rows > MOST or width != widest else summed(shape, rows)


def _widened(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if width > x.shape[-1] else x


def _over_keys(left: Tensor, right: Tensor, shape: ProductShape) -> Tensor:
    if _whole_block(shape, left.shape[1], right.shape[2 if shape.kind == "scores" else 1]):
        return torch.bmm(left, right)
    return _Attend.apply(left, right, shape) if torch.is_grad_enabled() else _attend(left, right, shape)


@lru_cache(4096)
def _whole_block(shape: ProductShape, rows: int, keys: int) -> bool:
    of_keys, of_rows = key_blocks(shape, keys), row_blocks(shape, rows, keys)
    return [block.size for block in of_keys] == [keys] and [block.size for block in of_rows] == [rows]


def _attend(left: Tensor, right: Tensor, shape: ProductShape) -> Tensor:
    length = right.shape[2 if shape.kind == "scores" else 1]
    keys = key_blocks(shape, length)
    if len(keys) == 1 and keys[0].size == length:
        return _by_rows(left, right, shape, length)
    if shape.kind == "scores":
        return _cat([_scores(left, right, shape, block) for block in keys], 2, left.new_empty(*left.shape[:2], 0))
    total, *more = (_values(left, right, shape, block) for block in keys)
    for part in more:
        total = total + part
    return total


def _scores(q: Tensor, keys: Tensor, shape: ProductShape, block: PaddedBlock) -> Tensor:
    part = _filled(keys.mT[:, block.start : block.stop], block.size).mT
    return _by_rows(q, part, shape, block.size)[:, :, : block.stop - block.start]


def _values(weights: Tensor, v: Tensor, shape: ProductShape, block: PaddedBlock) -> Tensor:
    some = slice(block.start, block.stop)
    seen = F.pad(weights[:, :, some], (0, block.size - (block.stop - block.start)))
    return _by_rows(seen, _filled(v[:, some], block.size), shape, block.size)


def _by_rows(left: Tensor, right: Tensor, shape: ProductShape, keys: int) -> Tensor:
    blocks = row_blocks(shape, left.shape[1], keys)
    found = [bmm(_filled(left[:, at:stop], size), right)[:, : stop - at] for at, stop, size, _ in blocks]
    return _cat(found, 1, left.new_empty(len(left), 0, right.shape[2]))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, shape: ProductShape) -> Tensor:
        ctx.save_for_backward(left, right)
        return _attend(left, right, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (left, right), wanted = ctx.saved_tensors, ctx.needs_input_grad
        return (torch.bmm(grad, right.mT) if wanted[0] else None, torch.bmm(left.mT, grad) if wanted[1] else None, None)


# ---- functions of elements ----


def elementwise(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Apply a function of single elements to contiguous tensors of one shape; in ``steady`` mode an element has the
    same bits wherever it is."""
    n, shape = inputs[0].numel(), inputs[0].shape
    if not _mode.on or inputs[0].device.type != "cpu" or torch.compiler.is_compiling():
        return function(*inputs)
    size = _whole(n, torch.get_num_threads())
    if size == n:
        return function(*inputs)
    return function(*(F.pad(x.reshape(-1), (0, size - n)) for x in inputs))[:n].view(shape)


@lru_cache(4096)
def _whole(n: int, threads: int) -> int:
    """Return the least number of elements, from n on, of which each thread's share is a whole number of vectors."""

    def divides(size: int) -> bool:
        share = -(-size // min(threads, -(-size // GRAIN)))
        return share % LANES == 0

    return next(size for size in count(round_up(n, LANES), LANES) if divides(size)) if n else 0


WHEN_LOADED.extend(one.cache_clear for one in (summed, row_blocks, _blocks, _whole_block))
