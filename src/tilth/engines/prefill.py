"""Prefill: prompts are computed once, in chunks, in a separate cache, then copied to every sample."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tilth.core.media import Media
from tilth.engines.adapters import LoadedAdapter
from tilth.engines.blocks import BlockTable
from tilth.engines.cache import KeptTail, KVCache
from tilth.engines.request import SequenceState
from tilth.models.inputs import EncoderInput, place_media
from tilth.plan.kernels import KEYS, PROMPT_WIDTH, round_up

CHUNK = 512
"""Largest number of tokens of one prompt per forward pass; bounds the memory of attention scores."""
_WASTE = 16
"""Prompts of up to a chunk share a forward pass if their lengths differ by at most a quarter, or this many tokens."""


@dataclass(eq=False)
class PrefillJob:
    """Tokens that one or more sequences begin with (of an interrupted sequence: all its tokens)."""

    tokens: np.ndarray
    keys: np.ndarray
    """By which the cache knows the tokens."""
    answers: deque[SequenceState]
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    """Number of tokens with KV in row ``row`` of the batch's cache."""
    row: int = 0
    tail: KeptTail | None = None
    """What is loaded behind the shared blocks."""
    adapter: LoadedAdapter | None = None
    """Of all its sequences, as ``media``."""
    media: Media = ()
    logits: Tensor | None = None
    """float32 [1, V] after the last token, once computed."""
    order: int = -1

    @property
    def remaining(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.computed


class PrefillBatch:
    """Prompts of similar length that are computed together, a row each; one above the budget is alone."""

    def __init__(self, prompts: list[PrefillJob], slab: KVCache) -> None:
        self.prompts, self.slab = prompts, slab
        # A row is padded to the widest chunk, so it may reach beyond its own end.
        reach = max(p.computed for p in prompts) + max(p.remaining for p in prompts) + PROMPT_WIDTH
        slab.layout(len(prompts), round_up(reach, KEYS))
        for row, prompt in enumerate(prompts):
            prompt.row = row

    @property
    def finished(self) -> bool:
        """True if every prompt is computed."""
        return all(p.remaining == 0 for p in self.prompts)

    def chunk(self, budget: int) -> np.ndarray:
        """Return the number of tokens that each prompt computes next, int64 [prompts], at most ``budget`` in sum."""
        if len(self.prompts) > 1:
            return np.array([p.remaining for p in self.prompts], np.int64)
        return np.array([min(self.prompts[0].remaining, budget, CHUNK)], np.int64)

    def inputs(self, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return (ids int64 [rows, width] padded with 0, start int64 [rows], slots to read) of the forward pass."""
        width = round_up(int(chunk.max()), PROMPT_WIDTH)
        ids = np.zeros((len(self.prompts), width), np.int64)
        for row, (prompt, count) in enumerate(zip(self.prompts, chunk)):
            ids[row, :count] = prompt.tokens[prompt.computed : prompt.computed + count]
        start = np.array([p.computed for p in self.prompts], np.int64)
        return ids, start, round_up(int(start.max()) + width, KEYS)

    def media(self, chunk: np.ndarray, width: int, device: torch.device) -> tuple[EncoderInput, ...]:
        """Return the media of a forward pass whose ids are [rows, width]."""
        rows = zip(self.prompts, chunk.tolist())
        spans = ((p.media, p.computed, p.computed + count, row * width) for row, (p, count) in enumerate(rows))
        return place_media(spans, device)


def similar(least: int, most: int) -> bool:
    """Return True if prompts with ``least`` to ``most`` tokens to compute share a pass without much padding."""
    return most <= CHUNK and most - least <= max(_WASTE, most // 4)
