"""Output head in Triton: statistics and gradients of logits that are never in memory. Reference: ``models.logprobs``.

A program of the forward pass multiplies a tile of rows with one tile of the vocabulary after the other and keeps five
numbers a row; a second kernel joins those of all parts of the vocabulary. The backward pass computes the tiles again
and writes their gradient, a part of the vocabulary at a time, so each row of the weight's gradient is written once
(parts of rows read and write all of it each time). No atomic operation: equal inputs give equal bits, and log-probs
and entropy of a row have the same bits whatever rows are beside it.

Products add up in fp32. Logits are rounded to the dtype of hidden states, as those of the engine are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilth.core.device import shared_memory
from tilth.plan.kernels import HEAD_COLUMNS, HEAD_INNER, HEAD_ROWS, HEAD_SPAN, gradient_columns, head_stages

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Greatest logit of no logits: fp32's lowest number, since of two infinities there is no difference."""


class TileSizes(NamedTuple):
    """Sizes of a program: a tile of logits, the depth of a product's step, columns of a forward program."""

    rows: int = HEAD_ROWS
    columns: int = HEAD_COLUMNS
    inner: int = HEAD_INNER
    span: int = HEAD_SPAN
    warps: int = 8


SIZES = TileSizes()

# ---- kernels: compiled once for a model, whatever the rows of a call (do_not_specialize) ----


@triton.jit
def _logits(
    hidden: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    v: tl.tensor,
    d: tl.tensor,
    scale: tl.tensor,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> tl.tensor:
    """Return logits fp32 [ROWS, COLUMNS] of rows that exist, -inf in columns from v on. EVEN: INNER divides d."""
    inner = tl.arange(0, INNER)
    left = hidden + rows.to(tl.int64)[:, None] * d + inner[None, :]
    right = weight + tl.minimum(columns, v - 1).to(tl.int64)[None, :] * d + inner[:, None]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, d, INNER):
        if EVEN:
            x, w = tl.load(left + k), tl.load(right + k)
        else:
            x = tl.load(left + k, mask=inner[None, :] < d - k, other=0.0)
            w = tl.load(right + k, mask=inner[:, None] < d - k, other=0.0)
        found = tl.dot(x, w, found, input_precision="ieee")
    found = found.to(hidden.dtype.element_ty).to(tl.float32) * scale
    return tl.where(columns[None, :] < v, found, float("-inf"))


@triton.jit
def _join(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Join the statistics of two sets of logits (``statistics``)."""
    top = tl.maximum(one[0], other[0])
    lower, below = one[0] - top, other[0] - top
    shrink, fade = tl.exp(lower), tl.exp(below)
    spread = shrink * (one[2] + lower * one[1]) + fade * (other[2] + below * other[1])
    total = shrink * one[1] + fade * other[1]
    return top, total, spread, one[3] + other[3], shrink * shrink * one[4] + fade * fade * other[4]


@triton.jit
def _nothing(ROWS: tl.constexpr) -> tl.tensor:
    """Return the statistics of no logits."""
    zero = tl.zeros((ROWS,), tl.float32)
    return zero + LOWEST, zero, zero, zero, zero


@triton.jit(do_not_specialize=["n"])
def _part_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    targets: tl.tensor,
    parts: tl.tensor,
    n: tl.tensor,
    v: tl.tensor,
    d: tl.tensor,
    scale: tl.tensor,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Write the statistics of ROWS rows and SPAN columns to parts [spans, 5, n]. Programs beside each other share their
    columns. WHOLE: no rank has other columns, so a target that is not in [0, v) gives NaN."""
    blocks = tl.cdiv(n, ROWS)
    span = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    there = tl.minimum(rows, n - 1)
    target = tl.load(targets + there)
    known = tl.where(target < v, target, -1)
    found = _nothing(ROWS)
    for start in range(span * SPAN, tl.minimum(span * SPAN + SPAN, v), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        logits = _logits(hidden, weight, there, columns, v, d, scale, EVEN, ROWS, COLUMNS, INNER)
        top = tl.maximum(tl.max(logits, 1), LOWEST)
        above = logits - top[:, None]
        p = tl.exp(above)
        own = tl.sum(tl.where(columns[None, :] == known[:, None], logits, 0.0), 1)
        spread = tl.sum(tl.where(p > 0, p * above, 0.0), 1)
        found = _join(found, (top, tl.sum(p, 1), spread, own, tl.sum(p * p, 1)))
    own = found[3]
    if WHOLE:
        own = tl.where(known < 0, float("nan"), own)
    at = parts + span.to(tl.int64) * 5 * n + rows
    tl.store(at, found[0], rows < n)
    tl.store(at + n, found[1], rows < n)
    tl.store(at + 2 * n, found[2], rows < n)
    tl.store(at + 3 * n, own, rows < n)
    tl.store(at + 4 * n, found[4], rows < n)


@triton.jit(do_not_specialize=["n", "spans"])
def _join_kernel(parts: tl.tensor, joined: tl.tensor, n: tl.tensor, spans: tl.tensor, ROWS: tl.constexpr) -> None:
    """Join parts [spans, 5, n] to statistics [5, n]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    found = _nothing(ROWS)
    for span in range(spans):
        at = parts + tl.cast(span, tl.int64) * 5 * n + rows
        one = (
            tl.load(at, here, LOWEST),
            tl.load(at + n, here, 0.0),
            tl.load(at + 2 * n, here, 0.0),
            tl.load(at + 3 * n, here, 0.0),
            tl.load(at + 4 * n, here, 0.0),
        )
        found = _join(found, one)
    tl.store(joined + rows, found[0], here)
    tl.store(joined + n + rows, found[1], here)
    tl.store(joined + 2 * n + rows, found[2], here)
    tl.store(joined + 3 * n + rows, found[3], here)
    tl.store(joined + 4 * n + rows, found[4], here)


@triton.jit(do_not_specialize=["n", "first"])
def _gradient_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    targets: tl.tensor,
    kept: tl.tensor,
    grad: tl.tensor,
    n: tl.tensor,
    v: tl.tensor,
    d: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    EVEN: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Write the gradient of the logits, before the temperature, of columns from ``first`` on to grad [n, width], whose
    width COLUMNS divides: zeros from v on.

    kept: fp32 [5, n]: greatest logit, log of the total, entropy, incoming gradients of log-prob and entropy.
    """
    blocks = tl.cdiv(n, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    places = tl.program_id(0) // blocks * COLUMNS + tl.arange(0, COLUMNS)
    there = tl.minimum(rows, n - 1)
    target = tl.load(targets + there)
    greatest, log_total = tl.load(kept + there), tl.load(kept + n + there)
    incoming = tl.load(kept + 3 * n + there)
    columns = first + places
    logits = _logits(hidden, weight, there, columns, v, d, scale, EVEN, ROWS, COLUMNS, INNER)
    logp = logits - greatest[:, None] - log_total[:, None]
    p = tl.exp(logp)
    found = tl.where(columns[None, :] == target[:, None], incoming[:, None], 0.0) - p * incoming[:, None]
    if ENTROPY:
        entropy, of_entropy = tl.load(kept + 2 * n + there), tl.load(kept + 4 * n + there)
        found -= tl.where(p > 0, p * (logp + entropy[:, None]), 0.0) * of_entropy[:, None]
    at = grad + rows.to(tl.int64)[:, None] * width + places[None, :]
    tl.store(at, (found * scale).to(grad.dtype.element_ty), rows[:, None] < n)


# ---- calls ----


def _how(device: torch.device) -> dict[str, int]:
    return {"ROWS": SIZES.rows, "COLUMNS": SIZES.columns, "INNER": SIZES.inner, "num_warps": SIZES.warps,
            "num_stages": head_stages(shared_memory(device))}  # fmt: skip


def statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, whole: bool = True
) -> tuple[Tensor, Tensor]:
    """Return for each row the greatest logit m, fp32 [N], and sums fp32 [4, N] over its logits l.

    hidden: [N, d], weight: [V, d] of one dtype, targets: int64 [N], logits are hidden @ weight.T / temperature. Sums
    are of exp(l - m), of exp(l - m) (l - m), of the target's logit, of exp(2 (l - m)). A target that is not in [0, V)
    gives NaN, or without ``whole``, where other ranks have more columns, 0. A NaN among the logits is one in the first
    sum; of -inf the weight is 0.
    """
    (n, d), v = hidden.shape, len(weight)
    spans = -(-v // SIZES.span)
    parts = hidden.new_empty(spans, 5, n, dtype=torch.float32)
    joined = hidden.new_empty(5, n, dtype=torch.float32)
    if parts.numel():
        _part_kernel[(-(-n // SIZES.rows) * spans,)](
            hidden.contiguous(), weight.contiguous(), targets.contiguous(), parts, n, v, d, 1 / temperature,
            WHOLE=whole, EVEN=d % SIZES.inner == 0, SPAN=SIZES.span, **_how(hidden.device),
        )  # fmt: skip
    if n:
        _join_kernel[(-(-n // 128),)](parts, joined, n, spans, ROWS=128, num_warps=4)
    return joined[0], joined[1:]


def gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    kept: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    wanted: Sequence[bool],
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the wanted gradients of hidden, in its dtype, and of weight, in ``dtype``.

    kept: greatest logit, log of the total and entropy of each row, fp32 [N]; incoming: gradients of log-probs and
    entropies, None for zeros. Other arguments are those of ``statistics``; one-hot are targets in [0, V) alone.
    """
    (n, d), v = hidden.shape, len(weight)
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    grad_hidden = hidden.new_zeros(n, d, dtype=torch.float32) if wanted[0] else None
    grad_weight = (weight.new_empty if n else weight.new_zeros)(v, d, dtype=dtype) if wanted[1] else None
    numbers = torch.stack([*kept, *(torch.zeros_like(kept[0]) if x is None else x.float() for x in incoming)])
    width = gradient_columns(n, v, SIZES.columns)
    room = hidden.new_empty(n, width)
    for first in range(0, v if n else 0, max(width, 1)):
        some = slice(first, min(first + width, v))
        grad = room[:, : some.stop - first]
        blocks = -(-n // SIZES.rows) * -(-grad.shape[1] // SIZES.columns)
        _gradient_kernel[(blocks,)](
            hidden, weight, targets, numbers, grad, n, v, d, first, width, 1 / temperature,
            EVEN=d % SIZES.inner == 0, ENTROPY=incoming[1] is not None, **_how(hidden.device),
        )  # fmt: skip
        if grad_hidden is not None:
            grad_hidden += grad @ weight[some]
        if grad_weight is not None:
            grad_weight[some] = grad.T @ hidden
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight
