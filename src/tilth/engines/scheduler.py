"""Scheduler: queue of sequences with blocks for each, and prompts computed once, in chunks in a separate cache, then
copied to every sample.

Pure bookkeeping without clock and random numbers, so a run replays.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tilth.core.media import Media
from tilth.engines.adapters import LoadedAdapter, salt_of
from tilth.engines.blocks import BlockManager, BlockTable
from tilth.engines.cache import SequenceKV, Slab
from tilth.engines.request import SequenceState
from tilth.models.inputs import EncoderInput, place_media
from tilth.plan.kernels import KEYS, PROMPT_WIDTH, round_up


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
    tail: SequenceKV | None = None
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

    def __init__(self, prompts: list[PrefillJob], slab: Slab) -> None:
        self.prompts, self.slab = prompts, slab
        # A row is padded to the widest chunk, so it may reach beyond its own end.
        reach = max(p.computed for p in prompts) + max(p.remaining for p in prompts) + PROMPT_WIDTH
        slab.layout(len(prompts), round_up(reach, KEYS))
        for row, prompt in enumerate(prompts):
            prompt.row = row
            slab.bind(row, prompt.table.blocks)

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


class Scheduler:
    """Queues before the lanes: waiting -> computing (``batch``) -> ready -> a row of a lane."""

    def __init__(self, blocks: BlockManager, max_rows: int) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.waiting: deque[SequenceState] = deque()
        self.batch: PrefillBatch | None = None
        self.ready: deque[PrefillJob] = deque()
        self._order = itertools.count()
        self._watermark = max(1, blocks.num_blocks // 100)

    @property
    def queued(self) -> int:
        """Number of sequences without a row."""
        return len(self.waiting) + sum(len(p.answers) for p in self._prompts())

    def _prompts(self) -> list[PrefillJob]:
        return [*self.ready, *(self.batch.prompts if self.batch else [])]

    def admit(self, budget: int, running: int, version: int) -> list[PrefillJob]:
        """Dequeue the prompts to compute next: similar in length, at most ``budget`` tokens in sum, or one alone.

        running: rows in use. Allocates blocks for all tokens of each prompt, keeping a small reserve while others run.
        """
        found: list[PrefillJob] = []
        rows, least, most = self.max_rows - running, sys.maxsize, 0
        while self.waiting and rows > 0 and budget > 0:
            prompt = self._open(version, spare=self._watermark if running or found else 0)
            if prompt is None:
                break
            length = prompt.remaining
            least, most = min(least, length), max(most, length)
            if found and (length > budget or not similar(least, most)):
                self.blocks.close(prompt.table)
                break
            for _ in prompt.answers:
                self.waiting.popleft()
            found.append(prompt)
            rows -= len(prompt.answers)
            budget -= length
        return found

    def _open(self, version: int, spare: int) -> PrefillJob | None:
        """Open the first prompt of the queue with all sequences behind it that have the same tokens, media and
        adapter."""
        first = self.waiting[0]
        keys, adapter, media = first.keys, first.adapter, first.request.media
        table = self.blocks.open(keys, salt_of(version, adapter), spare)
        if table is None:
            return None
        same = itertools.takewhile(lambda a: a.adapter is adapter and np.array_equal(a.keys, keys), self.waiting)
        return PrefillJob(first.tokens, keys, deque(same), table, table.cached, adapter=adapter, media=media)

    def place(self, running: int) -> list[tuple[PrefillJob, SequenceState]]:
        """Return sequences of computed prompts that get a row now, each with its own table."""
        found: list[tuple[PrefillJob, SequenceState]] = []
        while self.ready and running + len(found) < self.max_rows:
            prompt = self.ready[0]
            alone = not running and not found
            table = self._share(prompt, 0 if alone else self._watermark)
            if table is None and not alone:
                break
            answer = prompt.answers.popleft()
            if table is None:  # no room for two: this one takes the blocks, the others wait
                table = prompt.table
                self.ready.popleft()
                self.requeue(prompt.answers)
            answer.table = table
            answer.order = next(self._order) if answer.order < 0 else answer.order
            found.append((prompt, answer))
        return found

    def _share(self, prompt: PrefillJob, spare: int) -> BlockTable | None:
        """Return a table for the next sequence of a prompt, the prompt's own for the last; None without blocks."""
        if len(prompt.answers) == 1:
            self.ready.popleft()
            return prompt.table
        return self.blocks.fork(prompt.table, len(prompt.tokens)) if self.blocks.free > spare else None

    def computed(self) -> None:
        """Mark the prompts of the batch as ready; drop those whose sequences were all aborted."""
        assert self.batch is not None
        for prompt in self.batch.prompts:
            if prompt.answers:
                self.ready.append(prompt)
            else:
                self.blocks.close(prompt.table)
        self.batch = None

    def yield_prompt(self) -> bool:
        """Free the blocks of prompts without a row, newest first; False if there are none."""
        if self.batch is not None:
            for prompt in reversed(self.batch.prompts):
                self._requeue(prompt)
            self.batch = None
        elif self.ready:
            self._requeue(self.ready.pop())
        else:
            return False
        return True

    def _requeue(self, prompt: PrefillJob) -> None:
        self.blocks.close(prompt.table)
        self.requeue(prompt.answers)

    def requeue(self, answers: Iterable[SequenceState]) -> None:
        """Put sequences at the front of the queue, in this order."""
        self.waiting.extendleft(reversed(list(answers)))

    def answers(self) -> Iterator[SequenceState]:
        """Iterate over the sequences without a row."""
        return itertools.chain(self.waiting, *(p.answers for p in self._prompts()))

    def remove(self, trajectory: int) -> SequenceState | None:
        """Remove and return the sequence with this id that has no row; None if there is none."""
        for queue in [self.waiting, *(p.answers for p in self._prompts())]:
            for answer in queue:
                if answer.request.id == trajectory:
                    queue.remove(answer)
                    self._drop_deserted()
                    return answer
        return None

    def _drop_deserted(self) -> None:
        for prompt in [p for p in self.ready if not p.answers]:
            self.ready.remove(prompt)
            self.blocks.close(prompt.table)


CHUNK = 512
"""Largest number of tokens of one prompt per forward pass; bounds the memory of attention scores."""
_WASTE = 16
"""Prompts of up to a chunk share a forward pass if their lengths differ by at most a quarter, or this many tokens."""
