"""Ring attention: each rank keeps its queries, and the keys and values of the others visit it one rank at a time.

Results over parts of the keys are merged by their log-sum-exp, and the backward pass recomputes probabilities from the
log-sum-exp over all keys (Liu et al., arXiv 2310.01889). In step t a rank receives from rank r - t and sends to r + t,
directly, while it computes step t - 1; only keys that some query of the receiver sees are sent (``plan.context``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.core.device import to_device
from tilth.models.attention import bucket_lengths, matmul_pays
from tilth.models.logprobs import wide
from tilth.parallel.comm import Exchange, Members
from tilth.plan.context import WHOLE, AttentionTiles, ZigZag

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SCORES = 1 << 19
"""Scores that exist at a time: 2 MiB in fp32, so that element-wise work stays in the cache of a CPU."""
LARGE = 1024
"""Keys from which a tile is computed alone, without padding."""
QUERIES = 256
"""Queries of a block whose keys are cut to those that it sees."""


class _TileBlock(NamedTuple):
    """Queries and keys of a group computed at once: slices of its slots."""

    queries: slice
    keys: slice
    masked: bool


@dataclass(frozen=True)
class _TileGroup:
    """Tiles padded to one size. Index tensors are int64; slots count over all tiles of the group.

    query: [tiles, Q], local token of each slot of queries; key: [tiles, K], row of the keys; padding repeats the last.
    asked: slots of the real queries, and seen: of the real keys, each key in one slot.
    """

    query: Tensor
    key: Tensor
    asked: Tensor
    seen: Tensor
    at: Tensor
    """Positions of the queries [tiles, Q]."""
    key_at: Tensor
    """Positions of the keys [tiles, K]; a padding key has one after all queries."""
    sees: Literal["all", "earlier", ""]
    """Keys that a query sees in a group without padding: all, or those up to its own slot; "": others, or padding."""
    blocks: tuple[_TileBlock, ...]


class _RingStep(NamedTuple):
    """Exchange and work of one step; step 0 exchanges nothing."""

    to: int
    source: int
    sent: Tensor
    """Local tokens whose keys and values are sent."""
    received: int
    """Tokens whose keys and values are received."""
    groups: tuple[_TileGroup, ...]


class RingPlan:
    """Steps of attention over one packed batch with one window, on one rank."""

    def __init__(self, division: ZigZag, rank: int, window: int | None, heads: int, device: torch.device) -> None:
        """heads: query heads of this rank, which bound the size of a block."""
        self.steps: list[_RingStep] = []
        ranks, every = division.ranks, division.sent(window)
        positions = [division.positions(r) for r in range(ranks)]
        for t in range(ranks):
            to, source = (rank + t) % ranks, (rank - t) % ranks
            if t and not any(every[r, (r + t) % ranks] for r in range(ranks)):
                continue
            tiles = division.tiles(rank, source, window)
            needed = tiles.needed if t else np.arange(len(positions[rank]))
            if t:  # rows of what was received
                tiles = tiles._replace(key=np.cumsum(tiles.keys) - tiles.keys)
            sent = division.tiles(to, rank, window).needed if t else np.zeros(0, np.int64)
            groups = _groups(tiles, positions[rank], positions[source][needed], window, heads, device)
            self.steps.append(_RingStep(to, source, _tensor(sent, device), len(needed), tuple(groups)))


def _groups(
    tiles: AttentionTiles, at: np.ndarray, key_at: np.ndarray, window: int | None, heads: int, device: torch.device
) -> Iterator[_TileGroup]:
    """Yield tiles in groups. at, key_at: positions of all queries and keys."""
    large = np.flatnonzero(tiles.keys >= LARGE)
    small = np.flatnonzero(tiles.keys < LARGE)
    padded = bucket_lengths(tiles.queries[small]), bucket_lengths(tiles.keys[small])
    some = [small[(padded[0] == q) & (padded[1] == k)] for q in np.unique(padded[0]) for k in np.unique(padded[1])]
    for members in [*some, *(large[i : i + 1] for i in range(len(large)))]:
        if len(members):
            yield _group(AttentionTiles(*(x[members, None] for x in tiles)), at, key_at, window, heads, device)


def _group(
    t: AttentionTiles, at: np.ndarray, key_at: np.ndarray, window: int | None, heads: int, device: torch.device
) -> _TileGroup:
    """t: columns [tiles, 1]."""
    i, j = np.arange(t.queries.max()), np.arange(t.keys.max())
    query, key = t.query + np.minimum(i, t.queries - 1), t.key + np.minimum(j, t.keys - 1)
    places, key_places = at[query], np.where(j < t.keys, key_at[key], WHOLE)
    blocks = tuple(_blocks(places, key_places, window, heads))
    tables = query, key, np.flatnonzero(i < t.queries), np.flatnonzero(j < t.keys), places, key_places
    query_slots, key_slots, asked, seen, query_at, keys_at = (_tensor(x, device) for x in tables)
    causal, padded = window is None and np.array_equal(places, key_places), (t.queries < len(i)).any()
    others = padded or any(block.masked for block in blocks)
    sees: Literal["all", "earlier", ""] = "earlier" if causal else "" if others else "all"
    return _TileGroup(query_slots, key_slots, asked, seen, query_at, keys_at, sees, blocks)


def _blocks(at: np.ndarray, key_at: np.ndarray, window: int | None, heads: int) -> Iterator[_TileBlock]:
    """Yield blocks of at most ``SCORES`` scores, each with the keys that one of its queries sees."""
    width, keys = WHOLE if window is None else window, key_at.shape[1]
    whole = key_at.max() <= at.min() and at.max() - key_at.min() < width
    rows = max(16, SCORES // (len(at) * heads * keys))
    rows = rows if whole else min(rows, QUERIES)
    for start in range(0, at.shape[1], rows):
        some = slice(start, min(start + rows, at.shape[1]))
        first, last = at[:, some].min(1), at[:, some].max(1)
        sees = ((key_at <= last[:, None]) & (first[:, None] - key_at < width)).any(0)
        begin, end = int(sees.argmax()), keys - int(sees[::-1].argmax())
        inside = key_at[:, begin:end]
        masked = not (inside.max() <= first.min() and last.max() - inside.min() < width)
        yield _TileBlock(some, slice(begin, end), bool(masked))


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return to_device([values.astype(np.int64, copy=False)], device)[0]


# ---- one group: [tiles x key heads, query heads of each x queries, head_dim] ----


def _mask(group: _TileGroup, block: _TileBlock, window: int | None) -> Tensor:
    """Return bool [tiles, 1, 1, queries, keys], True where a query does not see a key."""
    apart = group.at[:, block.queries, None] - group.key_at[:, None, block.keys]
    hidden = apart < 0 if window is None else (apart < 0) | (apart >= window)
    return hidden[:, None, None]


def _scores(q: Tensor, k: Tensor, group: _TileGroup, block: _TileBlock, window: int | None) -> Tensor:
    """Return scores [tiles x key heads, heads of each x queries, keys]. q: [tiles, key heads, heads, queries, hd]."""
    tiles, kv_heads, repeats, queries, hd = q.shape
    scores = torch.bmm(q.reshape(tiles * kv_heads, repeats * queries, hd), k.transpose(1, 2))
    if block.masked:
        shaped = scores.view(tiles, kv_heads, repeats, queries, -1)
        shaped.masked_fill_(_mask(group, block, window), -torch.inf)
    return scores


def _queries(x: Tensor, group: _TileGroup, kv_heads: int) -> Tensor:
    """Return the rows of x [N, heads, ...] in the slots of queries: [tiles, key heads, heads of each, Q, ...]."""
    tiles, slots = group.query.shape
    rows = x.index_select(0, group.query.flatten()).unflatten(0, (tiles, slots))
    return rows.unflatten(2, (kv_heads, -1)).movedim(1, 3)


def _keys(kv: Tensor, group: _TileGroup) -> tuple[Tensor, Tensor]:
    """Return keys and values [tiles x key heads, K, hd] of kv [N, 2, key heads, hd]."""
    tiles, slots = group.key.shape
    both = kv.index_select(0, group.key.flatten()).unflatten(0, (tiles, slots)).permute(2, 0, 3, 1, 4).flatten(1, 2)
    return both[0].contiguous(), both[1].contiguous()


def _fused(group: _TileGroup, x: Tensor) -> bool:
    """Return True if torch's fused kernel for CPUs takes the group and is faster (up to 3 times, measured)."""
    return bool(group.sees) and not matmul_pays(group.key.shape[1], x.dtype, x.device) and x.device.type == "cpu"


def _repeated(x: Tensor, repeats: int, tiles: int) -> Tensor:
    """Return keys or values [tiles x key heads, K, hd] for each query head: [tiles, heads, K, hd]."""
    return x.unflatten(0, (tiles, -1)).repeat_interleave(repeats, 1)


def _attend(q: Tensor, kv: Tensor, group: _TileGroup, window: int | None) -> tuple[Tensor, Tensor]:
    """Attend with scaled queries [N, heads, hd] over the keys of a group: ([asked, heads, hd], lse [asked, heads])."""
    kv_heads, kind = kv.shape[2], wide(q.dtype)
    asked, (k, v) = _queries(q, group, kv_heads), _keys(kv, group)
    tiles, _, repeats, slots, hd = asked.shape
    out = asked.new_empty(asked.shape, dtype=kind)
    lse = asked.new_empty(asked.shape[:-1], dtype=kind)
    if fused := _fused(group, q):
        both = (_repeated(x, repeats, tiles) for x in (k, v))
        found, sums = _flash(asked.flatten(1, 2), *both, 0.0, group.sees == "earlier", scale=1.0)
        out, lse = found.view(out.shape).to(kind), sums.view(lse.shape).to(kind)
    for block in group.blocks if not fused else ():
        scores = _scores(asked[:, :, :, block.queries], k[:, block.keys], group, block, window)
        found = torch.softmax(scores, -1, dtype=kind)
        shape = (tiles, kv_heads, repeats, -1)
        lse[:, :, :, block.queries] = (scores.amax(-1).to(kind) - found.amax(-1).log_()).view(shape)
        mixed = torch.bmm(found.to(v.dtype), v[:, block.keys])
        out[:, :, :, block.queries] = mixed.view(*shape, hd).to(kind)
    flat = out.permute(0, 3, 1, 2, 4).reshape(tiles * slots, kv_heads * repeats, hd)
    flat_lse = lse.permute(0, 3, 1, 2).reshape(tiles * slots, kv_heads * repeats)
    return flat[group.asked], flat_lse[group.asked]


class _Saved(NamedTuple):
    """Inputs of the backward pass of one rank's queries, [N, heads, ...] each."""

    q: Tensor
    """Scaled."""
    grad: Tensor
    lse: Tensor
    """Over all keys."""
    delta: Tensor
    """Sum of output times its gradient."""
    out: Tensor


def _attend_backward(saved: _Saved, kv: Tensor, group: _TileGroup, window: int | None, dq: Tensor, dkv: Tensor) -> None:
    """Add the gradients of scaled queries to dq [N, heads, hd], write those of the group's keys to dkv [keys, 2, ...].

    With p = exp(score - lse): dv = p^T do, ds = p (do v^T - delta), dq = ds k, dk = ds^T q.
    """
    kv_heads = kv.shape[2]
    q, lse = (_queries(x, group, kv_heads) for x in (saved.q, saved.lse))
    k, v = _keys(kv, group)
    tiles, _, repeats, slots, hd = q.shape
    if _fused(group, q):
        _fused_backward(saved, k, v, group, dq, dkv)
        return
    real = torch.zeros(tiles * slots, dtype=torch.bool, device=q.device)
    real[group.asked] = True
    real = real.view(tiles, 1, 1, slots)  # nothing flows from padding
    grad, delta = _queries(saved.grad, group, kv_heads) * real[..., None], _queries(saved.delta, group, kv_heads) * real
    found, of_keys = torch.zeros_like(q, dtype=dq.dtype), torch.zeros(2, *k.shape, dtype=dkv.dtype, device=q.device)
    for block in group.blocks:
        some, keys, values = block.queries, k[:, block.keys], v[:, block.keys]
        rows, incoming = (x[:, :, :, some].reshape(tiles * kv_heads, -1, hd) for x in (q, grad))
        total, apart = (x[:, :, :, some].reshape(tiles * kv_heads, -1, 1) for x in (lse, delta))
        p = (_scores(q[:, :, :, some], keys, group, block, window).to(total.dtype) - total).exp_()
        of_keys[1][:, block.keys] += torch.bmm(p.to(v.dtype).transpose(1, 2), incoming)
        ds = (p * (torch.bmm(incoming, values.transpose(1, 2)) - apart)).to(q.dtype)
        found[:, :, :, some] = torch.bmm(ds, keys).view(tiles, kv_heads, repeats, -1, hd).to(dq.dtype)
        of_keys[0][:, block.keys] += torch.bmm(ds.transpose(1, 2), rows)
    flat = found.permute(0, 3, 1, 2, 4).reshape(tiles * slots, kv_heads * repeats, hd)
    dq.index_add_(0, group.query.flatten()[group.asked], flat[group.asked])
    slots_of_keys = of_keys.view(2, tiles, kv_heads, -1, hd).permute(1, 3, 0, 2, 4).flatten(0, 1)
    dkv.index_copy_(0, group.key.flatten()[group.seen], slots_of_keys[group.seen])


def _fused_backward(saved: _Saved, k: Tensor, v: Tensor, group: _TileGroup, dq: Tensor, dkv: Tensor) -> None:
    """Do the work of ``_attend_backward`` for a group without padding by torch's kernel, given its keys and values."""
    rows, (tiles, slots), kv_heads = group.query.flatten(), group.query.shape, dkv.shape[2]
    q, grad, out, lse = (
        x.index_select(0, rows).unflatten(0, (tiles, slots)).transpose(1, 2)
        for x in (saved.q, saved.grad, saved.out, saved.lse)
    )
    repeats = q.shape[1] // kv_heads
    both = (_repeated(x, repeats, tiles) for x in (k, v))
    causal = group.sees == "earlier"
    found = _flash_backward(grad, q, *both, out, lse.contiguous(), 0.0, causal, scale=1.0)
    dq.index_add_(0, rows, found[0].transpose(1, 2).flatten(0, 1).to(dq.dtype))
    of_keys = torch.stack([x.to(dkv.dtype).unflatten(1, (kv_heads, repeats)).sum(2) for x in found[1:]], 1)
    dkv.index_copy_(0, group.key.flatten(), of_keys.permute(0, 3, 1, 2, 4).flatten(0, 1))


# ---- all steps ----


class _Visits:
    """Keys and values of the other members, one step after another; the next ones travel meanwhile."""

    def __init__(self, kv: Tensor, plan: RingPlan, members: Members) -> None:
        self.kv, self.steps, self.members = kv, plan.steps, members

    def __iter__(self) -> Iterator[tuple[_RingStep, Tensor]]:
        """Yield each step with keys and values [tokens, 2, key heads, hd]."""
        kv, coming = self.kv, self._ask(1)
        for number, step in enumerate(self.steps):
            if coming is not None and number:
                found = coming.wait()
                assert found is not None
                kv, coming = found, self._ask(number + 1)
            yield step, kv

    def _ask(self, number: int) -> Exchange | None:
        if number >= len(self.steps):
            return None
        step = self.steps[number]
        room = self.kv.new_empty(step.received, *self.kv.shape[1:])
        return Exchange(self.members, [(step.to, self.kv.index_select(0, step.sent))], [(step.source, room)])


def _visits_back(
    kv: Tensor, dkv: Tensor, plan: RingPlan, members: Members
) -> Iterator[tuple[_RingStep, Tensor, Tensor]]:
    """Yield each step with keys and values, and zeros for their gradients. What is added to these then goes back to
    where the keys and values came from; all that is of this rank is added to ``dkv``."""
    back: tuple[_RingStep, Exchange] | None = None
    for number, (step, visitor) in enumerate(_Visits(kv, plan, members)):
        theirs = dkv if number == 0 else torch.zeros_like(visitor, dtype=dkv.dtype)
        yield step, visitor, theirs
        _add(dkv, back)
        if number:
            room = theirs.new_empty(len(step.sent), *theirs.shape[1:])
            back = step, Exchange(members, [(step.source, theirs)], [(step.to, room)])
    _add(dkv, back)


def pass_around(kv: Tensor, plan: RingPlan, members: Members) -> None:
    """Send what both passes of attention of one layer send, without attention: for a measure of its time.

    kv: [n, 2, key heads, hd]. Every member calls it.
    """
    for _ in _Visits(kv, plan, members):
        pass
    for _ in _visits_back(kv, torch.zeros_like(kv, dtype=wide(kv.dtype)), plan, members):
        pass


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: RingPlan,
        window: int | None,
        members: Members,
    ) -> Tensor:
        kind, scaled, kv = wide(q.dtype), q * q.shape[-1] ** -0.5, torch.stack((k, v), 1)
        out = torch.zeros_like(q, dtype=kind)
        begin = torch.full(q.shape[1:2], -torch.inf, dtype=kind, device=q.device) if sinks is None else sinks.to(kind)
        lse = begin.expand(q.shape[:-1]).clone()
        for step, visitor in _Visits(kv, plan, members):
            for tiles in step.groups:
                _merge(out, lse, tiles.query.flatten()[tiles.asked], *_attend(scaled, visitor, tiles, window))
        found = out.to(q.dtype)
        ctx.save_for_backward(scaled, kv, found, lse, sinks)
        ctx.plan, ctx.window, ctx.members = plan, window, members
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        kind = lse.dtype
        saved = _Saved(q, grad, lse, (grad.to(kind) * out.to(kind)).sum(-1), out)
        dq, dkv = torch.zeros_like(q, dtype=kind), torch.zeros_like(kv, dtype=kind)
        for step, visitor, theirs in _visits_back(kv, dkv, ctx.plan, ctx.members):
            for tiles in step.groups:
                _attend_backward(saved, visitor, tiles, ctx.window, dq, theirs)
        dk, dv = dkv.to(q.dtype).unbind(1)
        ds = None if sinks is None else -((sinks.to(kind) - lse).exp_() * saved.delta).sum(0).to(sinks.dtype)
        return (dq * q.shape[-1] ** -0.5).to(q.dtype), dk, dv, ds, None, None, None


def _add(dkv: Tensor, back: tuple[_RingStep, Exchange] | None) -> None:
    """Add gradients that come back for keys and values that were sent."""
    if back is not None:
        found = back[1].wait()
        assert found is not None
        dkv.index_add_(0, back[0].sent, found)


def _merge(out: Tensor, lse: Tensor, rows: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys into rows of out [N, heads, hd] and lse [N, heads]."""
    before = lse[rows]
    both = torch.logaddexp(before, part_lse)
    lse[rows] = both
    out[rows] = out[rows] * (before - both).exp_()[..., None] + part * (part_lse - both).exp_()[..., None]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, window: int | None, members: Members, sinks: Tensor | None = None
) -> Tensor:
    """Attend with this rank's queries [n, heads, hd] over the keys and values [n, key heads, hd] of all members.

    sinks: [heads], a logit without value of each query; their gradient is this rank's part. Every member calls it, also
    one without tokens. Differentiable once.
    """
    return _RingAttention.apply(q, k, v, sinks, plan, window, members)
