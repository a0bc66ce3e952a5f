"""Drafts by a small model of the same vocabulary: a chain of what it would say with the row's own random numbers.

Two models that agree about the next token draw the same one from the same number, at any temperature; where they agree
in part, as often as their intervals of the inverse CDF overlap. Apart, a chain grows while the target verifies its
beginning (SwiftSpec, arXiv 2506.11309): what is said as guessed leaves the rest of it for the next draft.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tilth.core.device import return_memory
from tilth.engines.cache import KVCache
from tilth.engines.drafter import USUAL, Draft, Drafter, DraftError, Drawn
from tilth.engines.request import Request, SamplingParams
from tilth.engines.runner import Runner
from tilth.engines.sampling import Rules, choose, draws
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.plan.kernels import DRAFT_WIDTH, ROWS, round_up, slots_for

PAUSE = 64
"""Proposals without a draft between two that measure, where drafts are not worth it."""
MEASURED = 4
"""Rows at most that measure: each computes what it has said since it last did."""


@dataclass(eq=False, slots=True)
class _Chain:
    """A completion in flight, and what the model has drawn behind it."""

    request: Request
    """With the stream and the rules of its draws."""
    slot: int
    text: list[int]
    chain: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens of text and chain whose KV is in the cache."""
    drafted: int = -1
    """Tokens of the chain in a draft without a verdict; -1: there is none."""


class ModelDrafter(Drafter):
    """A ``Drafter`` by a model, whose weights do not change."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: str,
        tokens: int,
        layers: int,
    ) -> None:
        """tokens: that a chain grows, beyond a draft, while the target verifies; layers: of the target."""
        self.config, self.device, self._tokens = config, torch.device(device), tokens
        self._share = (config.num_layers + 1) / (layers + 1)
        """Of the time of a target's pass that a token of a chain takes: passes of few rows take the time of their
        layers, and that of one for the head and the draw. With n rows and f free positions (see ``price``) a token of
        chance a then costs n + share (n + f), so it pays if a > n / (n + f) + share."""
        made = shard(
            lambda: Decoder(config, dtype).to(dtype).requires_grad_(False).eval(),
            ParallelDims.alone(), engine=True, device=device,
        )  # fmt: skip
        made.model.fuse()
        made.load_(weights)
        self._runner = Runner(made.model, False, False, self.device, ROWS)
        self._dtype = dtype
        self._slab = self._new_slab()
        self._rows: dict[int, _Chain] = {}
        self._free = list[int]()
        """Rows of the cache."""
        self._hits, self._tries = 1.0, 2.0
        """Guesses that were right, and guesses behind right ones; older ones count less."""
        self._left = 0
        """Proposals until the next one that measures."""

    def _new_slab(self) -> KVCache:
        return KVCache(self.config, self._dtype, self.device, latent=True)

    def begin(self, row: int, prompt: np.ndarray, completion: np.ndarray, drawn: Drawn = USUAL) -> None:
        text = [*prompt.tolist(), *completion.tolist()]
        if (known := self._rows.get(row)) is not None:
            known.drafted = -1
            if said := text[len(known.text) :]:
                self._move(known, said)
            return
        params = SamplingParams(1, drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p)
        self._rows[row] = _Chain(Request(row, text[:1], params, draws=drawn.stream), self._slot(), text)

    def _slot(self) -> int:
        if not self._free:
            have = self._slab.rows
            self._slab.layout(max(ROWS, 2 * have), self._slab.capacity, have, self._slab.capacity)
            self._free = list(reversed(range(have, self._slab.rows)))
        return self._free.pop()

    def propose(self, rows: Sequence[int], budget: Sequence[int], least: float) -> list[Draft]:
        wanted, worth = dict[int, int](), self._worth(least + self._share, len(rows))
        for number, most, length in zip(rows, budget, worth, strict=True):
            row = self._rows[number]
            if row.drafted >= 0:
                raise DraftError(
                    "a row's last draft has no verdict yet; accept() comes between two drafts", key="draft.open"
                )
            wanted[number] = row.drafted = min(most, length, self._room(row))
        while short := [row for n, most in wanted.items() if len((row := self._rows[n]).chain) < most]:
            self._extend(short)
        return [Draft(self._rows[n].chain[:most], range(most)) for n, most in wanted.items()]

    def _worth(self, least: float, rows: int) -> list[int]:
        """Return the length of a chain whose last token has this chance, for each row; if none has, now and then 1 for
        some, to measure."""
        length = math.log(min(least, 1.0)) / math.log(min(self._hits / self._tries, 0.999))
        if length >= 1:
            return [int(min(length, self.config.max_positions))] * rows
        self._left = self._left - 1 if self._left else PAUSE
        return [int(self._left == PAUSE and row < MEASURED) for row in range(rows)]

    def _room(self, row: _Chain) -> int:
        return max(0, self.config.max_positions - len(row.text))

    def grow(self) -> bool:
        """Extend the chains of rows whose drafts are being verified by a token."""
        short = [
            row for row in self._rows.values()
            if row.drafted > 0 and len(row.chain) < min(row.drafted + self._tokens, self._room(row))
        ]  # fmt: skip
        if short:
            self._extend(short)
        return bool(short)

    @torch.inference_mode()
    def _extend(self, rows: Sequence[_Chain]) -> None:
        """Draw a token behind text and chain of each row, or compute tokens before it that the model has not seen."""
        pending = [(row.text + row.chain)[row.computed : row.computed + DRAFT_WIDTH] for row in rows]
        whole = [row.computed + len(some) == len(row.text) + len(row.chain) for row, some in zip(rows, pending)]
        slots, width = [row.slot for row in rows], max(map(len, pending))
        ids, start = np.full((max(slots) + 1, width), -1, np.int64), np.zeros(max(slots) + 1, np.int64)
        for row, some in zip(rows, pending):
            ids[row.slot, : len(some)] = some
            start[row.slot] = row.computed
            row.computed += len(some)
        self._fit(max(row.computed for row in rows))
        there = np.flatnonzero(ids >= 0)
        given = ModelInput(torch.from_numpy(ids.clip(0)).to(self.device))
        picked, begin = (torch.from_numpy(some).to(self.device) for some in (there, start))
        hidden = self._runner.forward_rows(self._slab, given, begin, self._slab.capacity, picked)
        done = [(row, row.slot * width + len(some) - 1) for row, some, all in zip(rows, pending, whole) if all]
        if done:
            last = torch.from_numpy(np.searchsorted(there, [at for _, at in done])).to(self.device)
            self._draw([row for row, _ in done], self._runner.model.logits(hidden[last]))

    def _draw(self, rows: Sequence[_Chain], logits: Tensor) -> None:
        requests = [row.request for row in rows]
        numbers = draws(0, requests, [len(row.text) + len(row.chain) for row in rows], 1)[:, 0]
        rules = Rules.of([request.params for request in requests], self.device)
        tokens, _, _ = choose(logits, torch.from_numpy(numbers).to(self.device), rules).on_host()
        for row, token in zip(rows, tokens.tolist()):
            row.chain.append(token)

    def _fit(self, tokens: int) -> None:
        if (have := self._slab.capacity) < tokens:
            self._slab.layout(self._slab.rows, round_up(slots_for(tokens), ROWS), self._slab.rows, have)

    def accept(self, rows: Sequence[int], said: Sequence[np.ndarray]) -> None:
        for number, tokens in zip(rows, said, strict=True):
            row, right = self._rows[number], tokens.tolist()
            if row.drafted >= 0:
                stands = _common(row.chain, right)
                tries = min(stands + 1, len(row.chain), len(right))
                self._hits, self._tries = self._hits + min(stands, tries), self._tries + tries
                if self._tries > 1024:
                    self._hits, self._tries = self._hits / 2, self._tries / 2
            row.drafted = -1
            self._move(row, right)

    def _move(self, row: _Chain, said: list[int]) -> None:
        """Append what a row has said; of the chain stays what follows it."""
        stands = _common(row.chain, said)
        row.computed = min(row.computed, len(row.text) + stands)
        row.chain = row.chain[stands:] if stands == len(said) else []
        row.text += said

    def sleep(self) -> None:
        """Give the KV cache back. Chains stay what the model says; their KV is computed anew."""
        rows, self._slab = self._slab.rows, self._new_slab()
        self._slab.layout(rows, 0)
        for row in self._rows.values():
            row.computed, row.drafted = 0, -1
        return_memory(self.device)

    def forget(self, row: int) -> None:
        if (gone := self._rows.pop(row, None)) is not None:
            self._free.append(gone.slot)

    def note(self, prompt: np.ndarray, completion: np.ndarray) -> None:
        """Do nothing: the model learns nothing from what is said."""


def _common(some: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    return next((i for i, (a, b) in enumerate(zip(some, other)) if a != b), min(len(some), len(other)))
