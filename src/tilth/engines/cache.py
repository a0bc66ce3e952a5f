"""KV cache of a device: rows of contiguous slots, a store of shared prefixes, and the attention context over it.

A cache holds one K and one V tensor per layer, [rows, kv_heads, capacity, head_dim] (gathering by block table is 8
times slower on a CPU; one stacked tensor made a compiled step 35 times slower). Values beyond a row's length are
finite and masked.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.device import to_device
from tilth.engines.branches import Branches
from tilth.engines.pages import PagedRows
from tilth.models.attention import matmul_attention
from tilth.models.config import DecoderConfig
from tilth.models.moe import ExpertContext
from tilth.plan.kernels import ROWS, grown


class _Buffers:
    """Storage of ``count`` tensors of one shape, and a spare: each tensor moves into what the one before it left."""

    def __init__(self, count: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.width, self._dtype, self._device = count, width, dtype, device
        self.every = [self._zeros(0) for _ in range(count + 1)]
        self.tensors: list[Tensor] = []

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self._dtype, device=self._device)

    def layout(self, rows: int, heads: int, capacity: int, keep_rows: int, keep_tokens: int) -> list[Tensor]:
        """Return the tensors [rows, heads, capacity, width], with what is kept of them."""
        need = rows * capacity * heads * self.width
        larger = self.every[0].numel() < need
        size, spare = grown(self.every[0].numel(), need), self.every[-1]
        found = []
        for i, old in enumerate(self.tensors or self.every[:-1]):
            buffer = self._zeros(size) if larger else spare
            new = buffer[:need].view(rows, heads, capacity, self.width)
            if keep_rows:
                new[:keep_rows, :, :keep_tokens].copy_(old[:keep_rows, :, :keep_tokens])
            found.append(new)
            spare, self.every[i] = self.every[i], buffer
        self.every[-1] = self._zeros(size) if larger else spare
        self.tensors = found
        return found


class KVCache:
    """Dense KV of ``rows`` sequences of up to ``capacity`` tokens each, laid out again to grow.

    Dense, because batched matmul on a CPU copies other layouts (8 times slower on a slice of the slots). Keys and
    values of one width share a spare buffer.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        routing: bool = False,
        latent: bool = False,
    ) -> None:
        """routing: keep the experts of each token beside its keys; latent: see ``DecoderConfig.cached``."""
        self._heads, *widths = config.cached(latent)
        self._layers, self._device, self._width = config.num_layers, device, widths[1]
        self.shared = latent and config.latents
        """Values are the beginning of keys, in the same storage."""
        self._chosen = len(config.expert_layers) * config.experts_per_token if routing else 0
        self._routes = torch.uint8 if config.num_experts < torch.iinfo(torch.uint8).max else torch.int16
        widths = widths[:1] if self.shared else widths
        kinds = {width: self._layers * widths.count(width) for width in widths}
        self._parts = [_Buffers(count, width, dtype, device) for width, count in kinds.items()]
        self.rows = self.capacity = self.layouts = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.routing: list[Tensor] = []
        """Experts of each token, [rows, 1, capacity, layers with experts * k]; empty: not kept."""
        self.layout(0, 0)

    @property
    def _buffers(self) -> list[Tensor]:
        return [buffer for part in self._parts for buffer in part.every]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in (*self._buffers, *self.routing))

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that the cache keeps of tokens: [rows, heads, capacity, width] each."""
        return [*self.keys, *(() if self.shared else self.values), *self.routing]

    @property
    def kinds(self) -> list[tuple[int, int, torch.dtype]]:
        """Heads, width and dtype of each of ``tensors``."""
        return [(tensor.shape[1], tensor.shape[3], tensor.dtype) for tensor in self.tensors]

    def layout(self, rows: int, capacity: int, keep_rows: int = 0, keep_tokens: int = 0) -> None:
        """Change the shape; keep the first ``keep_tokens`` of the first ``keep_rows``. Other values are finite."""
        found = [
            tensor
            for part in self._parts
            for tensor in part.layout(rows, self._heads, capacity, keep_rows, keep_tokens)
        ]
        self.keys, self.values = found[: self._layers], found[self._layers :]
        self.values = [keys[..., : self._width] for keys in self.keys] if self.shared else self.values
        if self._chosen:
            new = torch.zeros(rows, 1, capacity, self._chosen, dtype=self._routes, device=self._device)
            for old in self.routing if keep_rows else ():
                new[:keep_rows, :, :keep_tokens].copy_(old[:keep_rows, :, :keep_tokens])
            self.routing = [new]
        self.rows, self.capacity, self.layouts = rows, capacity, self.layouts + 1

    def bind(self, row: int, blocks: Sequence[int]) -> None:
        """Do nothing: a row has slots of its own, whatever its blocks."""

    def tables(self, rows: int) -> list[np.ndarray]:
        """Return nothing: see ``PagedRows.tables``."""
        return []

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        """Return copies of what is kept of these tokens: [end - start, heads, width] each, as ``tensors``."""
        like = torch.contiguous_format  # contiguous() would be a view where there is one head
        return [tensor[row, :, start:end].transpose(0, 1).clone(memory_format=like) for tensor in self.tensors]

    def write(self, row: int, start: int, tensors: Sequence[Tensor]) -> None:
        """Write what ``read`` returns to the tokens of a row from ``start`` on."""
        for mine, new in zip(self.tensors, tensors):
            mine[row, :, start : start + len(new)].copy_(new.transpose(0, 1))

    def move(self, row: int, slots: np.ndarray, to: int) -> None:
        """Copy tokens of a row from these slots to those from ``to`` on."""
        (index,) = to_device([slots], self._device)
        for tensor in self.tensors:
            tensor[row, :, to : to + len(slots)] = tensor[row, :, index]

    def copy(self, to: Sequence[int], source: Any, rows: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of ``rows`` of such a cache (also this one, if disjoint) to rows ``to``."""
        for there, here, count, step in _runs(to, rows):
            for mine, other in zip(self.tensors, source.tensors):
                mine[there : there + count, :, :length].copy_(other[here : here + 1 + step * (count - 1), :, :length])


def _runs(to: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first target, first source, count, step) of runs: the source is one row (step 0) or a run (1)."""
    at = 0
    while at < len(to):
        count, step = 1, rows[at + 1] - rows[at] if at + 1 < len(to) else 0
        while (
            at + count < len(to)
            and step in (0, 1)
            and to[at + count] == to[at] + count
            and rows[at + count] == rows[at] + step * count
        ):
            count += 1
        yield to[at], rows[at], count, step if count > 1 else 0
        at += count


Slab = KVCache | PagedRows
"""Rows of sequences: with slots of their own, or with pages."""


class PrefixStore:
    """Copies of registered blocks by store slot; grows with use."""

    def __init__(self, slab: KVCache, block_size: int, most: int) -> None:
        """slab: an empty cache, in which it keeps them; most: blocks."""
        self._slab, self._block_size, self._most = slab, block_size, most

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._slab.nbytes

    def save(self, blocks: Sequence[tuple[int, int]], slab: Slab, row: int) -> None:
        """Copy blocks (index in the sequence, slot) of a row into the store."""
        if not blocks:
            return
        places, slots = zip(*blocks)
        self._grow(max(slots) + 1)
        for slot, index, count, _ in _runs(slots, places):
            for mine, other in self._pairs(slab):
                mine[slot : slot + count].copy_(self._blocks_of(other[row], index, count))

    def load(self, slots: Sequence[int], slab: Slab, row: int) -> None:
        """Copy the blocks of these slots to the beginning of a row."""
        for index, slot, count, step in _runs(range(len(slots)), slots):
            for mine, other in self._pairs(slab):
                self._blocks_of(other[row], index, count).copy_(mine[slot : slot + 1 + step * (count - 1)])

    def _blocks_of(self, tokens: Tensor, index: int, count: int) -> Tensor:
        """Return blocks of a row [heads, slots, width] as a view, [count, heads, block_size, width]."""
        size = self._block_size
        return tokens[:, index * size : (index + count) * size].unflatten(1, (count, size)).transpose(0, 1)

    def _pairs(self, slab: Slab) -> list[tuple[Tensor, Tensor]]:
        assert isinstance(slab, KVCache)  # what has pages has no such store
        return list(zip(self._slab.tensors, slab.tensors))

    def _grow(self, rows: int) -> None:
        have = self._slab.rows
        if rows > have:
            self._slab.layout(min(self._most, max(rows, 2 * have)), self._block_size, have, self._block_size)


class SequenceKV(NamedTuple):
    """KV of a sequence from a token on, outside of a cache. tokens: all its tokens with KV, int64 [n]."""

    tokens: np.ndarray
    salt: int
    """As of ``BlockManager.register``."""
    start: int
    """First token that is kept here."""
    tensors: list[Tensor]
    """As ``Slab.read`` of one row: [n - start, heads, width] each."""

    @classmethod
    def of(cls, slab: Slab, row: int, tokens: np.ndarray, salt: int, start: int) -> "SequenceKV":
        """Copy the KV of ``tokens[start:]`` from a row."""
        return cls(tokens, salt, start, slab.read(row, start, len(tokens)))

    def continues(self, tokens: np.ndarray, salt: int, cached: int) -> bool:
        """True if a sequence begins with these tokens, and what comes before ``start`` is cached."""
        n = len(self.tokens)
        if salt != self.salt or not self.start <= cached < n < len(tokens):
            return False
        return bool((tokens[:n] == self.tokens).all())

    def load(self, slab: Slab, row: int, cached: int) -> None:
        """Copy what is behind the first ``cached`` tokens to its place in a row."""
        slab.write(row, cached, [tensor[cached - self.start :] for tensor in self.tensors])


class KVCacheView(NamedTuple):
    """Tensors of a KVCache, as arguments of compiled code."""

    keys: list[Tensor]
    values: list[Tensor]
    shared: bool = False


class CachedContext:
    """Attention of ``width`` new tokens in each of the first rows of a cache over that row's KV.

    start: int64 [B], position of each row's first new token. length: slots that are read, above every new position.
    parity: use shapes that agree bit for bit with ``PackedContext(parity=True)``: ``positions`` is then longer than the
    tokens, and length must be a multiple of 16. fused: for compiled code of width 1. multiple: a pass has
    so many rows or a multiple, also without parity where each row has one new token or ``picked`` is given.
    picked: int64 [T], those of the B * width tokens that there are, in order, if rows have fewer; None: all. branches:
    order of the tokens of each row; None: each follows the one before it.
    """

    dropout = None

    def __init__(
        self,
        slab: KVCache | KVCacheView,
        start: Tensor,
        width: int,
        length: int,
        parity: bool = False,
        fused: bool = False,
        multiple: int = ROWS,
        experts: ExpertContext | None = None,
        picked: Tensor | None = None,
        branches: Branches | None = None,
    ) -> None:
        self.experts = experts or (ExpertContext(parity=True) if parity else None)
        self._slab, self._rows, self._width, self._length = slab, start.shape[0], width, length
        self._parity, self._fused, self._picked = parity, fused, picked
        self._start, self._branches = start, branches
        self._place = start[:, None] + torch.arange(width, device=start.device)
        places = self._pick((self._place if branches is None else start[:, None] + branches.depth).flatten())
        self._tokens = len(places)
        self.spare = -self._tokens % (multiple if parity or width == 1 or picked is not None else 1)
        """Rows of padding behind the tokens, which attention leaves out."""
        self.positions = F.pad(places, (0, self.spare)) if self.spare else places
        self._masks: dict[int | None, Tensor] = {}
        _, heads, capacity, _ = slab.keys[0].shape
        row = torch.arange(self._rows * heads, device=start.device).view(-1, 1, heads) * capacity
        self._slots = self._pick((row + self._place[:, :, None]).flatten(0, 1)).flatten()

    def _pick(self, every: Tensor) -> Tensor:
        """Return those of B * width values that belong to a token, [T, ...]."""
        return every if self._picked is None else every[self._picked]

    def _spread(self, some: Tensor) -> Tensor:
        """Return values of tokens [T, ...] at their places among B * width, with zeros where there is none."""
        if self._picked is None:
            return some
        return some.new_zeros(self._rows * self._width, *some.shape[1:]).index_copy_(0, self._picked, some)

    def keep_routing(self) -> None:
        """Write the experts that the pass has noted to the cache."""
        assert self.experts is not None and isinstance(self._slab, KVCache)
        (routing,), chosen = self._slab.routing, self.experts.chosen
        slots = torch.arange(self._rows, device=routing.device)[:, None] * routing.shape[2] + self._place
        found = torch.cat([chosen[layer] for layer in sorted(chosen)], 1)[: self._tokens].to(routing.dtype)
        routing.view(-1, routing.shape[3]).index_copy_(0, self._pick(slots.flatten()), found)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Write k and v to the cache and attend over it; arguments of ``AttentionContext.attend``."""
        if self.spare:
            q, k, v = (x[: self._tokens] for x in (q, k, v))
        rows, width, kv_heads = self._rows, self._width, k.shape[1]
        keys, values = self._slab.keys[layer], self._slab.values[layer]
        for cached, new in ((keys, k), (values, v))[: 1 if self._slab.shared else 2]:
            cached.view(-1, new.shape[2]).index_copy_(0, self._slots, new.reshape(-1, new.shape[2]))
        seen_keys, seen_values = keys[:rows, :, : self._length], values[:rows, :, : self._length]
        queries = self._spread(q).view(rows, width, kv_heads, -1, k.shape[2]).permute(0, 2, 3, 1, 4)
        out = self._mix(queries, seen_keys, seen_values, self._mask(window, q.dtype), sinks)
        if self._branches is not None and self._parity:
            self._branches.in_place(out, queries, seen_keys, seen_values, self._start, window, sinks)
        out = self._pick(out.permute(0, 3, 1, 2, 4).reshape(rows * width, q.shape[1], -1))
        return F.pad(out, (0, 0, 0, 0, 0, self.spare)) if self.spare else out

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
        if self._fused:
            return fused_attention(q, k, v, mask, sinks)
        if q.device.type != "cpu" and sinks is None:
            return shared_attention(q, k, v, mask)
        return matmul_attention(q, k, v, mask, sinks, parity=self._parity)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [B, 1, 1, width, length]."""
        if window not in self._masks:
            at, key = self._place[:, :, None], torch.arange(self._length, device=self._place.device)
            hidden = key > at if window is None else (key > at) | (key <= at - window)
            if self._branches is not None:
                hidden = self._branches.hidden(self._start, self._length, window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def shared_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute ``matmul_attention`` by SDPA, with heads that share keys as queries of one head: no fused GPU kernel
    takes a mask and fewer key heads, and the keys would be copied for every head."""
    mask = mask[:, 0].expand(-1, q.shape[2], -1, -1).flatten(1, 2)[:, None]
    return F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask).view(*q.shape[:4], -1)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Compute ``matmul_attention`` for one query in a form that inductor fuses.

    Two passes over the cache at memory speed: 1.3 times faster than batched matmul in fp32, 1.5 in bf16 (compiled on a
    CPU; slower in eager mode). q: [B, Hkv, G, 1, hd]; k, v: [B, Hkv, T, ...].
    """
    q = q.contiguous()
    q = q.as_strided(q.shape, q.stride())  # a separate buffer, or it would be recomputed for every key
    scores = (q * k[:, :, None]).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5 + mask[:, :, :, 0]
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        column = sinks.to(scores.dtype).view(1, *q.shape[1:3], 1).expand(len(q), -1, -1, 1)
        weights = torch.softmax(torch.cat((column, scores), -1), -1)[..., 1:]
    return (weights[..., None] * v[:, :, None]).sum(3, keepdim=True).to(q.dtype)
