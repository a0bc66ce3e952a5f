"""Drafts of completions from what was said before: by earlier completions of a prompt, its group and the row itself.

A draft follows the most frequent continuation of the longest run of newest tokens that occurred before (SuffixDecoding,
arXiv 2411.04975; SRT, arXiv 2601.09083). A tree holds the runs of one prompt while rows of it are in flight; at rest,
completions of earlier steps take four bytes for each token.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count

import numpy as np

from tilth.engines.drafter import USUAL, Draft, Drafter, DraftError, Drawn

HISTORY = 1 << 24
"""Most tokens of completions at rest, over all prompts; the oldest completions go first."""
KEPT = 1 << 13
"""Tokens of completions of a prompt, the newest, of which a tree is made."""
PROMPT = 1 << 10
"""Tokens of a prompt, the last, that are in its tree."""
PAUSE = 16
"""Most tokens that a row says without a look at its tree, after drafts that were not worth it."""
_WIDTH = 4
"""Bytes of a token in a text."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Most frequent token behind a run of ``length`` tokens: ``count`` of ``total`` times."""

    token: int
    length: int
    count: int
    total: int


class SuffixTree:
    """Counts of the tokens that followed each run of 1, 2, 4 .. ``depth`` tokens in some texts.

    These runs are the levels of the tree of all suffixes that are looked at: a token costs an entry for each level,
    instead of one for each depth. A text is a sequence of int32 tokens, as bytes.
    """

    def __init__(self, depth: int) -> None:
        """depth: longest run in tokens."""
        self.lengths = sorted({depth, *(1 << i for i in range(depth.bit_length()))}, reverse=True)
        self.tokens = 0
        """Tokens that were counted."""
        self._behind: dict[bytes, int | dict[int, int]] = {}
        """Run -> the only token behind it, which came once, or the counts of all."""

    def add(self, text: bytes | bytearray, start: int) -> None:
        """Count the tokens of a text from number ``start`` on, each behind the runs before it."""
        first = max(0, start - self.lengths[0])
        raw, behind = bytes(text[first * _WIDTH :]), self._behind
        for at, token in enumerate(np.frombuffer(raw, np.int32)[start - first :].tolist(), start - first):
            self.tokens += 1
            for length in self.lengths:
                if length > at:
                    continue
                run = raw[(at - length) * _WIDTH : at * _WIDTH]
                known = behind.get(run)
                if known is None:
                    behind[run] = token
                elif isinstance(known, dict):
                    known[token] = known.get(token, 0) + 1
                else:
                    behind[run] = {known: 2} if known == token else {known: 1, token: 1}

    def counts(self, run: bytes) -> dict[int, int]:
        """Return how often each token came behind a run."""
        known = self._behind.get(run, {})
        return known if isinstance(known, dict) else {known: 1}

    def guesses(self, context: bytes) -> list[Guess]:
        """Return what followed the longest run of newest tokens of a text that is known, the most frequent first; of
        equal ones the first that came."""
        for length in self.lengths:
            if length * _WIDTH <= len(context) and (counts := self.counts(context[-length * _WIDTH :])):
                total = sum(counts.values())
                order = sorted(counts, key=counts.__getitem__, reverse=True)
                return [Guess(token, length, counts[token], total) for token in order]
        return []

    def longer(self, context: bytes, token: int) -> bytes:
        """Return a text with one token more, as far as it is looked at."""
        return context[-self.lengths[0] * _WIDTH :] + token.to_bytes(_WIDTH, "little")


@dataclass(slots=True)
class _Tally:
    """Drafted tokens that were compared with what the target said. prior: share of hits that two tries stand for."""

    hits: float
    tries: float = 2.0

    def note(self, hit: bool, most: int = 256) -> None:
        """Count one; older ones count half whenever there are ``most``."""
        self.hits, self.tries = self.hits + hit, self.tries + 1
        if self.tries >= most:
            self.hits, self.tries = self.hits / 2, self.tries / 2


@dataclass(slots=True)
class _Guessed:
    """A guess that is compared with what the target says, and those behind it. drafted: it is in the draft."""

    token: int
    tally: _Tally
    children: "list[_Guessed]" = field(default_factory=list)
    drafted: bool = False


@dataclass(slots=True)
class _Row:
    """A completion in flight, behind the last tokens of its prompt."""

    prompt: bytes
    text: bytearray
    start: int
    """Number of its first token in the text."""
    counted: int
    """Tokens of the text that are in the tree, or need not be."""
    fortune: _Tally = field(default_factory=lambda: _Tally(4.0, 4.0))
    """Hits of its drafts, against the number that was expected."""
    drafted: list[_Guessed] | None = None
    """First guesses of a draft without a verdict; None: there is none."""
    pause: int = 0
    left: int = 0
    """Tokens that it says before it looks at its tree again, of ``pause``."""
    grown: "_Grown | None" = None
    """Draft behind the one without a verdict, if all of its likeliest chain stands; then the next one."""


@dataclass(slots=True)
class _Grown:
    """Guesses behind tokens that a row has not said yet, for a budget and a least chance."""

    said: list[int]
    asked: tuple[int, float]
    first: list[_Guessed]


def _in_order(first: Sequence[_Guessed]) -> Draft:
    """Return the draft of guesses, each followed by the likeliest one behind it, whose place is then its slot."""
    tokens, parents = list[int](), list[int]()
    left = [(one, 0) for one in reversed(first)]
    while left:
        one, parent = left.pop()
        if one.drafted:
            tokens.append(one.token)
            parents.append(parent)
            left += [(child, len(tokens)) for child in reversed(one.children)]
    return Draft(tokens, parents)


class SuffixDrafter(Drafter):
    """A ``Drafter`` by trees of suffixes.

    Each continuation has a chance: the measured share of hits among continuations of its kind (length of the run, share
    of the token behind it, the most frequent one or another), over all rows; times how the row's own drafts fared
    against that, lately, times the chance of what it follows. The first token
    of a draft is compared with what the target says even if no pass verifies it, so the shares stay measured where
    drafts do not pay.
    """

    seconds = 40e-6
    """Measured on a Xeon, in drafts of 8 tokens."""

    def __init__(self, depth: int, history: int = HISTORY, kept: int = KEPT, *, branches: bool = False) -> None:
        """depth: longest run that is looked up, in tokens; history and kept: see HISTORY and KEPT; branches: several
        continuations of a run may be in a draft."""
        self.depth, self._most, self._kept, self._branches = depth, history, kept, branches
        self._rows: dict[int, _Row] = {}
        self._trees: dict[bytes, SuffixTree] = {}
        """Of prompts with rows in flight."""
        self._said: dict[bytes, deque[bytes]] = {}
        """Texts of earlier completions by prompt, the newest last."""
        self._order: deque[bytes] = deque()
        """Prompts of all texts at rest, the oldest first."""
        self.tokens = 0
        """Tokens of texts at rest."""
        self._tallies: dict[tuple[int, int, bool], _Tally] = {}
        self._growing: dict[int, tuple[int, float]] = {}
        """Rows with a draft behind which nothing has been guessed -> budget and least chance."""

    def begin(self, row: int, prompt: np.ndarray, completion: np.ndarray, drawn: Drawn = USUAL) -> None:
        """Take a row into flight, or what a row in flight has said without a draft. See ``Drafter``."""
        if (known := self._rows.get(row)) is not None:
            said = len(known.text) // _WIDTH - known.start
            known.text += completion[said:].astype(np.int32).tobytes()
            known.drafted = known.grown = None
            self._growing.pop(row, None)
            return
        self._rows[row] = new = self._row(prompt, completion)
        digest = new.prompt
        tree = self._trees.get(digest)
        if tree is None or tree.tokens > 4 * self._kept + PROMPT:
            self._trees[digest] = self._planted(digest, prompt)

    def _row(self, prompt: np.ndarray, completion: np.ndarray) -> _Row:
        last = prompt[-self.depth :].astype(np.int32)
        text = bytearray(last.tobytes() + completion.astype(np.int32).tobytes())
        digest = blake2b(np.ascontiguousarray(prompt, np.int64).tobytes(), digest_size=16).digest()
        return _Row(digest, text, len(last), len(last))

    def _planted(self, digest: bytes, prompt: np.ndarray) -> SuffixTree:
        """Return the tree of a prompt and of what was said to it; rows in flight are counted anew."""
        tree, some, room = SuffixTree(self.depth), list[bytes](), self._kept
        tree.add(prompt[-PROMPT:].astype(np.int32).tobytes(), 1)
        start = min(len(prompt), self.depth)
        for text in reversed(self._said.get(digest, ())):
            some.append(text)
            room -= len(text) // _WIDTH - start
            if room <= 0:
                break
        for text in reversed(some):
            tree.add(text, start)
        for row in self._rows.values():
            if row.prompt == digest:
                row.counted = row.start
        return tree

    def propose(self, rows: Sequence[int], budget: Sequence[int], least: float) -> list[Draft]:
        return [self._propose(row, most, least) for row, most in zip(rows, budget, strict=True)]

    def _propose(self, number: int, most: int, least: float) -> Draft:
        row = self._rows[number]
        if row.drafted is not None:
            raise DraftError(
                "a row's last draft has no verdict yet; accept() comes between two drafts", key="draft.open"
            )
        row.drafted, grown, row.grown = [], row.grown, None
        if row.left:
            row.left -= 1
            return Draft()
        if grown is not None and grown.asked == (most, least):
            row.drafted = grown.first
        else:
            self._grow(row, row.drafted, bytes(row.text[-self.depth * _WIDTH :]), most, least)
        draft = _in_order(row.drafted)
        if draft.tokens:
            self._growing[number] = most, least
        row.pause = 0 if draft.tokens else min(2 * row.pause + 1, PAUSE)
        row.left = row.pause
        return draft

    def grow(self) -> bool:
        """Guess behind the draft of a row, as if all of its likeliest chain stood, and what is behind that was said."""
        while self._growing:
            number, asked = self._growing.popitem()
            row, said, guessed = self._rows[number], list[int](), None
            context, level = bytes(row.text[-self.depth * _WIDTH :]), row.drafted
            while level:
                guessed = level[0]
                said.append(guessed.token)
                context, level = self._trees[row.prompt].longer(context, guessed.token), guessed.children
            if guessed is not None and not guessed.drafted:
                row.grown = _Grown(said, asked, [])
                self._grow(row, row.grown.first, context, *asked)
                return True
        return False

    def _grow(self, row: _Row, first: list[_Guessed], behind: bytes, most: int, least: float) -> None:
        """Write guesses behind a text, the likeliest first, of equal ones what was found first, until there are
        ``most``, or one has a smaller chance than ``least``; that one is compared alone."""
        tree, luck, number = self._count(row), row.fortune.hits / row.fortune.tries, count()
        open_: list[tuple[float, int, _Guessed, list[_Guessed], bytes]] = []

        def guess(siblings: list[_Guessed], context: bytes, chance: float) -> None:
            for rank, found in enumerate(tree.guesses(context)[: None if self._branches else 1]):
                tally = self._tally(found, rank)
                own = chance * min(1.0, luck * tally.hits / tally.tries)
                if not rank or own >= least:
                    heappush(open_, (-own, next(number), _Guessed(found.token, tally), siblings, context))

        guess(first, behind, 1.0)
        while open_:
            chance, _, one, siblings, context = heappop(open_)
            siblings.append(one)
            if not most or -chance < least:
                return
            most, one.drafted = most - 1, True
            guess(one.children, tree.longer(context, one.token), -chance)

    def _count(self, row: _Row) -> SuffixTree:
        """Return the tree of a row, with all that the row has said."""
        tree = self._trees[row.prompt]
        if row.counted * _WIDTH < len(row.text):
            tree.add(row.text, row.counted)
            row.counted = len(row.text) // _WIDTH
        return tree

    def _tally(self, found: Guess, rank: int) -> _Tally:
        kind = found.length, 4 * found.count // found.total + (1 < found.count == found.total), rank > 0
        if kind not in self._tallies:
            self._tallies[kind] = _Tally(found.count / found.total)
        return self._tallies[kind]

    def accept(self, rows: Sequence[int], said: Sequence[np.ndarray]) -> None:
        for number, tokens in zip(rows, said, strict=True):
            row, right = self._rows[number], tokens.tolist()
            self._growing.pop(number, None)
            if row.grown is not None and (row.drafted is None or row.grown.said != right):
                row.grown = None
            level = row.drafted or []
            for token in right:
                children = list[_Guessed]()
                for one in level:
                    hit = one.token == token
                    row.fortune.hits += hit
                    row.fortune.tries += one.tally.hits / one.tally.tries
                    one.tally.note(hit)
                    children = one.children if hit else children
                level = children
            if row.fortune.tries > 32:
                row.fortune = _Tally(row.fortune.hits / 2, row.fortune.tries / 2)
            row.drafted = None
            row.text += tokens.astype(np.int32).tobytes()

    def forget(self, row: int) -> None:
        self._growing.pop(row, None)
        if (gone := self._rows.pop(row, None)) is not None:
            self._rest(gone)

    def note(self, prompt: np.ndarray, completion: np.ndarray) -> None:
        self._rest(self._row(prompt, completion))

    def _rest(self, gone: _Row) -> None:
        """Keep what was said to a prompt, in its tree too while others are in flight."""
        text = bytes(gone.text)
        self._said.setdefault(gone.prompt, deque()).append(text)
        self._order.append(gone.prompt)
        self.tokens += len(text) // _WIDTH
        if any(other.prompt == gone.prompt for other in self._rows.values()):
            self._count(gone)
        else:
            self._trees.pop(gone.prompt, None)
        while self.tokens > self._most:
            oldest = self._order.popleft()
            texts = self._said[oldest]
            self.tokens -= len(texts.popleft()) // _WIDTH
            if not texts:
                del self._said[oldest]
