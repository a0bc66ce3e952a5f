"""Stop strings: search in incrementally decoded text."""

from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np

_OPEN = "\N{REPLACEMENT CHARACTER}"
"""Output of decoders for a character with incomplete bytes."""


class Decodes(Protocol):
    """Methods of a tokenizer that the engine uses."""

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Return the text of token ids. special: include the text of special tokens."""

    def special(self) -> dict[str, int]:
        """Return the ids of the special tokens by their text."""

    def token(self, id: int) -> str:
        """Return a token as the vocabulary has it."""

    def to_json(self) -> str:
        """Return the whole tokenizer as the library tokenizers writes it."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text."""


class StopStrings:
    """Watches one completion. A stop string may begin in one token and end in another.

    special: texts of the special tokens. ``text`` is without them; a stop string that contains one is searched for in
    the completion with them spelled out. least: tokens with which no stop string counts yet.
    """

    def __init__(
        self, stops: tuple[str, ...], tokenizer: Decodes, special: Collection[str] = (), least: int = 0
    ) -> None:
        self._least = least
        spelled = tuple(s for s in stops if any(token in s for token in special))
        self.found = False
        self._read = GrowingText(tuple(s for s in stops if s not in spelled), tokenizer, special=False)
        self._spelled = GrowingText(spelled, tokenizer, special=True) if spelled else None
        self._lengths = [(0, 0)]  # of both texts after each token, where there are two
        self._end: int | None = None

    @property
    def text(self) -> str:
        """Completion so far, up to a stop string."""
        return self._read.text[: self._end]

    def push(self, ids: Iterable[int]) -> bool:
        """Add the next tokens; True once the completion contains a stop string, and ``text`` then ends before it."""
        for id in ids:
            places = [self._read.push(id)]
            if self._spelled is not None:
                place = self._spelled.push(id)
                self._lengths.append((len(self._spelled.text), len(self._read.text)))
                places.append(place if place is None else self._unspelled(place))
            ends = [place for place in places if place is not None]
            self._least -= 1
            if ends and self._least < 0:
                self.found, self._end = True, min(ends)
        return self.found

    def _unspelled(self, place: int) -> int:
        """The place in the text of a place in the spelled one; in a special token it is where that was left out."""
        token = bisect_right(self._lengths, place, key=lambda lengths: lengths[0])
        (spelled, read), (_, end) = self._lengths[token - 1 : token + 1]
        return min(read + place - spelled, end)


class GrowingText:
    """Text of tokens that come one by one, searched for strings. special: with the special tokens in it."""

    def __init__(self, wanted: tuple[str, ...], tokenizer: Decodes, *, special: bool) -> None:
        self.text = ""
        self._wanted, self._tokenizer, self._special = wanted, tokenizer, special
        self._ids: list[int] = []
        self._context = self._settled = 0
        self._longest = max(map(len, wanted), default=0)

    def push(self, id: int) -> int | None:
        """Add a token; return the first place of a wanted string that the text has with it, None without one.

        Only the newest tokens are decoded, together with those of the piece before, as how a token reads may depend
        on its neighbour. A character that is cut in two waits for its other half.
        """
        self._ids.append(id)
        before = self._tokenizer.decode(self._ids[self._context : self._settled], self._special)
        now = self._tokenizer.decode(self._ids[self._context :], self._special)
        if now.endswith(_OPEN) or len(now) <= len(before):
            return None
        self._context, self._settled = self._settled, len(self._ids)
        begin = max(0, len(self.text) - self._longest + 1)
        self.text += now[len(before) :]
        return min((at for at in (self.text.find(s, begin) for s in self._wanted) if at >= 0), default=None)


def completion_text(tokenizer: Decodes | None, tokens: np.ndarray, stop_tokens: tuple[int, ...]) -> str:
    """The completion decoded, without its end token; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    ids = tokens.tolist()
    if ids and ids[-1] in stop_tokens:
        ids.pop()
    return tokenizer.decode(ids)
