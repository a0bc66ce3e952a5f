"""Form of Anthropic's ``/v1/messages``: blocks and events, made from the choice of a chat completion."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tilth.serve.anthropic_body import FIELDS, MessagesBody
from tilth.serve.errors import HttpError
from tilth.serve.forms import Form

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""``finish_reason`` of a chat completion -> ``stop_reason`` of a message."""


class MessageForm(Form):
    """One message while its parts come; a whole answer is one part."""

    last = ()

    def __init__(self, body: MessagesBody, head: Mapping[str, Any]) -> None:
        self._id, self._model = f"msg_{head['id'].partition('-')[2]}", head["model"]
        self._content: list[dict[str, Any]] = []
        """Blocks, of which the last one may be open."""
        self._begun = self._open = False
        self._reason: str | None = None
        self._sequence: str | None = None
        self._usage = head["usage"]
        self._more: dict[str, Any] = {}
        """Token ids, where the request asks for them."""

    def whole(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message of a chat completion."""
        for _ in self._hear(found):
            pass
        return {**self._message(), "content": self._content, **self._more}

    def _hear(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun, self._more = True, {k: v for k, v in part.items() if k == "prompt_token_ids"}
            yield {"type": "message_start", "message": {**self._message(), **self._more}}
        for choice in part["choices"]:
            said = choice["message"] if "message" in choice else choice["delta"]
            if "token_ids" in choice:
                self._more["token_ids"] = [*self._more.get("token_ids", ()), *choice["token_ids"]]
            if said.get("content"):
                yield from self._say(said["content"])
            for call in said.get("tool_calls", ()):
                yield from self._end_block()
                yield from self._call(call)
            if choice["finish_reason"] is not None:
                yield from self._end_block()
                self._reason = REASONS[choice["finish_reason"]]
                if (sequence := choice.get("stop_reason")) is not None and self._reason == "end_turn":
                    self._reason, self._sequence = "stop_sequence", sequence
        if "usage" in part:
            self._usage = part["usage"]
            ids = {k: v for k, v in self._more.items() if k == "token_ids"}
            delta = {"stop_reason": self._reason, "stop_sequence": self._sequence}
            yield {"type": "message_delta", "delta": delta, "usage": _counts(self._usage), **ids}
            yield {"type": "message_stop"}

    def _failed(self, error: HttpError) -> dict[str, Any]:
        return error.renamed(FIELDS).anthropic

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._open:
            yield self._begin_block({"type": "text", "text": ""})
        self._content[-1]["text"] += text
        yield self._block_event("delta", delta={"type": "text_delta", "text": text})

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        written = call["function"]["arguments"]
        yield self._begin_block({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
        self._content[-1]["input"] = json.loads(written)
        yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": written})
        yield from self._end_block()

    def _begin_block(self, block: dict[str, Any]) -> dict[str, Any]:
        self._content.append({**block})
        self._open = True
        return self._block_event("start", content_block=block)

    def _end_block(self) -> Iterator[dict[str, Any]]:
        """End the block that is open, if there is one."""
        if self._open:
            self._open = False
            yield self._block_event("stop")

    def _block_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": len(self._content) - 1, **more}

    def _message(self) -> dict[str, Any]:
        """Return the message without its blocks."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": self._reason,
            "stop_sequence": self._sequence,
            "usage": _counts(self._usage),
        }


def _counts(usage: Mapping[str, int]) -> dict[str, int]:
    """Return ``usage``. This server counts no cached tokens."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"], **cached}
