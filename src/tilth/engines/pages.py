"""KV cache of a GPU in pages: a sequence holds the pages of its block table, and attention reads them where they are.

A block of the accounting is a page, so prompts that are shared or continued are neither copied nor computed again. Rows
of a pass name their pages in a table that is an input of the pass, as are their lengths: one graph serves them all.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.device import has_products, to_device
from tilth.models.attention import CacheSlots, paged_attention
from tilth.models.config import DecoderConfig
from tilth.plan.kernels import PAGE, PAGED_TORCH, ROWS, grown
from tilth.plan.shape import pages_fit, torch_has_pages


def pages_serve(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if torch attends over pages for a model on a device. An older torch says so once on stderr."""
    return pages_fit(config) and dtype in (torch.bfloat16, torch.float16) and _device_serves(device)


@functools.cache
def _device_serves(device: torch.device) -> bool:
    if not has_products(device) or torch.version.hip:
        return False
    found = torch_has_pages()
    if not found:
        message = f"torch {torch.__version__} has no attention over pages of a KV cache"
        print(f"tilth: {message}, {PAGED_TORCH} has: each row gets all slots of its length", file=sys.stderr)
    return found


class PagePool:
    """Pages of keys and values [pages, PAGE, heads, width] of each layer, which grow to ``most`` blocks.

    Page b + 1 is that of block b. Page 0 belongs to nobody: rows without a sequence, and tokens that fill up a chunk,
    write there. All values are finite. It is the ``PrefixStore`` too: what a table shares is in its place already.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, most: int) -> None:
        heads, *widths = config.cached(latent=False)
        self.device, self._most, self.layers = device, most + 1, config.num_layers
        self.tensors = [
            torch.zeros(1, PAGE, heads, width, dtype=dtype, device=device)
            for width in widths
            for _ in range(self.layers)
        ]
        """Keys of all layers, then values."""
        self.layouts = 0
        """Number of times that their addresses have changed."""

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def reserve(self, blocks: Sequence[int]) -> None:
        """Allocate the pages of these blocks."""
        have, need = len(self.tensors[0]), max(blocks, default=-1) + 2
        if need <= have:
            return
        size = max(need, min(self._most, grown(have, need)))
        for i, old in enumerate(self.tensors):  # one after the other, so that one alone is there twice
            self.tensors[i] = torch.zeros(size, *old.shape[1:], dtype=old.dtype, device=old.device)
            self.tensors[i][:have].copy_(old)
        self.layouts += 1

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks: (source, target) of each, where they differ."""
        apart = [pair for pair in pairs if pair[0] != pair[1]]
        if apart:
            self.reserve([to for _, to in apart])
            source, to = to_device(list(np.array(apart, np.int64).T + 1), self.device)
            for tensor in self.tensors:
                tensor.index_copy_(0, to, tensor[source])

    def save(self, blocks: Sequence[Any], slab: Any, row: int) -> None:
        """Do nothing, as ``load``: see ``PrefixStore``."""

    load = save


class PagedRows:
    """Rows of sequences in a pool, with the interface of ``KVCache``."""

    shared = False
    nbytes = 0
    routing: Sequence[Tensor] = ()

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.rows = self.capacity = 0
        self._table = np.zeros((0, 0), np.int32)

    @property
    def layouts(self) -> int:
        """Number of layouts of the pool."""
        return self.pool.layouts

    @property
    def keys(self) -> list[Tensor]:
        return self.pool.tensors[: self.pool.layers]

    @property
    def values(self) -> list[Tensor]:
        return self.pool.tensors[self.pool.layers :]

    @property
    def kinds(self) -> list[tuple[int, int, torch.dtype]]:
        """Shape and dtype of each tensor, by ``KVCache.kinds``."""
        return [(*tensor.shape[2:], tensor.dtype) for tensor in self.pool.tensors]

    def layout(self, rows: int, capacity: int, keep_rows: int = 0, keep_tokens: int = 0) -> None:
        """Change the number of rows and of tokens of each; keep the pages of the first ``keep_rows``."""
        old, self._table = self._table, np.zeros((rows, -(-capacity // PAGE)), np.int32)
        both = min(old.shape[1], self._table.shape[1])
        self._table[:keep_rows, :both] = old[:keep_rows, :both]
        self.rows, self.capacity = rows, capacity

    def bind(self, row: int, blocks: Sequence[int]) -> None:
        """Set the blocks that hold a row's tokens, in order."""
        self.pool.reserve(blocks)
        self._table[row] = 0
        self._table[row, : len(blocks)] = np.asarray(blocks, np.int32) + 1

    def tables(self, rows: int) -> list[np.ndarray]:
        """Return what a pass over the first rows needs of the cache on the device: their pages, int32 [rows, most]."""
        return [self._table[:rows]]

    def copy(self, to: Sequence[int], source: Any, rows: Sequence[int], length: int) -> None:
        """Do nothing: whoever gets a row binds its blocks."""

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        """Return the keys of these tokens in each layer, then the values: [end - start, heads, width] each."""
        places = self._places(row, start, end)
        return [tensor.flatten(0, 1)[places] for tensor in self.pool.tensors]

    def write(self, row: int, start: int, tensors: Sequence[Tensor]) -> None:
        """Write what ``read`` returns to the tokens of a row from ``start`` on."""
        places = self._places(row, start, start + len(tensors[0]))
        for mine, new in zip(self.pool.tensors, tensors):
            mine.flatten(0, 1).index_copy_(0, places, new)

    def _places(self, row: int, start: int, end: int) -> Tensor:
        slots = np.arange(start, end)
        found = self._table[row].astype(np.int64)[slots // PAGE] * PAGE + slots % PAGE
        return to_device([found], self.pool.device)[0]


class PagedContext:
    """Attention of ``width`` new tokens in each of the first rows over that row's pages, as ``CachedContext``.

    table: int32 [B, most], pages of each row; start: int64 [B], position of its first new token.
    """

    dropout = experts = None

    def __init__(self, slab: PagedRows, table: Tensor, start: Tensor, width: int, multiple: int = ROWS) -> None:
        self._slab, self._table, self._longest = slab, table, (width, table.shape[1] * PAGE)
        place = start[:, None] + torch.arange(width, device=start.device)
        self._places = (table.gather(1, place // PAGE) * PAGE + place % PAGE).flatten()
        self._lengths = (start + width).int()
        queries = torch.arange(0, place.numel() + 1, width, dtype=torch.int32, device=start.device)
        self._ends = queries, F.pad(self._lengths.cumsum(0, dtype=torch.int32), (1, 0))
        self._tokens, self.spare = place.numel(), -place.numel() % (multiple if width == 1 else 1)
        self.positions = F.pad(place.flatten(), (0, self.spare))

    def slots(self, layer: int) -> CacheSlots:
        """Return where keys and values of the new tokens belong."""
        return CacheSlots(self._slab.keys[layer], self._slab.values[layer], self._places)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Write k and v to the pages, unless they are these (``slots``), and attend over them; arguments of
        ``AttentionContext.attend``, without sinks."""
        q, (keys, values, places) = q[: self._tokens], self.slots(layer)
        for cached, new in ((keys, k), (values, v)):
            if new is not cached:
                cached.flatten(0, 1).index_copy_(0, places, new[: self._tokens])
        out = paged_attention(q, keys, values, self._ends, self._longest, self._table, self._lengths, window)
        return F.pad(out, (0, 0, 0, 0, 0, self.spare)) if self.spare else out
