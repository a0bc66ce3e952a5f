"""Sampling of a row in one program in Triton: filters, inverse CDF, log-probs. Reference: ``engines.sampling``.

A filter is a threshold: the least value t such that fewer than k values, of less than the share p, are above t. All
values are 32 bits whose order is that of integers, so t is found digit by digit, two bits a pass over the row (which
stays in a GPU's cache), without a sort and whatever k and p are. Sums over the vocabulary have one order, so equal
inputs give equal bits; the reference adds up in another one, so a token may differ where the random number, or the
share p, is within a rounding of a token's edge.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Tokens of the vocabulary at a time."""
WARPS = 16
MOST = tl.constexpr(2147483647)
LEAST = tl.constexpr(-2139095041)
"""-inf, ordered."""


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """Return int32 whose order is that of fp32, and the other way round."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ MOST)


@triton.jit
def _load(row: tl.tensor, start: tl.tensor, v: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    places = start + tl.arange(0, BLOCK)
    return tl.load(row + places, places < v, float("-inf"))


@triton.jit
def _threshold(row: tl.tensor, v: tl.tensor, k: tl.tensor, share: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the least int32 t such that fewer than k ordered values, of less than ``share``, are above t; that of -inf
    if all are kept."""
    found = tl.full((), -2147483648, tl.int32)
    step = tl.full((), 1073741824, tl.int32)
    while step > 0:
        one, two, three = found + (step - 1), found + (2 * step - 1), found + (2 * step - 1) + step
        zero = tl.zeros((BLOCK,), tl.int32)
        n1, n2, n3 = zero, zero, zero
        p1, p2, p3 = zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32)
        for start in range(0, v, BLOCK):
            x = _load(row, start, v, BLOCK)
            at, p = _ordered(x), tl.exp(x)
            n1, n2, n3 = n1 + (at > one), n2 + (at > two), n3 + (at > three)
            p1, p2, p3 = (
                p1 + tl.where(at > one, p, 0.0),
                p2 + tl.where(at > two, p, 0.0),
                p3 + tl.where(at > three, p, 0.0),
            )
        digit = ((tl.sum(n1, 0) >= k) | (tl.sum(p1, 0) >= share)).to(tl.int32)
        digit += ((tl.sum(n2, 0) >= k) | (tl.sum(p2, 0) >= share)).to(tl.int32)
        digit += ((tl.sum(n3, 0) >= k) | (tl.sum(p3, 0) >= share)).to(tl.int32)
        found += digit * step
        step = step // 4
    return tl.maximum(found, LEAST)


@triton.jit
def _share_of(row: tl.tensor, v: tl.tensor, k: tl.tensor, t: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the sum of probabilities of the k greatest values, of which t is the ordered last one."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, v, BLOCK):
        x = _load(row, start, v, BLOCK)
        above = _ordered(x) > t
        count += above
        mass += tl.where(above, tl.exp(x), 0.0)
    last = _ordered(t.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.sum(mass, 0) + (tl.minimum(k, v) - tl.sum(count, 0)) * tl.exp(last)


@triton.jit(do_not_specialize=["rows"])
def _choice_kernel(
    logp: tl.tensor,
    uniform: tl.tensor,
    greedy: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    tokens: tl.tensor,
    picked: tl.tensor,
    v: tl.tensor,
    rows: tl.tensor,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the token of each row of logp [rows, v], and to picked [2, rows] its log-probs before and after filters."""
    number = tl.program_id(0)
    row = logp + number.to(tl.int64) * v
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    first = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, v, BLOCK):
        x = _load(row, start, v, BLOCK)
        first = tl.where(x > best, start, first)
        best = tl.maximum(best, x)
    greatest = tl.max(best, 0)
    token = tl.min(tl.where(best == greatest, first + tl.arange(0, BLOCK), MOST), 0)
    cutoff = tl.full((), float("-inf"), tl.float32)
    if FILTERED:
        k, p = tl.load(top_k + number).to(tl.int32), tl.load(top_p + number)
        most = tl.where(k > 0, k, MOST)
        if (k > 0) | (p < 1):
            share = tl.full((), float("inf"), tl.float32)
            t = tl.full((), -2147483648, tl.int32)
            if k > 0:
                t = _threshold(row, v, most, share, BLOCK)
            if p < 1:
                share = p
                if k > 0:
                    share = p * _share_of(row, v, k, t, BLOCK)
                t = _threshold(row, v, most, share, BLOCK)
            cutoff = _ordered(t.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)
        cutoff = tl.maximum(cutoff, greatest + tl.log(tl.load(min_p + number)))
    total = tl.zeros((), tl.float32)
    for start in range(0, v, BLOCK):
        x = _load(row, start, v, BLOCK)
        total += tl.sum(tl.where(x >= cutoff, tl.exp(x), 0.0), 0)
    if tl.load(greedy + number) == 0:
        target = tl.load(uniform + number) * total
        done, before = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
        block = tl.full((), 0, tl.int32)
        for start in range(0, v, BLOCK):
            x = _load(row, start, v, BLOCK)
            own = tl.sum(tl.where(x >= cutoff, tl.exp(x), 0.0), 0)
            here = (own > 0) & (done <= target)
            block, before = tl.where(here, start, block), tl.where(here, done, before)
            done += own
        x = _load(row, block, v, BLOCK)
        weights = tl.where(x >= cutoff, tl.exp(x), 0.0)
        places = block + tl.arange(0, BLOCK)
        token = tl.min(tl.where((weights > 0) & (tl.cumsum(weights, 0) > target - before), places, MOST), 0)
        token = tl.minimum(token, tl.max(tl.where(weights > 0, places, 0), 0))  # the last one, if a rounding is missing
    found = tl.load(row + token)
    tl.store(tokens + number, token.to(tl.int64))
    tl.store(picked + number, found)
    tl.store(picked + rows + number, found - tl.log(total))


def choose(
    logp: Tensor, uniform: Tensor, greedy: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, filtered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row from log-probs float32 [B, V]. uniform: float32 [B] in [0, 1); then rules of each row.

    Returns tokens int64 [B], and float32 [B] log-probs before filters and, if ``filtered``, after them.
    """
    rows, v = logp.shape
    tokens, picked = torch.empty_like(uniform, dtype=torch.int64), logp.new_empty(2, rows)
    if rows:
        _choice_kernel[(rows,)](
            logp.contiguous(), uniform, greedy, top_k, top_p, min_p, tokens, picked, v, rows, FILTERED=filtered,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return tokens, picked[0], picked[1] if filtered else None
