"""AgentConversation of an agent with the policy: its calls on the server's thread, the policy's turns on the episode's.

Token ids are only appended, so a call must begin with all that was said before, as it was said.
"""

import json
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import zip_longest
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

from tilth.core.errors import DataError
from tilth.envs.calls import ToolCall
from tilth.envs.environment import EnvironmentFault, Message
from tilth.serve.errors import HttpError
from tilth.serve.messages import assistant, listed, plain
from tilth.serve.schemas import ChatBody, ResponseFormat
from tilth.serve.schemas import Message as ChatMessage

MODEL = "policy"
"""Name of the model that agents ask for."""
OVER = "context_length_exceeded"
"""Code of a call that comes when the policy has no further turn."""
PARALLEL = "agent.parallel"
"""Code of a call beside another one."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
FREE = {
    *("model", "messages", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop"),
    *("logprobs", "user", "metadata", "store", "service_tier", "parallel_tool_calls"),
}
"""Fields that do not change how a token is drawn."""
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "response_format": ResponseFormat(type="text"),
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "return_token_ids": False,
}
"""Values of other fields that change nothing."""


class Turn(NamedTuple):
    """Turn of the policy. message: as OpenAI writes it; facts: as the engine's side gives it
    (``SelfDriven.limits``)."""

    message: dict[str, Any]
    facts: Message

    @property
    def finish(self) -> str:
        """Return ``finish_reason``."""
        found = self.facts.get("finish", "stop")
        return (
            "tool_calls"
            if found == "stop" and "tool_calls" in self.message
            else "stop"
            if found == "stop"
            else "length"
        )


class AgentConversation:
    """One episode's calls and their answers. token: names it in requests. limits, tools: those of the newest call."""

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        """sampling: how turns are drawn, which a call may repeat, not change; empty: it may say what it likes."""
        self.token = secrets.token_urlsafe(24)
        self.limits: dict[str, Any] = {}
        self.tools: list[dict[str, Any]] | None = None
        self.left = False
        """True if the client of the newest call has left before its answer."""
        self._sampling = sampling
        self._said: list[dict[str, Any]] = []
        """All messages, those of the policy too."""
        self._asked: list[dict[str, Any]] = []
        """Messages of the newest call."""
        self._turn: Future[Turn | HttpError] | None = None
        """Answer to the newest call."""
        self._events: SimpleQueue[list[dict[str, Any]] | BaseException | None] = SimpleQueue()
        self._over = ""
        self._lock = Lock()

    # ---- the server's side ----

    def call(self, body: ChatBody, again: bool) -> "Future[Turn | HttpError]":
        """Take a call; the future gets its answer. again: it repeats the newest one, whose answer was lost.

        Raises HttpError, which costs the episode its reward, unless the episode is over.
        """
        with self._lock:
            if self._over:
                raise self._ended()
            messages = [plain(one) for one in body.messages]
            limits = _limits(body)
            if self._turn is not None and (again or self.left) and messages == self._asked:
                _check_repeat(limits, self.limits)
                return self._turn
            if self._turn is not None and not self._turn.done():
                message = "a call is still being answered; an episode is one conversation, one call after the other"
                raise HttpError(400, message, "messages", PARALLEL)
            _check_drawn(body, self._sampling)
            tools = [listed(one) for one in body.tools or ()]
            if tools != (tools if self.tools is None else self.tools):
                message = "tools differ from those of the first call, which the policy has read"
                raise HttpError(400, message, "tools", "agent.tools")
            if self.tools is None and self._sampling.get("tool_schemas"):
                _check_followed(tools)
            new = self._new(messages)
            self.tools, self.limits, self.left = tools, limits, False
            self._said, self._asked = list(messages), messages
            self._turn = Future()
            self._events.put(new)
            return self._turn

    def refuse(self, error: HttpError) -> None:
        """End the episode for a call that is wrong, unless it is over."""
        with self._lock:
            if not self._over:
                self._events.put(EnvironmentFault(f"a call was refused: {error}", key="agent.refused"))

    def _new(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what a call adds. Raises HttpError for one that does not go on where the last one ended."""
        seen = len(self._said)
        for at, (mine, theirs) in enumerate(zip_longest(self._said, messages[:seen])):
            if theirs is None or _key(mine) != _key(theirs):
                given = "is missing" if theirs is None else f"is {_key(theirs)!r:.120}"
                message = f"messages.{at} {given}, but the conversation has {_key(mine)!r:.120} there"
                why = "what the policy has read and written cannot change; send all of it again, and add to it"
                raise HttpError(400, f"{message}; {why}", f"messages.{at}", "agent.history")
        if len(messages) == seen:
            message = "the call adds no message to what the policy has answered; an episode is one conversation"
            raise HttpError(400, message, "messages", "agent.history")
        return messages[seen:]

    def _ended(self) -> HttpError:
        return HttpError(400, f"the policy has no further turn: {self._over}", "messages", OVER)

    # ---- the episode's side ----

    def next(self) -> list[dict[str, Any]] | None:
        """Wait for a call and return the messages that it adds; None if the agent has ended. Raises what it has
        raised, and EnvironmentFault for a call that was refused."""
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def answer(self, turn: Message) -> None:
        """Answer the call with the policy's turn. Calls in it that cannot be made are text like any other."""
        calls = [ToolCall(**call) for call in turn.get("tool_calls") or ()]
        if not self.tools or any(call.problem for call in calls):
            calls = []
        content = turn["content"] if calls else turn.get("text", turn["content"])
        with self._lock:
            ids = [f"call_{len(self._said)}_{at}" for at in range(len(calls))]  # the same when the episode repeats
            message = assistant(content, calls, ids)
            self._said.append(plain(ChatMessage.model_validate(message)))
            if self._turn is not None and not self._turn.done():
                self._turn.set_result(Turn(message, turn))

    def close(self, why: str) -> None:
        """Refuse the call that waits, and further ones."""
        with self._lock:
            self._over = self._over or why
            if self._turn is not None and not self._turn.done():
                self._turn.set_result(self._ended())

    def end(self, error: BaseException | None) -> None:
        """Note that the agent has ended. error: what it raised."""
        with self._lock:
            if error is None and self._turn is not None and not self._turn.done():
                error = EnvironmentFault("run ended before the answer to its call", key="agent.unanswered")
            self._over = self._over or "the agent has ended"
            self._events.put(error)


def _check_drawn(body: ChatBody, sampling: Mapping[str, Any]) -> None:
    """Raise HttpError for a field that would change how tokens are drawn."""
    for name in sorted(body.model_fields_set - FREE):
        value = getattr(body, name)
        if value is None:
            continue
        if name in SAMPLING:
            value = max(value, 0)  # top_k -1
            if value == sampling.get(name, value):
                continue
            why = f"turns are drawn with rollout.{name} = {sampling[name]}, which training reckons with"
            raise HttpError(400, f"{name}: {why}; send this or leave it out, not {value}", name, "agent.sampling")
        if name not in NEUTRAL or value != NEUTRAL[name]:
            why = "a turn that is trained on is the policy's own, drawn as the recipe says; leave it out"
            raise HttpError(400, f"{name}: {why}", name, "agent.sampling")
    if body.max_tokens == 0:
        raise HttpError(400, "max_tokens: ask for at least 1", "max_tokens")


def _check_repeat(limits: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise HttpError for a repeated call with other limits, which the answer does not have."""
    fields = {"max_tokens": "max_tokens", "stop": "stop", "details": "logprobs"}
    for name, field in fields.items():
        if limits[name] != before[name]:
            message = f"{field}: the call of before, whose answer this one repeats, had {before[name]!r}"
            raise HttpError(400, f"{message}, not {limits[name]!r}", field, "agent.repeat")


def _check_followed(tools: list[dict[str, Any]]) -> None:
    """Raise HttpError for a tool whose schema cannot hold the policy's calls."""
    from tilth.rollout.grammar import check_calls  # here: it imports numpy

    for at, tool in enumerate(tools):
        try:
            check_calls(json.dumps([tool]))
        except DataError as error:
            field = f"tools.{at}.function.parameters"
            raise HttpError(400, f"{field}: rollout.tool_schemas = true: {error}", field, error.key) from None


def _limits(body: ChatBody) -> dict[str, Any]:
    """Return the limits that a call sets within the recipe's, as JSON."""
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    longest = body.max_completion_tokens or body.max_tokens
    return {"max_tokens": longest, "stop": stop, "details": bool(body.logprobs)}


def _key(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a message the policy reads or has written; ids of its calls are the client's matter."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    found = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message}
    return {**found, "tool_calls": calls} if calls else found
