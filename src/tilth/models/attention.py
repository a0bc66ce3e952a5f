"""Attention by context object: what a decoder calls to mix tokens, and the context of packed whole sequences.

A decoder sees flat tokens; the context decides which tokens attend to which. ``PackedContext`` holds whole sequences
(training, scoring); the rollout engine has another over its KV cache. Both use ``matmul_attention`` for short sequences
on a CPU, and in parity mode at any length, with the products of ``models.steady`` in fp32 (oneDNN's in bf16 take other
kernels by the number of keys) and key lengths in multiples of 16, so that they agree bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.device import has_products, to_device
from tilth.core.random import dropout_mask, stream
from tilth.models.logprobs import wide
from tilth.models.moe import ExpertContext
from tilth.models.rows import pad_rows, take_rows
from tilth.models.steady import steady_scores, steady_values
from tilth.plan.kernels import CAUSAL_UP_TO, FLASH_WIDTH, KEYS, MASKED_UP_TO

_GROUP_TOKENS = 2048
"""Padding tokens that cost as much as one more group of sequences (a dozen kernels per layer)."""


@dataclass(frozen=True)
class DropoutContext:
    """Random numbers of dropout. Residual stream: stream (seed, "dropout", layer, branch, step) at ``tokens``."""

    seed: int
    step: int
    tokens: Tensor
    """int64 [N], index of each token in the whole batch of the step, independent of packing."""

    def apply(self, x: Tensor, p: float, layer: int, branch: str) -> Tensor:
        """Zero a share p of x [N, width] and scale the rest by 1 / (1 - p). Rows past N stay."""
        numbers = stream(self.seed, "dropout", layer, branch, self.step)
        return self._dropped(x, dropout_mask(numbers, self.tokens, x.shape[1], p), p)

    def apply_columns(self, x: Tensor, p: float, name: str, first: int, width: int) -> Tensor:
        """``apply`` to the columns from ``first`` on of the input, [N, width] as a whole, of an adapter: stream
        (seed, "dropout", name, step)."""
        keep = dropout_mask(stream(self.seed, "dropout", name, self.step), self.tokens, width, p)
        return self._dropped(x, keep[:, first : first + x.shape[1]], p)

    def _dropped(self, x: Tensor, keep: Tensor, p: float) -> Tensor:
        n = self.tokens.shape[0]
        scale = keep.to(x.dtype).mul_(1 / (1 - p))
        return x * (scale if n == x.shape[0] else F.pad(scale, (0, 0, 0, x.shape[0] - n), value=1.0))


class CacheSlots(NamedTuple):
    """Places in the cache of a layer, to which a kernel may write the keys and values of new tokens."""

    keys: Tensor
    """[..., heads, width], as ``values``."""
    values: Tensor
    slots: Tensor
    """int64 [T], of each new token among all slots."""


class AttentionContext(Protocol):
    """Positions, dropout, attention and experts of the tokens of one forward pass."""

    experts: ExpertContext | None
    """Dispatch, record and replay of layers with experts (``models.moe``); None: the local dispatch alone."""

    @property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, int64 [N]."""

    @property
    def dropout(self) -> DropoutContext | None:
        """Random numbers of dropout; None: no dropout."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with q [N, Hq, hd] over k [N, Hkv, hd] (rotated already), scaled by hd**-0.5, and v [N, Hkv, vd]:
        [N, Hq, vd].

        window: number of tokens that a token sees, itself included; None: all before it. sinks: [Hq], a logit of each
        head that takes part in the softmax and has no value; passed only by layers that have them.
        """


def matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None, *, parity: bool = False
) -> Tensor:
    """Compute softmax(q k^T / sqrt(hd) + mask) v by plain matmuls; the softmax is fp32 inside.

    q: [B, Hkv, G, Tq, hd], k: [B, Hkv, Tk, hd], v: [B, Hkv, Tk, vd]. mask: [B or 1, 1, 1, Tq, Tk], added to the scores
    (in q's dtype) or bool (True: visible); None: all visible. sinks: [Hkv * G], see ``AttentionContext.attend``. A row
    without any visible key or sink gives NaN. parity: a row has the same bits with any number of rows beside it and of
    masked keys behind it; products are in fp32 at least.
    Returns [B, Hkv, G, Tq, vd] in q's dtype.
    """
    b, kv_heads, g, tq, hd = q.shape
    tk, width, dtype = k.shape[2], v.shape[3], q.dtype
    if parity:
        q, k, v = (x.to(wide(dtype)) for x in (q, k, v))
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    # Scaled before the product: MKL applies a factor before or after it by shape, so bits would depend on the rows.
    rows = (q * hd**-0.5).reshape(b * kv_heads, g * tq, hd)
    keys, values = k.reshape(b * kv_heads, tk, hd), v.reshape(b * kv_heads, tk, width)
    if mask is not None and mask.shape[0] == 1 and not parity:
        base = mask.expand(1, 1, g, tq, tk).reshape(1, g * tq, tk).expand(b * kv_heads, -1, -1)
        scores = torch.baddbmm(base, rows, keys.transpose(1, 2))
    else:
        scores = steady_scores(rows, keys) if parity else torch.bmm(rows, keys.transpose(1, 2))
        if mask is not None:  # out of place: autograd answers an addition into a view with copies of the gradient
            scores = (scores.view(b, kv_heads, g, tq, tk) + mask).view(b * kv_heads, g * tq, tk)
    # Sinks as the engine holds them, in the compute dtype; a trainer's are fp32.
    weights = torch.softmax(scores, -1) if sinks is None else _softmax_with(scores, sinks.to(dtype), b, tq)
    mixed = (steady_values if parity else torch.bmm)(weights, values)
    return mixed.reshape(b, kv_heads, g, tq, width).to(dtype)


def _softmax_with(scores: Tensor, sinks: Tensor, b: int, tq: int) -> Tensor:
    """Return softmax of scores [B * Hkv, G * Tq, Tk] and a sink of each head, without the sink's own weight. The sink
    stands before the keys, in as many columns as leave their alignment: the bits of a row then do not depend on the
    number of masked keys behind it."""
    column = sinks.to(scores.dtype).view(1, -1, 1).expand(b, -1, tq).reshape(*scores.shape[:2], 1)
    column = F.pad(column, (0, KEYS - 1), value=-torch.inf)
    return torch.softmax(torch.cat((column, scores), -1), -1)[..., KEYS:]


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Compute ``matmul_attention`` by torch's fused kernels. mask None: causal."""
    b, kv_heads, g, tq, hd = q.shape
    mask = None if mask is None else mask[:, 0]
    k, v = (x[:, :, None].expand(b, kv_heads, g, *x.shape[2:]).flatten(1, 2) for x in (k, v))
    q, width = q.reshape(b, kv_heads * g, tq, hd), v.shape[3]
    if sinks is not None:
        mask = causal_mask(tq, None, q.dtype, q.device)[:, 0] if mask is None else mask
        q, k, v, mask = _sink_as_key(q, k, v, mask, sinks)
    v = as_wide(v, q)
    scale = None if q.shape[3] == hd else hd**-0.5
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[..., :width].reshape(b, kv_heads, g, tq, width)


def as_wide(v: Tensor, q: Tensor) -> Tensor:
    """Pad values with zeros to the width of queries, as fused kernels need them."""
    spare = q.shape[-1] - v.shape[-1]
    return F.pad(v, (0, spare)) if spare else v


def _sink_as_key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a first key without value to which each head's queries have the score of its sink: fused kernels take none.
    q: [B, H, Tq, hd], k and v: [B, H, Tk, ...]. Heads become wider, by a multiple that kernels like; the scale stays
    hd**-0.5."""
    extra, heads = 8, q.shape[1]
    column = (sinks.to(q.dtype) * q.shape[3] ** 0.5).view(1, heads, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat((F.pad(q, (0, extra - 1)), column), 3)
    key = torch.zeros_like(k[:, :, :1])
    key = torch.cat((F.pad(key, (0, extra - 1)), torch.ones_like(key[..., :1])), 3)
    k = torch.cat((key, F.pad(k, (0, extra))), 2)
    return q, k, F.pad(v, (0, 0, 1, 0)), F.pad(mask, (1, 0))


def varlen_serves(q: Tensor) -> bool:
    """Return True if flash attention takes packed tokens without padding and masks: one kernel per layer."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= FLASH_WIDTH
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and fits and has_products(q.device)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], window: int | None
) -> Tensor:
    """Attend with packed queries q [N, Hq, hd] over packed keys [M, Hkv, ...]: [N, Hq, vd].

    ends: cumulative lengths int32 [n + 1] of queries and of keys; longest: of each. A sequence's last query sees all
    of its keys, the one before it all but one, and so on.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch.compile, which takes a second

    repeats, width = q.shape[1] // k.shape[1], v.shape[2]
    how: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if repeats > 1 and torch.__version__ >= "2.12":
        how["enable_gqa"] = True
    elif repeats > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    found = varlen_attn(q, k, as_wide(v, q), *ends, *longest, **how)
    return (found if isinstance(found, Tensor) else found[0])[..., :width]


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    pages: Tensor,
    lengths: Tensor,
    window: int | None,
) -> Tensor:
    """Attend with packed queries q [N, Hq, hd] over keys and values in pages [P, size, Hkv, hd]: [N, Hq, hd].

    ends, longest, window: of ``varlen_attention``. pages: int32 [n, most], those of each sequence in order; lengths:
    int32 [n], its keys. The bits of a sequence do not depend on the others.
    """
    from torch.nn.attention.varlen import varlen_attn

    # One query sees all keys without a mask, and without one the kernel takes heads that share keys together.
    sees = (-1, -1) if window is None and longest[0] == 1 else (-1 if window is None else window - 1, 0)
    how: dict[str, Any] = {"window_size": sees, "enable_gqa": q.shape[1] != keys.shape[2]}
    # One split of the keys: how many there are else depends on the batch, and torch 2.13 joins them wrongly (its issue
    # 194167).
    found = varlen_attn(q, keys, values, *ends, *longest, seqused_k=lengths, block_table=pages, num_splits=1, **how)
    return found if isinstance(found, Tensor) else found[0]


def matmul_pays(length: int, dtype: torch.dtype, device: torch.device, causal: bool = False) -> bool:
    """Return True if plain matmuls are faster than SDPA for keys of this length, with a mask or causal."""
    return device.type == "cpu" and length <= (CAUSAL_UP_TO if causal else MASKED_UP_TO).get(dtype.itemsize, 0)


def causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return an additive mask [1, 1, 1, length, length]: 0 where query i sees key j (i - window < j <= i), else
    -inf."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    if window is not None and window < length:
        visible.triu_(1 - window)
    return torch.zeros(1, 1, 1, length, length, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)


def bucket_lengths(lengths: np.ndarray, whole: bool = False) -> np.ndarray:
    """Return the padded length of each sequence, int64 [n], at most 25 % (or 16 tokens) longer, in few groups.

    Neighbouring buckets are merged while that adds less padding than another group of kernels costs. whole: every
    padded length is a multiple of 16, also the longest.
    """
    if not len(lengths):
        return lengths
    step = np.maximum(16, 2 ** np.log2(np.maximum(lengths, 1)).astype(np.int64) // 4)
    wanted = -(-lengths // step) * step
    wanted = wanted if whole else np.minimum(wanted, lengths.max())
    edges, counts = np.unique(wanted, return_counts=True)
    target = edges.copy()
    for i in range(len(edges) - 2, -1, -1):
        if counts[i] * (target[i + 1] - edges[i]) < _GROUP_TOKENS:
            target[i] = target[i + 1]
    return target[np.searchsorted(edges, wanted)]


@dataclass(frozen=True)
class _PaddedGroup:
    """Sequences padded to one length, in slots ``start`` to ``start + count * length`` of the padded layout."""

    start: int
    count: int
    length: int


class PackedContext:
    """Whole sequences, packed one after another; a token sees only its own sequence.

    lengths: int64 [n] (any integer sequence). parity: agree bit for bit with cached decoding on a CPU, by plain matmuls
    at any length.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray | Tensor,
        device: torch.device | str = "cpu",
        parity: bool = False,
        dropout: DropoutContext | None = None,
        experts: ExpertContext | None = None,
    ) -> None:
        self.parity, self.dropout = parity, dropout
        self.experts = experts or (ExpertContext(parity=True) if parity else None)
        self.device = torch.device(device)
        table = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths, np.int64)
        self.tokens = int(table.sum())
        self._lengths = table[table > 0]
        starts = np.cumsum(self._lengths) - self._lengths
        place = np.arange(self.tokens) - np.repeat(starts, self._lengths)
        self._masks: dict[tuple[_PaddedGroup, int | None, torch.dtype], Tensor] = {}
        source, slot = self._plan(starts, place)
        ends = np.append(0, np.cumsum(self._lengths)).astype(np.int32)
        tables: list[np.ndarray] = [place, np.repeat(self._lengths, self._lengths), ends, slot, *source]
        self.positions, self.extents, self._ends, self._slot, *own = to_device(tables, self.device)
        self._source = own[0] if own else None

    def _plan(self, starts: np.ndarray, place: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Set groups; return the token of each slot of the padded layout, none if it is the packed one, and the slot
        of each token."""
        padded = bucket_lengths(self._lengths, self.parity)
        self._groups: list[_PaddedGroup] = []
        sources, slot_start, at = [], np.zeros(len(padded), np.int64), 0
        for length in np.unique(padded):
            members = np.flatnonzero(padded == length)
            inside = np.minimum(np.arange(length), self._lengths[members, None] - 1)
            sources.append((starts[members, None] + inside).ravel())
            slot_start[members] = at + np.arange(len(members)) * length
            self._groups.append(_PaddedGroup(at, len(members), int(length)))
            at += len(members) * int(length)
        aligned = len(self._groups) == 1 and at == len(place)
        source = [] if aligned or not sources else [np.concatenate(sources)]
        return source, np.repeat(slot_start, self._lengths) + place

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        if not self._groups:  # the projections have a gradient as on other ranks
            given = (q, k, v) if sinks is None else (q, k, v, sinks)
            return q.new_empty(*q.shape[:2], v.shape[2]) + sum(x.sum() for x in given)
        if sinks is None and varlen_serves(q) and not self.parity:
            longest = int(self._lengths.max())
            return varlen_attention(q, k, v, (self._ends, self._ends), (longest, longest), window)
        if self._source is not None:
            q, k, v = (pad_rows(x, self._source, self._slot) for x in (q, k, v))
        parts = []
        for group in self._groups:
            some = slice(group.start, group.start + group.count * group.length)
            parts.append(self._attend_group(group, q[some], k[some], v[some], window, sinks))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self._source is None else take_rows(out, self._slot)

    def _attend_group(
        self, group: _PaddedGroup, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        b, t, kv_heads, hd = group.count, group.length, k.shape[1], k.shape[2]
        window = None if window is None or window >= t else window
        heads_first = q.view(b, t, kv_heads, -1, hd).permute(0, 2, 3, 1, 4)
        k, v = (x.view(b, t, kv_heads, -1).transpose(1, 2) for x in (k, v))
        causal = self._causal(window)
        if (self.parity and self.device.type == "cpu") or matmul_pays(t, q.dtype, self.device, causal):
            out = matmul_attention(heads_first, k, v, self._mask(group, window, q.dtype), sinks, parity=self.parity)
        else:
            out = sdpa_attention(heads_first, k, v, None if causal else self._mask(group, window, q.dtype), sinks)
        return out.permute(0, 3, 1, 2, 4).reshape(*q.shape[:2], -1)

    def _causal(self, window: int | None) -> bool:
        """Return True if a token sees all earlier tokens of its sequence, so that kernels need no mask."""
        return window is None

    def _mask(self, group: _PaddedGroup, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [1 or sequences of the group, 1, 1, length, length], cached for all layers."""
        key = (group, window, dtype)
        if key not in self._masks:
            self._masks[key] = causal_mask(group.length, window, dtype, self.device)
        return self._masks[key]
