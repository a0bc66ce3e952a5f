"""Stop strings: search in incrementally decoded text."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from tilth.data.tokenizer import NO_TEXT


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


class FoundString(NamedTuple):
    """A string, and its place in a text."""

    place: int
    string: str


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
        read = tuple(s for s in stops if s not in spelled)
        self.found: FoundString | None = None
        """What has ended the completion, of several strings at one place the shortest."""
        self._growing: GrowingText | SpelledText = GrowingText(read, tokenizer, special=False)
        if spelled:
            self._growing = SpelledText(tokenizer, read, spelled)

    @property
    def text(self) -> str:
        """Completion so far, up to a stop string."""
        return self._growing.text[: self.found.place if self.found else None]

    def push(self, ids: Iterable[int]) -> bool:
        """Add the next tokens; True once the completion contains a stop string, and ``text`` then ends before it."""
        for id in ids:
            found = self._growing.push(id)
            self._least -= 1
            if found is not None and self._least < 0:
                self.found = found
        return self.found is not None


class GrowingText:
    """Text of tokens that come one by one, searched for strings. special: with the special tokens in it."""

    def __init__(self, wanted: tuple[str, ...], tokenizer: Decodes, *, special: bool) -> None:
        self.text = ""
        self._wanted, self._tokenizer, self._special = sorted(wanted, key=len), tokenizer, special
        self._ids: list[int] = []
        self._context = self._settled = 0

    def push(self, id: int) -> FoundString | None:
        """Add a token; return the first wanted string that the text has with it and had not before, None without one.

        Only the newest tokens are decoded, together with those of the piece before, as how a token reads may depend
        on its neighbour. A character that is cut in two waits for its other half.
        """
        self._ids.append(id)
        before = self._tokenizer.decode(self._ids[self._context : self._settled], self._special)
        now = self._tokenizer.decode(self._ids[self._context :], self._special)
        if now.endswith(NO_TEXT) or len(now) <= len(before):
            return None
        self._context, self._settled = self._settled, len(self._ids)
        had = len(self.text)
        self.text += now[len(before) :]
        places = [FoundString(self.text.find(s, max(0, had - len(s) + 1)), s) for s in self._wanted]
        return min((one for one in places if one.place >= 0), key=itemgetter(0), default=None)


class SpelledText:
    """Text of a completion without its special tokens, beside the text in which they are spelled out."""

    def __init__(self, tokenizer: Decodes, wanted: tuple[str, ...] = (), wanted_spelled: tuple[str, ...] = ()) -> None:
        """wanted: strings to find in the one text, wanted_spelled: in the other."""
        self._read = GrowingText(wanted, tokenizer, special=False)
        self._spelled = GrowingText(wanted_spelled, tokenizer, special=True)
        self._lengths = [(0, 0)]
        """Characters of the spelled text and of the other one after each token."""

    @property
    def text(self) -> str:
        """Text without special tokens."""
        return self._read.text

    @property
    def spelled(self) -> str:
        """Text with special tokens."""
        return self._spelled.text

    def push(self, id: int) -> FoundString | None:
        """Add a token; return the first wanted string that it completes, with its place in ``text``, None without
        one."""
        read, spelled = self._read.push(id), self._spelled.push(id)
        self._lengths.append((len(self.spelled), len(self.text)))
        if spelled is not None:
            spelled = spelled._replace(place=self.place(spelled.place))
        found = [one for one in (read, spelled) if one is not None]
        return min(found, key=lambda one: (one.place, len(one.string)), default=None)

    def place(self, spelled: int) -> int:
        """Return the place in ``text`` of a place in ``spelled``; in a special token it is where that was left out."""
        if spelled >= len(self.spelled):
            return len(self.text)
        token = bisect_right(self._lengths, spelled, key=lambda lengths: lengths[0])
        (begin, read), (_, end) = self._lengths[token - 1 : token + 1]
        return min(read + spelled - begin, end)

    def spelled_until(self, place: int) -> str:
        """Return ``spelled`` up to a place in ``text``, without special tokens that lie there."""
        token = bisect_left(self._lengths, place, key=lambda lengths: lengths[1])
        if not 0 < token < len(self._lengths):
            return self.spelled if token else ""
        (begin, read), (end, _) = self._lengths[token - 1 : token + 1]
        return self.spelled[: min(begin + place - read, end)]


def completion_text(tokenizer: Decodes | None, tokens: np.ndarray, stop_tokens: tuple[int, ...]) -> str:
    """The completion decoded, without its end token; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    ids = tokens.tolist()
    if ids and ids[-1] in stop_tokens:
        ids.pop()
    return tokenizer.decode(ids)
