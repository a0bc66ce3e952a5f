"""Accounting of the KV cache in blocks of tokens: allocation and shared prefixes. Pure Python, no tensors.

A block is free, or referenced by one or more tables. A *full* block whose KV is computed may be registered under the
hash of its tokens and all tokens before it (a chain, salted with what computed the KV: weights and adapter); a later
table with the same prefix shares it. A freed block keeps its hash on an LRU list, from which a hit takes it back in
O(1), until its space is needed: roots of chains survive longest (vLLM, arXiv 2309.06180, with an O(1) free list).

``slot`` numbers the registered blocks 0 .. max_cached - 1, for a store that keeps a copy of the KV of each.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from tilth.core.errors import TilthError


class BlockError(TilthError):
    """The accounting contradicts itself: a bug in Tilth."""


@dataclass(eq=False, slots=True)
class BlockTable:
    """Blocks of one sequence, in order. cached: tokens whose KV was shared when the table was opened."""

    blocks: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass(eq=False, slots=True)
class _Block:
    refs: int = 0
    digest: bytes | None = None
    tokens: bytes = b""
    salt: int = 0
    slot: int = -1


class BlockManager:
    """Blocks of ``block_size`` tokens, ``num_blocks`` in all, at most ``max_cached`` of them registered."""

    def __init__(self, num_blocks: int, block_size: int = 16, max_cached: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks: list[_Block] = []  # those used so far
        self._blank: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._registered: dict[bytes, int] = {}
        self.max_cached = num_blocks if max_cached is None else max_cached
        self._slots: list[int] = []
        self._slots_used = 0

    @property
    def free(self) -> int:
        """Number of blocks that no table references, including registered ones."""
        return self.num_blocks - len(self._blocks) + len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks that a table references."""
        return self.num_blocks - self.free

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for this many tokens."""
        return -(-tokens // self.block_size)

    def chain(self, tokens: np.ndarray, salt: int, count: int) -> list[tuple[bytes, bytes]]:
        """Return (digest, token bytes) of the first ``count`` full blocks of int64 tokens."""
        raw, width = np.ascontiguousarray(tokens, np.int64).tobytes(), 8 * self.block_size
        parent, found = salt.to_bytes(8, "little", signed=True), []
        for at in range(0, count * width, width):
            part = raw[at : at + width]
            parent = blake2b(part, digest_size=16, key=parent).digest()
            found.append((parent, part))
        return found

    def open(self, tokens: np.ndarray, salt: int, spare: int = 0) -> BlockTable | None:
        """Return a table that shares the longest registered prefix; None if fewer than ``spare`` blocks would be left.

        At least one token stays to be computed, for its logits.
        """
        shared = self._match(tokens, salt)
        need = self.blocks_for(len(tokens)) - len(shared)
        if need + spare + sum(b in self._idle for b in shared) > self.free:
            return None
        for block in shared:
            self._take(block)
        table = BlockTable(shared, len(shared) * self.block_size)
        table.blocks.extend(self._fresh() for _ in range(need))
        return table

    def _match(self, tokens: np.ndarray, salt: int) -> list[int]:
        found: list[int] = []
        if not self._registered:
            return found
        for digest, part in self.chain(tokens, salt, (len(tokens) - 1) // self.block_size):
            block = self._registered.get(digest)
            if block is None or self._blocks[block].tokens != part:
                break
            if self._blocks[block].salt != salt:
                message = f"block {block} has KV of weights and adapter {self._blocks[block].salt:#x}, not {salt:#x}"
                raise BlockError(message, key="salt")
            found.append(block)
        return found

    def fork(self, table: BlockTable, tokens: int) -> BlockTable | None:
        """Return a second table of this many tokens with shared full blocks and a fresh last one; None if none is
        free."""
        full = tokens // self.block_size
        if tokens % self.block_size and not self.free:
            return None
        for block in table.blocks[:full]:
            self._take(block)
        copy = BlockTable(table.blocks[:full], tokens)
        if tokens % self.block_size:
            copy.blocks.append(self._fresh())
        return copy

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Extend the table to this many tokens; False, without a change, if too few blocks are free."""
        need = self.blocks_for(tokens) - len(table.blocks)
        if need > self.free:
            return False
        table.blocks.extend(self._fresh() for _ in range(need))
        return True

    def trim(self, table: BlockTable, tokens: int) -> None:
        """Free the blocks behind this many tokens, which are of this table alone."""
        need = self.blocks_for(tokens)
        self.close(BlockTable(table.blocks[need:]))
        del table.blocks[need:]

    def register(self, table: BlockTable, tokens: np.ndarray, computed: int, salt: int) -> list[tuple[int, int]]:
        """Register the full blocks of the first ``computed`` tokens, whose KV must exist already.

        Returns (index in the table, slot) of the blocks to copy to the store.
        """
        new = []
        for i, (digest, part) in enumerate(self.chain(tokens, salt, computed // self.block_size)):
            block = self._blocks[table.blocks[i]]
            if digest in self._registered or block.digest is not None:
                continue
            slot = self._slot()
            if slot is None:
                break
            block.digest, block.tokens, block.salt, block.slot = digest, part, salt, slot
            self._registered[digest] = table.blocks[i]
            new.append((i, block.slot))
        return new

    def _slot(self) -> int | None:
        """Return a free slot; None if every registered block is in use."""
        if self._slots_used < self.max_cached and not self._slots:
            self._slots_used += 1
            return self._slots_used - 1
        return self._slots.pop() if self._slots or self._forget_oldest() else None

    def slots(self, table: BlockTable) -> list[int]:
        """Return the store slots of the shared blocks."""
        return [self._blocks[b].slot for b in table.blocks[: table.cached // self.block_size]]

    def close(self, table: BlockTable) -> None:
        """Free the blocks, the last first."""
        for index in reversed(table.blocks):
            block = self._blocks[index]
            if block.refs < 1:
                raise BlockError(f"block {index} is freed more often than it was taken", key="close")
            block.refs -= 1
            if block.refs == 0 and block.digest is None:
                self._blank.append(index)
            elif block.refs == 0:
                self._idle[index] = None
        table.blocks, table.cached = [], 0

    def flush(self) -> None:
        """Unregister all blocks, after the weights changed."""
        for index in list(self._registered.values()):
            self._forget(index)
        self._blank.extend(self._idle)
        self._idle.clear()

    def _take(self, index: int) -> None:
        self._idle.pop(index, None)
        self._blocks[index].refs += 1

    def _fresh(self) -> int:
        if not self._blank and len(self._blocks) < self.num_blocks:
            self._blank.append(len(self._blocks))
            self._blocks.append(_Block())
        elif not self._blank:
            self._forget_oldest()
        index = self._blank.pop()
        self._blocks[index].refs = 1
        return index

    def _forget_oldest(self) -> bool:
        """Unregister the least recently used free block; False if all are in use."""
        if not self._idle:
            return False
        index, _ = self._idle.popitem(last=False)
        self._forget(index)
        self._blank.append(index)
        return True

    def _forget(self, index: int) -> None:
        block = self._blocks[index]
        assert block.digest is not None
        del self._registered[block.digest]
        self._slots.append(block.slot)
        block.digest, block.tokens, block.slot = None, b"", -1
