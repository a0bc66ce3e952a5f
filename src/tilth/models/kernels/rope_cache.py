"""Norms of heads, rotary embedding and the write of keys and values to a cache, in one program for some heads of a
token, in Triton. Reference: ``Attention.forward`` (``models.decoder``) and ``index_copy_``.

It rounds where the plain functions do: a normed head before and after its weight, a product with a cosine. So without
norms it has their bits; the sum of squares of a norm has another order.
"""

import triton
import triton.language as tl
from torch import Tensor

SPAN = 8
"""Heads of a program."""
WARPS = 4


@triton.jit
def _rounded(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _heads_kernel(
    every: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Write queries [N, HEADS, 2 HALF], and to slots [count] of a cache the keys and values [.., KV_HEADS, 2 HALF] of
    the first tokens, of every [N, HEADS + 2 KV_HEADS, 2 HALF]. cos, sin: [N, 2 HALF]. PADDED: a power of two."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    place = tl.arange(0, PADDED)
    there = (place < HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & there
    at = ((row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF)[:, None] + place[None, :]
    first = tl.load(every + at, inside, 0.0).to(tl.float32)
    second = tl.load(every + at + HALF, inside, 0.0).to(tl.float32)
    rotated = (head < HEADS + KV_HEADS)[:, None]
    a, b = first, second
    if NORM:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
        scale = (1 / tl.sqrt(mean + eps))[:, None]
        query = (head < HEADS)[:, None] & there
        key = (head >= HEADS)[:, None] & there
        spread = tl.zeros((SPAN, 1), tl.int32) + place[None, :]
        weight = tl.load(query_norm + spread, query, 0.0).to(tl.float32)
        weight += tl.load(key_norm + spread, key, 0.0).to(tl.float32)
        a = _rounded(_rounded(a * scale, every) * weight, every)
        weight = tl.load(query_norm + HALF + spread, query, 0.0).to(tl.float32)
        weight += tl.load(key_norm + HALF + spread, key, 0.0).to(tl.float32)
        b = _rounded(_rounded(b * scale, every) * weight, every)
    table = row * 2 * HALF + place
    cos_a, cos_b = tl.load(cos + table, place < HALF, 0.0), tl.load(cos + table + HALF, place < HALF, 0.0)
    sin_a, sin_b = tl.load(sin + table, place < HALF, 0.0), tl.load(sin + table + HALF, place < HALF, 0.0)
    turned = _rounded(a * cos_a.to(tl.float32)[None, :], every) + b * sin_a.to(tl.float32)[None, :]
    b = _rounded(b * cos_b.to(tl.float32)[None, :], every) + a * sin_b.to(tl.float32)[None, :]
    a, b = tl.where(rotated, turned, first), tl.where(rotated, b, second)
    to = ((row * HEADS + head) * 2 * HALF)[:, None] + place[None, :]
    mine = (head < HEADS)[:, None] & there
    tl.store(queries + to, a.to(queries.dtype.element_ty), mine)
    tl.store(queries + to + HALF, b.to(queries.dtype.element_ty), mine)
    cached = row < count
    slot = tl.load(slots + row, cached, 0)
    to = ((slot * KV_HEADS + head - HEADS) * 2 * HALF)[:, None] + place[None, :]
    mine = ((head >= HEADS) & (head < HEADS + KV_HEADS) & cached)[:, None] & there
    tl.store(keys + to, a.to(keys.dtype.element_ty), mine)
    tl.store(keys + to + HALF, b.to(keys.dtype.element_ty), mine)
    to -= KV_HEADS * 2 * HALF
    mine = ((head >= HEADS + KV_HEADS) & cached)[:, None] & inside
    tl.store(values + to, a.to(values.dtype.element_ty), mine)
    tl.store(values + to + HALF, b.to(values.dtype.element_ty), mine)


def write(
    every: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, tables: tuple[Tensor, ...], keys: Tensor,
    values: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Rotate queries and keys, write keys and values to a cache; return queries [N, heads, width].

    every: [N, (heads + 2 kv_heads) * width], queries, keys and values of each token. norms: weights [width] of RMSNorm
    of queries and of keys, with ``eps``. tables: cosines and sines [N, 1, width], by ``Rope.tables``. keys, values:
    [.., kv_heads, width], dense. slots: int64 [T], places of the first T tokens in them.
    """
    kv_heads, width = keys.shape[-2:]
    rows, heads = len(every), every.shape[1] // width - 2 * kv_heads
    queries = every.new_empty(rows, heads, width)
    weights, (cos, sin) = norms or (every, every), tables
    if rows:
        _heads_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, SPAN))](
            every.contiguous(), *weights, cos, sin, slots, queries, keys, values, len(slots), eps, HEADS=heads,
            KV_HEADS=kv_heads, HALF=width // 2, PADDED=triton.next_power_of_2(width // 2), NORM=norms is not None,
            SPAN=SPAN, num_warps=WARPS,
        )  # fmt: skip
    return queries
