"""Speculation: a pass computes some guessed tokens behind a row's newest, and keeps those that the row would have said.

Token t of a completion is chosen by random number t of its stream, so a pass chooses at every guessed position with the
number of that position, and a guess stands if it is the token chosen before it (sample and match). A completion then
has the tokens of plain decoding, whatever was guessed, up to ties within rounding of a pass of another shape; in parity
mode passes of all shapes have the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tilth.engines.blocks import BlockManager
from tilth.engines.drafter import Draft, Drafter, DraftError, Drawn
from tilth.engines.lanes import LengthBucket
from tilth.engines.request import SequenceState
from tilth.models.config import DecoderConfig
from tilth.plan.shape import token_flops

NONE = -1
"""No token, in an array of drafts or of tokens to stop at."""
HOLE = -2
"""No token, in an array of chosen tokens."""
FREE = {("cpu", torch.float32): 32, ("cpu", torch.bfloat16): 4}
"""Positions that a pass computes in the time that it takes whatever they are (reading weights, starting kernels):
measured on an EPYC with AVX2, which has no products in bf16."""
FREE_ELSEWHERE = 256
"""The same of a GPU, not measured: about the tokens at which products stop waiting for memory."""
LAYER, RATE = {"cpu": 20e-6}, {"cpu": 50e9}
"""Seconds that a position of a pass takes for each layer and for the head, beside its products, and the rate of these
(FLOP/s): one thread of a Xeon with AVX-512, models of 0.4 and 13 million parameters."""
RATE_ELSEWHERE = 300e12
"""The same of a GPU, not measured: what a device of 1,000 TFLOP/s attains in large products."""


def price(rows: int, free: int, guess: float = 0.0) -> float:
    """Return the chance from which on a guessed token pays in a pass of so many rows; above 1: none does.

    A pass of n positions takes n + free units of time, and n rows gain n tokens by it. One more position with chance a,
    and a guess that takes ``guess`` units, raise tokens per time if a > n (1 + guess) / (n + free). Counts alone
    decide, so a run replays.
    """
    return rows * (1 + guess) / (rows + free)


def prices(config: DecoderConfig, device: torch.device, free: int, seconds: float) -> Callable[[int], float]:
    """Return ``price`` by the rows of a pass of this model, whose size says how long a position takes in a full one.

    free: as of ``free_positions``; seconds: that a guess takes."""
    products = token_flops(config, 1).forward / RATE.get(device.type, RATE_ELSEWHERE)
    position = (config.num_layers + 1) * LAYER.get(device.type, 0.0) + products
    return partial(price, free=free, guess=seconds / position)


def free_positions(device: torch.device, dtype: torch.dtype) -> int:
    """Return FREE of a device and a dtype."""
    return FREE.get((device.type, dtype), FREE_ELSEWHERE)


class Drafts(NamedTuple):
    """Drafts of the rows of a pass, as arrays."""

    tokens: np.ndarray
    """int64 [rows, longest], NONE behind each."""
    parents: np.ndarray
    """int64 [rows, longest], places in the pass that they follow; behind a draft, the place before."""

    @classmethod
    def of(cls, rows: int, drafts: Mapping[int, Draft]) -> "Drafts":
        """Return the drafts of ``rows`` rows, of which these have one."""
        longest = max((len(draft.tokens) for draft in drafts.values()), default=0)
        found = cls(np.full((rows, longest), NONE, np.int64), np.tile(np.arange(longest), (rows, 1)))
        for row, draft in drafts.items():
            found.tokens[row, : len(draft.tokens)] = draft.tokens
            found.parents[row, : len(draft.parents)] = draft.parents
        return found

    def depths(self) -> np.ndarray:
        """Return the tokens before each place of the pass, behind the row's newest: int64 [rows, 1 + longest]."""
        found, each = np.zeros((len(self.tokens), 1 + self.tokens.shape[1]), np.int64), np.arange(len(self.tokens))
        for place in range(1, found.shape[1]):
            found[:, place] = found[each, self.parents[:, place - 1]] + 1
        return found


class Said(NamedTuple):
    """Tokens that rows say in a pass. path: int64 [rows, 1 + longest], the places that chose them, one behind the
    other; counts: int64 [rows], their number."""

    path: np.ndarray
    counts: np.ndarray

    def along(self, values: np.ndarray) -> np.ndarray:
        """Return the values of places, [rows, 1 + longest], in the order of the path."""
        if self.path.shape[1] == 1:
            return values
        return np.take_along_axis(values, self.path, 1)


def said_by(chosen: np.ndarray, drafts: Drafts, stops: np.ndarray) -> Said:
    """Return what rows say in a pass: the token that was chosen behind the newest one, then, as long as a draft has it
    there, the one that was chosen behind that.

    chosen: int64 [rows, 1 + longest], the token chosen at each place, HOLE where none was computed; stops: int64
    [rows, n], at which a row ends.
    """
    path, counts, each = np.zeros(chosen.shape, np.int64), np.ones(len(chosen), np.int64), np.arange(len(chosen))
    going = np.ones(len(chosen), bool)
    for at in range(1, chosen.shape[1]):
        here = path[:, at - 1]
        token = chosen[each, here][:, None]
        child = (drafts.parents == here[:, None]) & (drafts.tokens == token)
        going &= child.any(1) & ~(stops == token).any(1)
        path[:, at] = np.where(going, child.argmax(1) + 1, 0)
        counts += going
    return Said(path, counts)


def check_said(chosen: np.ndarray, drafts: Drafts, said: Said) -> None:
    """Raise DraftError if a row says a token that was computed behind another token than its own."""
    if not drafts.tokens.size:
        return
    given, before = (np.pad(some, ((0, 0), (1, 0))) for some in drafts)
    own = (said.along(given)[:, 1:] == said.along(chosen)[:, :-1]) & (said.along(before)[:, 1:] == said.path[:, :-1])
    behind = np.arange(drafts.tokens.shape[1]) < said.counts[:, None] - 1
    if (wrong := behind & ~own).any():
        row, place = np.argwhere(wrong)[0].tolist()
        raise DraftError(
            f"row {row} says {said.counts[row]} tokens of a pass, but was computed with "
            f"{said.along(given)[row, place + 1]} where it chose {said.along(chosen)[row, place]}; only guesses that "
            "were chosen may stand",
            key="draft.verdict",
        )


class Speculation:
    """Drafts of the rows of an engine's lanes, cut to what pays and to the room that there is."""

    def __init__(
        self, drafter: Drafter, tokens: int, most: int, blocks: BlockManager, least: Callable[[int], float], seed: int
    ) -> None:
        """tokens: most of a draft; most: positions of a pass; least: see ``price``, by rows of a pass; seed: of
        requests without ``Request.draws``."""
        self._drafter, self._tokens, self._most, self._blocks, self._least = drafter, tokens, most, blocks, least
        self._seed = seed
        self._behind: set[int] = set()
        """Requests whose newest tokens the drafter has not been told, since no guess pays."""

    def begin(self, answer: SequenceState) -> None:
        """Take a sequence that is placed in a row."""
        if answer.drafted:
            r = answer.request
            rules = (r.params.temperature, r.params.top_k, r.params.top_p, r.params.min_p)
            drawn = Drawn(r.draws or (self._seed, r.id), *rules)
            self._drafter.begin(r.id, np.asarray(r.prompt), answer.completion, drawn)

    def forget(self, answer: SequenceState) -> None:
        """Take a sequence with all its tokens out of flight."""
        if answer.request.id in self._behind:
            self._behind.discard(answer.request.id)
            self.begin(answer)
        self._drafter.forget(answer.request.id)

    def sleep(self) -> None:
        """Give the drafter's memory back, while no row is in a lane."""
        self._drafter.sleep()

    def drafts(self, lane: LengthBucket, most: int) -> dict[int, Draft]:
        """Return the drafts of rows that have one, of ``most`` tokens at most; their blocks are taken."""
        found: dict[int, Draft] = {}
        if not (own := self._drafted(lane)):
            return found
        ids, budgets, least = self._asks(lane, own, most)
        if least >= 1:  # not even a sure guess pays
            self._behind.update(ids)
            return found
        for row, id in zip(own, ids):
            if id in self._behind:
                self._behind.discard(id)
                self.begin(lane.settle(row))
        for row, draft in zip(own, self._drafter.propose(ids, budgets, least)):
            until = int(lane.columns.position[row]) + 1 + len(draft.tokens)
            if draft.tokens and self._blocks.extend(lane.answer(row).table, until):  # a draft preempts nobody
                found[row] = draft
        return found

    def expect(self, lane: LengthBucket, most: int) -> None:
        """Let a drafter apart begin with the next drafts of rows."""
        if self._drafter.apart and (own := self._drafted(lane)):
            ids, budgets, least = self._asks(lane, own, most)
            if least < 1 and self._behind.isdisjoint(ids):
                self._drafter.expect(ids, budgets, least)

    def _asks(self, lane: LengthBucket, own: Sequence[int], most: int) -> tuple[list[int], list[int], float]:
        """Return ids, budgets and least chance of drafts of rows."""
        others = sum(lane.answer(row).ahead is None for row in lane.rows.tolist())
        c = lane.columns
        room = np.minimum(c.end, lane.limit)[own] - c.position[own] - 2  # a token behind the draft has its place too
        budget = room.clip(0, max(0, min(self._tokens, most, self._most // others - 1)))
        return [lane.answer(row).request.id for row in own], budget.tolist(), self._least(others)

    def _drafted(self, lane: LengthBucket) -> list[int]:
        return [row for row in lane.rows.tolist() if lane.answer(row).drafted]

    def accept(self, lane: LengthBucket, chosen: np.ndarray, counts: np.ndarray) -> None:
        """Tell what rows of a lane have said, and free the blocks behind.

        chosen: int64 [rows, width]; counts: of the first of them."""
        own = [row for row in self._drafted(lane) if lane.answer(row).request.id not in self._behind]
        if not own:
            return
        self._drafter.accept([lane.answer(row).request.id for row in own], [chosen[row, : counts[row]] for row in own])
        for row in own:
            self._blocks.trim(lane.answer(row).table, int(lane.columns.position[row]))
