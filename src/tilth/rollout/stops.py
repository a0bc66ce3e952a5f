"""Stop strings: found in text that is decoded piece by piece, for the requests that ask for them."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

_OPEN = "\N{REPLACEMENT CHARACTER}"
"""How decoders show a character whose bytes are not complete yet."""


class Decodes(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        ...


class StopStrings:
    """Watches one completion. A stop string may begin in one token and end in another."""

    def __init__(self, stops: tuple[str, ...], tokenizer: Decodes) -> None:
        self.stops = stops
        self.tokenizer = tokenizer
        self.text = ""
        self.found = False
        self._ids: list[int] = []
        self._context = self._settled = 0
        self._longest = max(len(s) for s in stops)

    def push(self, ids: Iterable[int]) -> bool:
        """Add the next tokens; True once the completion contains a stop string, and ``text`` then ends before it.

        Only the newest tokens are decoded, together with those of the piece before, as how a token reads may depend
        on its neighbour. A character that is cut in two waits for its other half.
        """
        self._ids.extend(ids)
        before = self.tokenizer.decode(self._ids[self._context : self._settled])
        now = self.tokenizer.decode(self._ids[self._context :])
        if now.endswith(_OPEN) or len(now) <= len(before):
            return False
        self._context, self._settled = self._settled, len(self._ids)
        return self._search(now[len(before) :])

    def _search(self, piece: str) -> bool:
        begin = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        places = [at for at in (self.text.find(s, begin) for s in self.stops) if at >= 0]
        if places:
            self.text, self.found = self.text[: min(places)], True
        return self.found


def completion_text(tokenizer: Decodes | None, tokens: np.ndarray, stop_tokens: tuple[int, ...]) -> str:
    """The completion decoded, without its end token; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    ids = tokens.tolist()
    if ids and ids[-1] in stop_tokens:
        ids.pop()
    return tokenizer.decode(ids)
