"""Choices of ``/v1/chat/completions``, with calls of tools, and of ``/v1/completions``: their text and log-probs."""

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tilth.core.trajectory import Likeliest, Trajectory
from tilth.data.tokenizer import NO_TEXT, Tokenizer
from tilth.engines.completion import Delta
from tilth.engines.request import Request, TextScores
from tilth.engines.stops import GrowingText, SpelledText
from tilth.envs.calls import ToolCall, before_calls
from tilth.rollout.turns import split_turn, stop_string
from tilth.serve.errors import HttpError
from tilth.serve.schemas import ChatBody, CompletionBody, NamedTool, assistant


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


def hears_calls(body: ChatBody) -> bool:
    """Return True if the assistant's text may hold calls."""
    return bool(body.tools) and body.tool_choice != "none"


def called_schema(body: ChatBody) -> str:
    """Return the JSON schema of the call that ``tool_choice`` demands; "" if none is. Raises HttpError 400."""
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    if named is None and body.tool_choice != "required":
        return ""
    if body.response_format is not None and body.response_format.type != "text":
        raise HttpError(400, "response_format does not go with a tool_choice that demands a call", "response_format")
    tools = [tool.function for tool in body.tools or () if named in (None, tool.function.name)]
    if not tools:
        known = ", ".join(tool.function.name for tool in body.tools or ())
        raise HttpError(400, f"tool_choice names {named!r}, which is not among the tools: {known}", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})


class ChatChoice:
    """One answer of the assistant. calls: True to look for calls of tools in its text."""

    def __init__(self, tokenizer: Tokenizer, request: Request, body: ChatBody, calls: bool) -> None:
        self.tokenizer, self.request, self.body, self.calls = tokenizer, request, body, calls
        params = request.params
        self._text = StreamedText(tokenizer, params.stop_tokens, params.stop, calls)

    def whole(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the choice of an answer in one piece."""
        mine = trajectory.mask == 1
        ids, logprobs = trajectory.tokens[mine].tolist(), trajectory.logprobs[mine].tolist()
        content, calls = self._heard(trajectory)
        message = assistant(content, calls, _ids(calls))
        found = {"index": self.request.id, "message": message, **self._end(trajectory, calls)}
        return {**found, **self._details(ids, logprobs, trajectory.likeliest)}

    def first(self) -> Iterable[dict[str, Any]]:
        """Return the first choices of a stream's chunks, before any token."""
        yield {"index": self.request.id, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the choices of a stream's chunks for new tokens."""
        certain = self._text.hear(delta.tokens)
        details = self._details(delta.tokens.tolist(), delta.logprobs.tolist(), delta.likeliest)
        head = {"index": self.request.id, "finish_reason": None}
        if delta.whole is None:
            sure = self._text.send(certain)
            if sure or any(details.values()):
                yield {**head, "delta": {"content": sure}, **details}
            return
        content, calls = self._heard(delta.whole)
        sure = self._text.send(content)
        yield {**head, "delta": {"content": sure} if sure else {}, **details}
        for at, one in enumerate(assistant("", calls, _ids(calls)).get("tool_calls", ())):
            yield {**head, "delta": {"tool_calls": [{"index": at, **one}]}}
        yield {**head, "delta": {}, **self._end(delta.whole, calls)}

    def _heard(self, trajectory: Trajectory) -> tuple[str, list[ToolCall]]:
        """Return what is said, and the calls if all of them can be made; else they are text like any other."""
        if not self.calls:
            return trajectory.text, []
        content, calls = split_turn(self.tokenizer, trajectory, self.request.params.stop_tokens)
        if self.body.parallel_tool_calls is False:
            calls = calls[:1]
        return (trajectory.text, []) if any(call.problem for call in calls) else (content, calls)

    def _end(self, trajectory: Trajectory, calls: list[ToolCall]) -> dict[str, Any]:
        """Return ``finish_reason``, and vLLM's ``stop_reason`` where a stop string of the request ended the answer."""
        found = {"finish_reason": "tool_calls" if calls and trajectory.finish == "stop" else trajectory.finish}
        if not self.body.stop:
            return found
        params = self.request.params
        stopped = stop_string(self.tokenizer, trajectory, params.stop_tokens, params.stop)
        return {**found, "stop_reason": stopped} if stopped is not None else found

    def _details(self, ids: list[int], logprobs: list[float], top: Likeliest | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.body.logprobs:
            found["logprobs"] = chat_logprobs(self.tokenizer, ids, logprobs, top)
        if self.body.return_token_ids:
            found["token_ids"] = ids
        return found


def _ids(calls: Sequence[ToolCall]) -> list[str]:
    return [f"call_{uuid.uuid4().hex[:24]}" for _ in calls]


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
