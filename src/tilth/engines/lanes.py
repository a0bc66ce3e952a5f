"""Length buckets ("lanes"): rows of similar length that decode together, with state in arrays instead of per-row loops.

Finished rows leave holes, which new rows fill. The last rows move into holes only if that saves a multiple of 8 rows.
A row that outgrows its lane moves to the next larger one, so that few long answers do not
lengthen the attention of all others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from tilth.core.device import to_device
from tilth.engines.adapters import LoadedAdapter
from tilth.engines.cache import KVCache, Slab
from tilth.engines.request import Progress, Request, SequenceState
from tilth.engines.sampling import RuleColumns
from tilth.plan.kernels import KEYS, ROWS, round_up, slots_for

Draw = Callable[[Sequence[Request], Sequence[int], int], np.ndarray]
"""(requests, first positions, count) -> random numbers of these positions, float32 [requests, count]."""


@dataclass
class RowState:
    """State of the rows of a lane: [rows] or [rows, columns]; a hole has the values of ``blank``."""

    live: np.ndarray
    position: np.ndarray
    """Position of the newest token, the next to be computed."""
    end: np.ndarray
    tokens: np.ndarray
    """[rows, limit] by absolute position, as the next three. Entries before the newest token at placing are stale."""
    logprobs: np.ndarray
    sampling: np.ndarray
    uniform: np.ndarray
    stops: np.ndarray
    temperature: np.ndarray
    greedy: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    filtered: np.ndarray

    @classmethod
    def blank(cls, rows: int, limit: int, stops: int) -> "RowState":
        """Return rows of holes."""
        long, real = (rows, limit), np.float32
        return cls(
            live=np.zeros(rows, bool),
            position=np.zeros(rows, np.int64),
            end=np.full(rows, limit, np.int64),
            tokens=np.zeros(long, np.int64),
            logprobs=np.zeros(long, real),
            sampling=np.zeros(long, real),
            uniform=np.zeros(long, real),
            stops=np.full((rows, stops), -1, np.int64),
            temperature=np.ones(rows, real),
            greedy=np.zeros(rows, bool),
            top_k=np.zeros(rows, np.int64),
            top_p=np.ones(rows, real),
            min_p=np.zeros(rows, real),
            filtered=np.zeros(rows, bool),
        )

    def copy(self, to: np.ndarray, source: "RowState", rows: np.ndarray) -> None:
        """Copy ``rows`` of a source that is no wider to rows ``to``."""
        for f in fields(self):
            mine, other = getattr(self, f.name), getattr(source, f.name)
            if mine.ndim == 1:
                mine[to] = other[rows]
            else:
                mine[to, : other.shape[1]] = other[rows]


class LengthBucket:
    """Rows of up to ``limit`` tokens, in a KV cache that grows with their number and length."""

    def __init__(self, limit: int, slab: Slab, most: int, fixed: bool = False, trimmed: bool = True) -> None:
        """fixed: all slots at once; trimmed: holes behind the last live row do not decode."""
        self.limit, self.slab, self._trimmed = limit, slab, trimmed
        self._most, self._fixed = most, fixed
        self.columns = RowState.blank(0, limit, 1)
        self.answers: list[SequenceState | None] = []
        self.watched: set[int] = set()
        """Rows whose tokens are watched: for stop strings, by a schema, for penalties."""
        self.noted: set[int] = set()
        """Rows that ask for alternatives."""

    @property
    def rows(self) -> np.ndarray:
        """Indices of live rows."""
        return np.flatnonzero(self.columns.live)

    def slots(self, tokens: int = 0) -> int:
        """Return the number of slots that attention reads in a pass, ``tokens`` at least."""
        if not self._fixed:
            return self.slab.capacity  # a slice would be copied, see KVCache
        return min(self.slab.capacity, round_up(max(tokens, int(self.columns.position.max()) + 1), KEYS))

    def reserve(self, rows: int, stops: int) -> None:
        """Allocate this many rows and stop tokens."""
        old, have, m = self.columns, len(self.answers), ROWS
        if rows <= have and stops <= old.stops.shape[1]:
            return
        total = max(have, min(round_up(self._most, m), max(round_up(rows, m), 2 * have)) if rows > have else have)
        self.columns = RowState.blank(total, self.limit, max(stops, old.stops.shape[1]))
        self.columns.copy(np.arange(have), old, np.arange(have))
        self.answers.extend([None] * (total - have))

    def fit(self, tokens: int) -> None:
        """Lay out the KV cache for all rows and sequences of this many tokens, without many spare slots.

        An empty lane gets the layout of a new one, so that its results do not depend on earlier work.
        """
        slab, rows = self.slab, len(self.answers)
        used = int(self.columns.position.max(initial=0))
        want = self.limit if self._fixed else min(self.limit, slots_for(max(tokens, used + 1)))
        keep = min(int(self.rows.max(initial=-1)) + 1, slab.rows)
        narrow = want != slab.capacity if keep == 0 else 3 * want <= 2 * slab.capacity
        if rows > slab.rows or want > slab.capacity or narrow:
            slab.layout(rows, want, keep, min(used, slab.capacity))

    def place(self, answers: Sequence[SequenceState], slab: Slab, rows: Sequence[int], draw: Draw) -> list[int]:
        """Add sequences whose newest token is not computed yet, and return their rows; the KV before it is in ``rows``
        of ``slab``."""
        to = self._holes(len(answers), max(len(a.request.params.stop_tokens) for a in answers))
        lengths = [len(a.tokens) for a in answers]
        self.fit(max(lengths))
        self.slab.copy(to.tolist(), slab, rows, max(lengths) - 1)
        count = max(min(a.end, self.limit) - n for a, n in zip(answers, lengths))
        numbers = draw([a.request for a in answers], lengths, count) if count else np.zeros((len(answers), 0))
        for row, answer, length, some in zip(to.tolist(), answers, lengths, numbers):
            self._set(row, answer)
            room = min(count, self.limit - length)
            self.columns.uniform[row, length : length + room] = some[:room]
        return to.tolist()

    def _holes(self, count: int, stops: int) -> np.ndarray:
        """Return the first ``count`` free rows."""
        self.reserve(int(self.columns.live.sum()) + count, stops)
        return np.flatnonzero(~self.columns.live)[:count]

    def _set(self, row: int, answer: SequenceState) -> None:
        c, p = self.columns, answer.request.params
        length = len(answer.tokens)
        c.live[row], c.position[row], c.end[row] = True, length - 1, answer.end
        c.tokens[row, length - 1] = answer.tokens[-1]
        c.stops[row] = -1
        c.stops[row, : len(p.stop_tokens)] = p.stop_tokens
        c.temperature[row], c.greedy[row] = p.temperature or 1.0, p.temperature == 0
        c.filtered[row] = p.filtered
        c.top_k[row], c.top_p[row], c.min_p[row] = (p.top_k, p.top_p, p.min_p) if p.filtered else (0, 1.0, 0.0)
        self._put(row, answer)

    def take(self, row: int) -> SequenceState:
        """Remove a row and return its sequence with all its tokens."""
        answer = self.settle(row)
        answer.keep_routing(self.slab, row, int(self.columns.position[row]))
        self._clear(row)
        return answer

    def _clear(self, row: int) -> None:
        c = self.columns
        c.live[row], c.position[row], c.end[row], c.stops[row] = False, 0, self.limit, -1
        c.temperature[row], c.greedy[row], c.filtered[row] = 1.0, False, False
        c.top_k[row], c.top_p[row], c.min_p[row] = 0, 1.0, 0.0
        self.slab.bind(row, ())
        self.answers[row] = None
        self.watched.discard(row)
        self.noted.discard(row)

    def settle(self, row: int) -> SequenceState:
        """Append the tokens of this lane to a row's sequence and return it; the row stays."""
        c, answer = self.columns, self.answer(row)
        some = slice(len(answer.tokens), int(c.position[row]) + 1)
        answer.append(c.tokens[row, some], c.logprobs[row, some], c.sampling[row, some] if c.filtered[row] else None)
        return answer

    def progress(self, seen: Mapping[int, int]) -> Iterator[tuple[int, Progress]]:
        """Yield what live rows have chosen behind the first ``seen[id]`` tokens of their completions, where there is
        something, with the id of the request."""
        c = self.columns
        for row in self.rows.tolist():
            answer = self.answer(row)
            if (id := answer.request.id) in seen and answer.ahead is None:
                at, end = len(answer.request.prompt) + seen[id], int(c.position[row]) + 1
                new = slice(max(at, len(answer.tokens)), end)
                tokens = np.concatenate([answer.tokens[at:], c.tokens[row, new]])
                logprobs = np.concatenate([answer.logprobs[at:], c.logprobs[row, new]])
                sampling = None
                if answer.sampling is not None:
                    drawn = c.sampling if c.filtered[row] else c.logprobs
                    sampling = np.concatenate([answer.sampling[at:], drawn[row, new]])
                if len(tokens):
                    alternatives = answer.alternatives(seen[id])
                    yield id, Progress(tokens, logprobs, alternatives, sampling, [*answer.versions])

    def answer(self, row: int) -> SequenceState:
        """Return the sequence of a live row, without the tokens of this lane."""
        answer = self.answers[row]
        assert answer is not None
        return answer

    def adapters(self, rows: int) -> list[LoadedAdapter | None]:
        """Return the adapters of the first ``rows`` rows."""
        return [answer.adapter if answer is not None else None for answer in self.answers[:rows]]

    def note(self, logp: Tensor, at: np.ndarray, counts: np.ndarray) -> None:
        """Keep the alternatives of the newest tokens of rows that ask for them. logp: float32 [T, V]; at: [rows,
        width], the indices in it of a row's first ``counts``."""
        for row in self.noted:
            for index in at[row, : counts[row]].tolist():
                self.answer(row).note(logp[index])

    def keep(self, path: np.ndarray, counts: np.ndarray) -> None:
        """Move the KV of what rows have computed to where it is read, before they advance. path: int64 [rows, width],
        the slots of their first ``counts`` tokens, from that of the newest one on."""
        place = np.arange(path.shape[1])
        for row in np.flatnonzero(((path != place) & (place < counts[:, None])).any(1)).tolist():
            assert isinstance(self.slab, KVCache)  # rows in pages have no drafts
            start = int(self.columns.position[row])
            self.slab.move(row, start + path[row, : counts[row]], start)

    def watch(self, row: int, tokens: Sequence[int]) -> int | None:
        """Return the number of new tokens of a live row with which its text contains one of its stop strings, or its
        schema allows nothing more; None if it goes on."""
        answer = self.answer(row)
        return next((count for count, token in enumerate(tokens, 1) if answer.watch(token)), None)

    def outgrown(self) -> np.ndarray:
        """Return the rows whose next token has no column here."""
        c = self.columns
        return np.flatnonzero(c.live & (c.position + 1 >= self.limit))

    def adopt(self, other: "LengthBucket", rows: np.ndarray, draw: Draw) -> None:
        """Move rows with state and KV from a smaller lane here."""
        to = self._holes(len(rows), other.columns.stops.shape[1])
        self.fit(other.limit)
        self._bring(other, rows, to, other.limit - 1)
        requests, more = [self.answer(row).request for row in to.tolist()], self.limit - other.limit
        self.columns.uniform[to, other.limit :] = draw(requests, [other.limit] * len(rows), more)

    def _bring(self, other: "LengthBucket", rows: np.ndarray, to: np.ndarray, tokens: int) -> None:
        """Move rows with state and the KV of their first tokens from a lane, which may be this one, to free rows."""
        self.slab.copy(to.tolist(), other.slab, rows.tolist(), tokens)
        self.columns.copy(to, other.columns, rows)
        for row, source in zip(to.tolist(), rows.tolist()):
            self._put(row, other.answer(source))
            other._clear(source)

    def _put(self, row: int, answer: SequenceState) -> None:
        self.answers[row] = answer
        self.slab.bind(row, answer.table.blocks)
        if answer.watching:
            self.watched.add(row)
        if answer.request.likeliest:
            self.noted.add(row)

    def compact(self) -> int:
        """Move the last rows into holes if that saves a multiple of rows; return the number of rows to decode."""
        self.fit(0)
        live = self.rows
        want = round_up(len(live), ROWS)
        late = live[live >= want]
        if len(late):
            holes = np.flatnonzero(~self.columns.live[:want])[: len(late)]
            self._bring(self, late, holes, int(self.columns.position[late].max()) + 1)
        return int(self.rows.max(initial=-1)) + 1 if self._trimmed else want

    def rules(self, rows: slice | np.ndarray) -> RuleColumns:
        """Return the sampling rules of some rows, each as often as it is there."""
        return RuleColumns(*(getattr(self.columns, name)[rows] for name in RuleColumns._fields))

    def advance(
        self, tokens: np.ndarray, logprobs: np.ndarray, sampling: np.ndarray | None, counts: np.ndarray
    ) -> np.ndarray:
        """Store the next tokens of each decoded row, the first ``counts`` of [rows, width]; return the rows that end
        with them."""
        n, c = len(tokens), self.columns
        row, place = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        at = c.position[row] + 1 + place
        c.tokens[row, at], c.logprobs[row, at] = tokens[row, place], logprobs[row, place]
        if sampling is not None:
            c.sampling[row, at] = sampling[row, place]
        c.position[:n] += counts
        newest = c.tokens[np.arange(n), c.position[:n]]
        ended = (c.stops[:n] == newest[:, None]).any(1) | (c.position[:n] + 1 >= c.end[:n])
        return np.flatnonzero(ended & c.live[:n])


def logit_changes(answers: Sequence[SequenceState | None], vocabulary: int, device: torch.device) -> Tensor | None:
    """Return what is added to the next logits of each sequence, float32 [n, vocabulary]; None if nothing is."""
    changes = {i: one for i, a in enumerate(answers) if a is not None and (one := a.change(vocabulary)) is not None}
    if not changes:
        return None
    found = np.zeros((len(answers), vocabulary), np.float32)
    for i, change in changes.items():
        found[i] = change
    return to_device([found], device)[0]
