"""Choice of ``/v1/completions``."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tilth.core.trajectory import Likeliest, Trajectory
from tilth.data.tokenizer import Tokenizer
from tilth.engines.completion import Delta
from tilth.engines.request import Request, TextScores
from tilth.serve.schemas import CompletionBody
from tilth.serve.texts import StreamedText, completion_logprobs


class TextChoice:
    """One completion of a text. scores: log-probs of the prompt, if it is echoed with them."""

    def __init__(
        self, tokenizer: Tokenizer, index: int, request: Request, body: CompletionBody, scores: TextScores | None
    ) -> None:
        self.tokenizer, self.index, self.request, self.body = tokenizer, index, request, body
        self.prompt = list(request.prompt)
        self._scores = scores
        params = request.params
        self._text = StreamedText(tokenizer, params.stop_tokens, params.stop)
        self._offset = 0

    @property
    def echoed(self) -> str:
        """Text of the prompt, if it is echoed."""
        if not self.body.echo:
            return ""
        return self.tokenizer.decode(self.prompt, special=True)

    def whole(self, trajectory: Trajectory) -> dict[str, Any]:
        mine = trajectory.mask == 1
        ids, logprobs = trajectory.tokens[mine].tolist(), trajectory.logprobs[mine].tolist()
        return self._choice(
            self.echoed + trajectory.text, ids, logprobs, trajectory.likeliest, trajectory.finish, prompt=True
        )

    def silently(self) -> dict[str, Any]:
        """Return the choice of an echo without a completion."""
        return self._choice(self.echoed, [], [], None, "length", prompt=True)

    def first(self) -> Iterable[dict[str, Any]]:
        if self.body.echo or self.body.return_token_ids:
            yield self._choice(self.echoed, [], [], None, None, prompt=True)

    def delta(self, delta: Delta) -> Iterable[dict[str, Any]]:
        certain, finish = self._text.hear(delta.tokens), None
        if delta.whole is not None:  # its last token may have text behind a stop string
            certain, finish = delta.whole.text, delta.whole.finish
        text = self._text.send(certain)
        found = self._choice(text, delta.tokens.tolist(), delta.logprobs.tolist(), delta.likeliest, finish)
        if text or finish or self.body.logprobs is not None or self.body.return_token_ids:
            yield found

    def _choice(
        self,
        text: str,
        ids: list[int],
        logprobs: list[float],
        top: Likeliest | None,
        finish: str | None,
        prompt: bool = False,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"index": self.index, "text": text, "finish_reason": finish, "logprobs": None}
        shown = prompt and bool(self.body.echo)
        if self.body.logprobs is not None:
            found["logprobs"] = self._logprobs(ids, logprobs, top, shown)
        if self.body.return_token_ids:
            found |= {"token_ids": ids, "prompt_token_ids": self.prompt if prompt else None}
        return found

    def _logprobs(self, ids: list[int], logprobs: list[float], top: Likeliest | None, shown: bool) -> dict[str, Any]:
        every: list[float | None] = [*logprobs]
        if shown and self._scores is not None:
            own, scores = self.prompt, self._scores
            ids, every = [*own, *ids], [None, *scores.logprobs.tolist(), *logprobs]
            if self.body.logprobs:
                more = scores.likeliest if top is None else _joined(scores.likeliest, top)
                top = more
        found = completion_logprobs(self.tokenizer, ids, every, top, self._offset)
        self._offset = found["text_offset"][-1] + len(found["tokens"][-1]) if ids else self._offset
        return found


def _joined(one: Likeliest, other: Likeliest) -> Likeliest:
    return Likeliest(np.concatenate([one.ids, other.ids]), np.concatenate([one.logprobs, other.logprobs]))
