"""Write what one model said in the tokens of another tokenizer, and align the two by characters.

Chunks of equal text are what two models with different tokenizers can be compared over (Minixhofer et al. 2025,
arXiv 2503.20083, section 3).
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.data.tokenizer import NO_TEXT, Tokenizer


class AlignedChunk(NamedTuple):
    """Tokens [start, end) and [other_start, other_end) of two tokenizers that stand for the same characters."""

    start: int
    end: int
    other_start: int
    other_end: int

    def moved(self, by: int, other_by: int) -> "AlignedChunk":
        """Return the chunk in a longer sequence, behind these numbers of tokens."""
        return AlignedChunk(self.start + by, self.end + by, self.other_start + other_by, self.other_end + other_by)


_CHARACTER = 4
"""Most tokens that one character is written in: bytes of UTF-8."""
_TEXT = re.compile(f"[^{NO_TEXT}]")


def boundaries(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of ids without special tokens, and (tokens, characters) before each place between two tokens that
    lies between two characters, (0, 0) first.

    Inside a character that several tokens share, and after bytes that are no text, is no such place.
    """
    text, found = tokenizer.decode(ids), [(0, 0)]
    before, head, torn, most = 0, "", 0, 0
    for count in range(1, len(ids) + 1):
        start, at = found[-1]
        if count - start > _CHARACTER:  # bytes that are no text: the next place is behind all that ``text`` has here
            if count - start == _CHARACTER + 1:
                torn = len(text) - at if (end := _TEXT.search(text, at)) is None else end.start() - at
                most = _characters(tokenizer, ids[start : count - 1])
            most += _characters(tokenizer, ids[count - 1 : count])
            if most <= torn or tokenizer.decode(ids[count - _CHARACTER : count]).endswith(NO_TEXT):
                continue
        # With the piece before it, since decoders treat the first token of a text in a way of its own.
        piece = tokenizer.decode(ids[before:count])
        new = piece[len(head) :]
        if piece.startswith(head) and not new.endswith(NO_TEXT) and text.startswith(new, at):
            before, head = start, tokenizer.decode(ids[start:count])
            found.append((count, at + len(new)))
    return text, found


def _characters(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Return the most characters that these tokens can stand for."""
    return sum(len(tokenizer.decode([id])) or 1 for id in ids)


def align(own: Tokenizer, ids: Sequence[int], other: Tokenizer, others: Sequence[int]) -> list[AlignedChunk]:
    """Return the smallest chunks of tokens that begin and end at the same characters in both tokenizations of one text.

    Left out: tokens without characters (special tokens), bytes that are no text, and what has no common end. Empty if
    the texts differ.
    """
    (text, mine), (same, theirs) = boundaries(own, ids), boundaries(other, others)
    if text != same:
        return []
    mine_at, theirs_at = _by_character(mine), _by_character(theirs)
    places = sorted(mine_at.keys() & theirs_at.keys())
    return [
        AlignedChunk(mine_at[start][1], mine_at[end][0], theirs_at[start][1], theirs_at[end][0])
        for start, end in pairwise(places)
        if NO_TEXT not in text[start:end]
    ]


def _by_character(places: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Return character -> least and most tokens before it: those between the two have no characters."""
    found: dict[int, tuple[int, int]] = {}
    for tokens, at in places:
        found[at] = (found.get(at, (tokens, tokens))[0], tokens)
    return found


class Translation(NamedTuple):
    """One sequence in the tokens of another tokenizer.

    tokens: int64 [T]; mask: uint8 [T], 1 in a chunk; chunks: of the tokens that the policy chose, in order.
    """

    tokens: np.ndarray
    mask: np.ndarray
    chunks: list[AlignedChunk]


class Translator:
    """Translate sequences of tokens from one tokenizer to another.

    A chunk ends where both tokenizers end it alike. "3" is another event for characters than for tokens of numbers,
    where it says that the number ends; so it joins what stands behind it (tokenization bias: Phan et al. 2024,
    arXiv 2410.09303). Text is decoded and encoded again, what the policy chose and what it did not apart, so that no
    token is of both. A special token becomes the one with its text, else the one with its name (``eos_token``); one
    that ends a completion becomes one that ends a completion there. Tokens that a tokenizer puts before every text are
    replaced by the other's.
    """

    def __init__(self, own: Tokenizer, other: Tokenizer, most: int) -> None:
        """most: tokens of a translation; the rest is cut off and is in no chunk. Raises DataError for a tokenizer that
        changes a text where it begins: runs of a sequence are read apart."""
        for whose, tokenizer in (("policy", own), ("teacher", other)):
            if (character := _character(tokenizer)) and not _joins(tokenizer, character):
                raise DataError(
                    f"the {whose}'s tokenizer writes a space before every text, so the parts of a sequence are not the "
                    "text of the whole; use one that does not (byte-level, as of Llama 3 or Qwen)",
                    key=f"align.{whose}",
                )
        self.own, self.other, self.most = own, other, most
        self._begin, self._other_begin = own.encode(""), other.encode("")
        self._written = _counterparts(own, other)
        stops = {stop: self._written[stop] for stop in own.stop_ids}
        self._chosen = self._written | {s: i if i in other.stop_ids else other.eos_id for s, i in stops.items()}
        self._longer, self._other_longer = _Continuations(own), _Continuations(other)  # slow: it decodes all tokens
        self._special = np.array(sorted({*own.special().values(), *own.stop_ids, own.pad_id}), np.int64)

    def translate(self, ids: np.ndarray, mask: np.ndarray) -> Translation:
        """Translate one sequence. ids: int64 [T]; mask: [T], not 0 where the policy chose the token.

        The translation ends where the policy chose what the other tokenizer has no tokens for. Raises DataError where a
        prompt has such a text or special token.
        """
        first = len(self._begin) if ids[: len(self._begin)].tolist() == self._begin else 0
        found, chunks, settled = list(self._other_begin), list[AlignedChunk](), list[bool]()
        for start, end, special in self._runs(ids, mask, first):
            some, chosen = ids[start:end].tolist(), bool(mask[start])
            theirs = self._special_token(some[0], chosen) if special else self._text(some, chosen)
            if theirs is None:
                break
            if chosen:
                here = [AlignedChunk(0, 1, 0, 1)] if special else align(self.own, some, self.other, theirs)
                chunks += [chunk.moved(start, len(found)) for chunk in here]
                settled += [special or self._settled(some[c.end - 1], theirs[c.other_end - 1]) for c in here]
            found += theirs
        chunks = _merged(chunks, settled)
        chunks = [chunk for chunk in chunks if chunk.other_start and chunk.other_end <= self.most]
        tokens = np.array(found[: self.most], np.int64)
        marks = np.zeros(len(tokens), np.uint8)
        for chunk in chunks:
            marks[chunk.other_start : chunk.other_end] = 1
        return Translation(tokens, marks, chunks)

    def _settled(self, id: int, other_id: int) -> bool:
        """True if these last tokens of a chunk end its text alike: of all that would go on to longer tokens, at most
        half goes on in one of the two tokenizers alone."""
        mine, theirs = self._longer.after(id), self._other_longer.after(other_id)
        return 2 * len(mine ^ theirs) <= len(mine | theirs)

    def _runs(self, ids: np.ndarray, mask: np.ndarray, first: int) -> list[tuple[int, int, bool]]:
        """Return (start, end, special) of each special token, and of each run of others with one mask."""
        special = np.isin(ids, self._special)
        apart = (mask[1:] != mask[:-1]) | special[1:] | special[:-1]
        borders = [first, *(i for i in (np.flatnonzero(apart) + 1).tolist() if i > first), len(ids)]
        return [(start, end, bool(special[start])) for start, end in pairwise(borders) if end > start]

    def _special_token(self, id: int, chosen: bool) -> list[int] | None:
        """Return the counterpart of a special token; None if there is none of one that the policy chose."""
        found = (self._chosen if chosen else self._written).get(id)
        if found is None and not chosen:
            token = self.own.token(id)
            raise DataError(
                f"a prompt has the special token {token!r}, which the teacher's tokenizer lacks; use a data.template "
                "whose special tokens both have, or none",
                key=f"align.{token}",
            )
        return None if found is None else [found]

    def _text(self, ids: list[int], chosen: bool) -> list[int] | None:
        """Return the tokens of a text; None if there are none of one that the policy chose."""
        try:
            return self.other.encode(self.other.plain(self.own.decode(ids)), special=False)
        except DataError:
            if not chosen:
                raise
            return None


def _merged(chunks: Sequence[AlignedChunk], settled: Sequence[bool]) -> list[AlignedChunk]:
    """Join each chunk whose end is not settled with the one behind it; without one it is left out."""
    found, open_chunk = list[AlignedChunk](), None
    for chunk, ends in zip(chunks, settled):
        if open_chunk is not None and (open_chunk.end, open_chunk.other_end) == (chunk.start, chunk.other_start):
            chunk = AlignedChunk(open_chunk.start, chunk.end, open_chunk.other_start, chunk.other_end)
        open_chunk = None if ends else chunk
        found += [chunk] if ends else []
    return found


class _Continuations:
    """Texts by which tokens of a tokenizer continue others."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special()
        ids = [id for text, id in tokenizer.vocabulary().items() if text not in special]
        self._texts = {id: text for id in ids if NO_TEXT not in (text := tokenizer.decode([id])) and text}
        self._sorted, self._known = sorted(set(self._texts.values())), dict[str, frozenset[str]]()

    def after(self, id: int) -> frozenset[str]:
        """Return what stands behind the text of a token in the longer tokens that begin with it."""
        text = self._texts.get(id, NO_TEXT)
        if text not in self._known:
            first = bisect_right(self._sorted, text)
            longer = takewhile(lambda other: other.startswith(text), islice(self._sorted, first, None))
            self._known[text] = frozenset(other[len(text) :] for other in longer)
        return self._known[text]


def _character(tokenizer: Tokenizer) -> str:
    """Return a character that is a token and no space; empty if there is none."""
    texts = (tokenizer.decode([id]) for id in sorted(tokenizer.vocabulary().values()))
    return next((text for text in texts if len(text) == 1 and text.isprintable() and text not in (" ", NO_TEXT)), "")


def _joins(tokenizer: Tokenizer, character: str) -> bool:
    """Return True if tokens of two texts, one behind the other, are those of the texts joined."""
    first = tokenizer.encode(character, special=False)
    for text in (character, f" {character}"):
        try:
            second = tokenizer.encode(text, special=False)
        except DataError:  # a tokenizer without spaces
            continue
        if tokenizer.decode([*first, *second]) != character + text or tokenizer.decode(second) != text:
            return False
    return True


def _counterparts(own: Tokenizer, other: Tokenizer) -> dict[int, int]:
    """Return the id of a special token -> that of the other tokenizer with the same text, else the same name, else, of
    one that ends a completion, that of its end."""
    mine, theirs, special = own.vocabulary(), other.vocabulary(), other.special()
    found = {id: special[text] for text, id in own.special().items() if text in special}
    for name, text in own.special_tokens.items():
        if text in mine and (named := theirs.get(other.special_tokens.get(name, ""))) is not None:
            found.setdefault(mine[text], named)
    for stop in own.stop_ids:
        found.setdefault(stop, other.eos_id)
    return found
