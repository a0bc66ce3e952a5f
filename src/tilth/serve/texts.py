"""Text and log-probs of completions, as OpenAI's interface writes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilth.core.trajectory import Likeliest
from tilth.data.tokenizer import NO_TEXT, Tokenizer
from tilth.engines.stops import GrowingText, SpelledText
from tilth.envs.calls import before_calls


class StreamedText:
    """Text of a completion while its tokens come: the part that nothing can change any more.

    ends: tokens that end it, which are no text. stop: strings that may still take away its last characters. calls:
    what may be a call of a tool is uncertain.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], stop: Sequence[str], calls: bool = False) -> None:
        self._growing: GrowingText | SpelledText = GrowingText((), tokenizer, special=False)
        if calls:
            self._growing = SpelledText(tokenizer)
        self._ends, self._held = set(ends), max((len(one) - 1 for one in stop), default=0)
        self.sent = ""

    def hear(self, tokens: np.ndarray) -> str:
        """Add tokens; return the text that is certain with them."""
        for token in tokens.tolist():
            if token not in self._ends:
                self._growing.push(token)
        text = self._growing.text
        certain = text[: max(len(text) - self._held, 0)]
        if isinstance(self._growing, SpelledText):
            return certain[: self._growing.place(len(before_calls(self._growing.spelled)))].rstrip()
        return certain

    def send(self, text: str) -> str:
        """Return what a longer text has behind all that was sent, and count it as sent; nothing for another text."""
        if not text.startswith(self.sent):
            return ""
        new, self.sent = text[len(self.sent) :], text
        return new


def spelled(tokenizer: Tokenizer, id: int) -> str:
    """Return a token as text, special ones too; a part of a character as the vocabulary writes it."""
    text = tokenizer.decode([id], special=True)
    return tokenizer.token(id) if NO_TEXT in text else text


def completion_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float | None], top: Likeliest | None, offset: int
) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice. top: rows for the last tokens; offset: of the first character.

    The chosen token is among the alternatives, as in OpenAI's interface.
    """
    texts = [spelled(tokenizer, id) for id in ids]
    ends = np.cumsum([offset, *map(len, texts)]).tolist()
    found: dict[str, Any] = {"tokens": texts, "token_logprobs": list(logprobs), "text_offset": ends[:-1]}
    without = len(ids) - len(top.ids) if top is not None else len(ids)
    rows: list[dict[str, float] | None] = [None] * without
    for at in range(without, len(ids)):
        assert top is not None
        row: dict[str, float] = {}
        for id, logprob in zip(top.ids[at - without].tolist(), top.logprobs[at - without].tolist()):
            row.setdefault(spelled(tokenizer, id), logprob)
        if (own := logprobs[at]) is not None:
            row.setdefault(texts[at], own)
        rows.append(row)
    return {**found, "top_logprobs": rows if top is not None else None}


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float], top: Likeliest | None
) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat completion's choice."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        text = spelled(tokenizer, id)
        whole = NO_TEXT not in tokenizer.decode([id], special=True)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    rows = []
    for at, (id, logprob) in enumerate(zip(ids, logprobs)):
        pairs = [] if top is None else zip(top.ids[at].tolist(), top.logprobs[at].tolist())
        rows.append({**entry(id, logprob), "top_logprobs": [entry(*pair) for pair in pairs]})
    return {"content": rows, "refusal": None}
