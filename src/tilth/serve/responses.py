"""Form of ``/v1/responses``: items and events, made from the choices of a chat completion."""

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from tilth.serve.errors import HttpError
from tilth.serve.forms import Form
from tilth.serve.response_body import FIELDS, ResponsesBody


class ResponseForm(Form):
    """One response while its parts come; a whole answer is one part."""

    last = ()

    def __init__(self, body: ResponsesBody, head: Mapping[str, Any]) -> None:
        self._body, self._head = body, head
        self._output: list[dict[str, Any]] = []
        self._message = ""
        """Id of the message that is being written; "" if there is none."""
        self._text = ""
        self._rows: list[dict[str, Any]] = []
        """Log-probs of all tokens, of which ``_sent`` have been sent."""
        self._sent = 0
        self._status, self._usage = "in_progress", dict[str, Any]()
        self._number = 0

    def whole(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response of a chat completion."""
        for _ in self._hear(found):
            pass
        return self._response()

    def _begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response())

    def _failed(self, error: HttpError) -> dict[str, Any]:
        told = error.renamed(FIELDS)
        return self._event("error", message=str(told), code=told.code, param=told.param)

    def _hear(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for choice in part["choices"]:
            said = choice["message"] if "message" in choice else choice["delta"]
            self._rows += map(_row, (choice.get("logprobs") or {}).get("content", ()))
            if said.get("content"):
                yield from self._say(said["content"])
            for call in said.get("tool_calls", ()):
                yield from self._end_message("completed")
                yield from self._call(call)
            if choice["finish_reason"] is not None:
                if not self._output and not self._message:
                    yield from self._begin_message()
                self._status = "incomplete" if choice["finish_reason"] == "length" else "completed"
                yield from self._end_message(self._status)
        if "usage" in part:
            self._usage = part["usage"]
            yield self._event(f"response.{self._status}", response=self._response())

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        self._message = f"msg_{uuid.uuid4().hex}"
        yield self._item_event("added", self._written("in_progress", []))
        yield self._part_event("content_part.added", part=_part("", []))

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._message:
            yield from self._begin_message()
        self._text += text
        new, self._sent = self._rows[self._sent :], len(self._rows)
        yield self._part_event("output_text.delta", delta=text, logprobs=new)

    def _end_message(self, status: str) -> Iterator[dict[str, Any]]:
        """End the message that is being written, if there is one."""
        if not self._message:
            return
        part = _part(self._text, self._rows)
        yield self._part_event("output_text.done", text=self._text, logprobs=self._rows)
        yield self._part_event("content_part.done", part=part)
        yield from self._add(self._written(status, [part]))
        self._message = ""

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], **function}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", **place, delta=function["arguments"])
        yield self._event("response.function_call_arguments.done", **place, arguments=function["arguments"])
        yield from self._add({**item, "status": "completed"})

    def _add(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield self._item_event("done", item)
        self._output.append(item)

    def _written(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._message, "role": "assistant", "status": status, "content": content}

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"response.output_item.{kind}", output_index=len(self._output), item=item)

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        place = {"item_id": self._message, "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{kind}", **place, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _response(self) -> dict[str, Any]:
        """Return the response as far as it is made."""
        body, cut = self._body, self._status == "incomplete"
        return {
            "id": f"resp_{self._head['id'].partition('-')[2]}",
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "model": self._head["model"],
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*self._output],
            "usage": _counts(self._usage) if self._usage else None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **_shown(body.text)},
            "tool_choice": "auto" if body.tool_choice is None else _shown(body.tool_choice),
            "tools": [_shown(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }


def _shown(field: Any) -> Any:
    """Return a field of the request as the client gave it."""
    return field.model_dump(by_alias=True, exclude_none=True) if hasattr(field, "model_dump") else field or {}


def _part(text: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*rows]}


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log-probs of a token. Responses have no null for the bytes of a part of a character."""
    more = {"top_logprobs": [_row(one) for one in found["top_logprobs"]]} if "top_logprobs" in found else {}
    return {**found, "bytes": found["bytes"] or [], **more}


def _counts(usage: Mapping[str, int]) -> dict[str, Any]:
    """Return ``usage``. This server counts neither cached tokens nor those of reasoning."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
