"""Conversations of an agent with the policy: its calls on the server's thread, the policy's turns on the episode's.

Token ids are only appended, so a call that goes on with a conversation begins with all that was said in it, as it was
said; any other call opens a further one, where the agent may have several.
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
from tilth.serve.schemas import ChatBody, ResponseFormat, assistant, listed, plain
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
    "n": 1, "tool_choice": "auto", "response_format": ResponseFormat(type="text"), "top_logprobs": 0,
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "return_token_ids": False,
}  # fmt: skip
"""Values of other fields that change nothing."""


class Turn(NamedTuple):
    """Turn of the policy. message: as OpenAI writes it; facts: as the engine's side gives it
    (``SelfDriven.limits``)."""

    message: dict[str, Any]
    facts: Message

    @property
    def end(self) -> dict[str, str]:
        """Return ``finish_reason``, and vLLM's ``stop_reason`` where a stop string of the call ended the turn."""
        cut = self.facts.get("finish", "stop") != "stop"
        found = {"finish_reason": "length" if cut else "tool_calls" if "tool_calls" in self.message else "stop"}
        return {**found, "stop_reason": self.facts["stopped"]} if "stopped" in self.facts else found

    @property
    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        before, new = self.facts.get("counts", (0, 0))
        return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}


class _Count(NamedTuple):
    """A call that asks for the number of tokens of a prompt alone."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    found: Future[int | HttpError]


class _Conversation:
    """One conversation: its newest call and all that was said."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.tools = tools
        self.said: list[dict[str, Any]] = []
        """All messages, those of the policy too."""
        self.asked: list[dict[str, Any]] = []
        """Messages of the newest call."""
        self.limits: dict[str, Any] = {}
        self.most_calls: int | None = None
        """Most calls of tools in the answer to the newest call; None: any number."""
        self.turn: Future[Turn | HttpError] = Future()
        """Answer to the newest call."""
        self.left = False
        """True if the client of the newest call has left before its answer."""

    def goes_on(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
        """Return True if a call adds messages to this conversation."""
        seen = len(self.said)
        return tools == self.tools and len(messages) > seen and all(map(_same, self.said, messages))


class AgentConversations:
    """One episode's calls and their answers. token: names it in requests; most: conversations that it may have."""

    def __init__(self, sampling: Mapping[str, Any], most: int = 1) -> None:
        """sampling: how turns are drawn, which a call may repeat, not change; empty: it may say what it likes."""
        self.token, self.most = secrets.token_urlsafe(24), most
        self._sampling = sampling
        self._chats: list[_Conversation] = []
        self._at = 0
        """Conversation of the newest call."""
        self._events: SimpleQueue[list[dict[str, Any]] | _Count | BaseException | None] = SimpleQueue()
        self._counts: list[_Count] = []
        """Calls for a number of tokens that have no answer yet."""
        self._counting: tuple[_Count, dict[str, Any]] | None = None
        """The one that the policy's side is asked for, and its limits."""
        self._counted = False
        self._over = ""
        self._lock = Lock()

    @property
    def limits(self) -> dict[str, Any]:
        """Return the limits of the newest call as JSON, with its conversation and tools if it may be a further one."""
        if self._counting is not None:
            return self._counting[1]
        chat, further = self._chats[self._at], self._at or self._counted
        return {**chat.limits, "conversation": self._at, "tools": chat.tools} if further else chat.limits

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Return the tools of the newest call."""
        return self._chats[self._at].tools if self._chats else []

    @property
    def left(self) -> bool:
        """Return True if the client of the newest call has left before its answer."""
        return bool(self._chats) and self._chats[self._at].left

    @property
    def turn(self) -> "Future[Turn | HttpError] | None":
        """Return the answer to the newest call."""
        return self._chats[self._at].turn if self._chats else None

    # ---- the server's side ----

    def call(self, body: ChatBody, again: bool) -> "Future[Turn | HttpError]":
        """Take a call; the future gets its answer. again: it repeats one whose answer was lost.

        Raises HttpError, which costs the episode its reward, unless the episode is over.
        """
        with self._lock:
            if self._over:
                raise self._ended()
            messages = [plain(one) for one in body.messages]
            limits = _limits(body)
            for chat in reversed(self._chats):
                if (again or chat.left) and messages == chat.asked:
                    _check_repeat(limits, chat.limits)
                    return chat.turn
            if self.turn is not None and not self.turn.done():
                message = "a call is still being answered; an episode is one conversation, one call after the other"
                raise HttpError(400, message, "messages", PARALLEL)
            _check_drawn(body, self._sampling)
            chat = self._find(messages, [listed(one) for one in body.tools or ()])
            new = messages[len(chat.said) :]
            chat.said, chat.asked, chat.limits, chat.left = list(messages), messages, limits, False
            chat.turn, chat.most_calls = Future(), 1 if body.parallel_tool_calls is False else None
            self._at = self._chats.index(chat)
            self._events.put(new)
            return chat.turn

    def count(self, body: ChatBody) -> "Future[int | HttpError]":
        """Take a call for the number of tokens of a prompt, which is part of no conversation; the future gets it.

        Raises HttpError.
        """
        with self._lock:
            if self._over:
                raise self._ended()
            _check_drawn(body, self._sampling)
            asked = _Count([plain(one) for one in body.messages], [listed(one) for one in body.tools or ()], Future())
            self._counts.append(asked)
            self._events.put(asked)
            return asked.found

    def leave(self, turn: "Future[Turn | HttpError]") -> None:
        """Note that the client of a call has left before this answer."""
        for chat in self._chats:
            chat.left = chat.left or chat.turn is turn

    def _find(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> _Conversation:
        """Return the conversation that a call goes on with, the longest one, or a further one."""
        known = [chat for chat in self._chats if chat.goes_on(messages, tools)]
        if known:
            return max(known, key=lambda chat: len(chat.said))
        if len(self._chats) == self.most:
            raise self._refusal(messages, tools)
        if self._sampling.get("tool_schemas"):
            _check_followed(tools)
        self._chats.append(_Conversation(tools))
        return self._chats[-1]

    def _refusal(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> HttpError:
        """Return what is wrong with a call that does not go on where the newest one ended."""
        chat, hint = self._chats[self._at], f"; the agent's class has conversations = {self.most}, which may be more"
        if tools != chat.tools:
            message = f"tools differ from those of the first call, which the policy has read{hint}"
            return HttpError(400, message, "tools", "agent.tools")
        for at, (mine, theirs) in enumerate(zip_longest(chat.said, messages[: len(chat.said)])):
            if theirs is None or not _same(mine, theirs):
                given = "is missing" if theirs is None else f"is {_key(theirs)!r:.120}"
                message = f"messages.{at} {given}, but the conversation has {_key(mine)!r:.120} there"
                why = "what the policy has read and written cannot change; send all of it again, and add to it"
                return HttpError(400, f"{message}; {why}{hint}", f"messages.{at}", "agent.history")
        message = "the call adds no message to what the policy has answered"
        return HttpError(400, f"{message}{hint}", "messages", "agent.history")

    def refuse(self, error: HttpError) -> None:
        """End the episode for a call that is wrong, unless it is over."""
        with self._lock:
            if not self._over:
                self._events.put(EnvironmentFault(f"a call was refused: {error}", key="agent.refused"))

    def _ended(self) -> HttpError:
        return HttpError(400, f"the policy has no further turn: {self._over}", "messages", OVER)

    # ---- the episode's side ----

    def next(self) -> list[dict[str, Any]] | None:
        """Wait for a call and return the messages that it adds; None if the agent has ended. Raises what it has
        raised, and EnvironmentFault for a call that was refused."""
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        return self._to_count(event) if isinstance(event, _Count) else event

    def _to_count(self, asked: _Count) -> list[dict[str, Any]]:
        """Return the messages that a prompt adds to the conversation that it would go on with, all without one."""
        with self._lock:
            known = [chat for chat in self._chats if chat.turn.done() and chat.goes_on(asked.messages, asked.tools)]
            chat = max(known, key=lambda one: len(one.said), default=None)
            at = None if chat is None else self._chats.index(chat)
            self._counting, self._counted = (asked, {"count": True, "conversation": at, "tools": asked.tools}), True
            return asked.messages[len(chat.said) if chat is not None else 0 :]

    def answer(self, turn: Message) -> None:
        """Answer the call with the policy's turn. Calls in it that cannot be made are text like any other."""
        if self._counting is not None:
            (asked, _), self._counting = self._counting, None
            wrong = "refused" in turn
            self._end_count(asked, HttpError(400, turn["refused"], "messages") if wrong else turn["counted"])
            return
        chat = self._chats[self._at]
        calls = [ToolCall(**call) for call in turn.get("tool_calls") or ()][: chat.most_calls]
        if not chat.tools or any(call.problem for call in calls):
            calls = []
        content = turn["content"] if calls else turn.get("text", turn["content"])
        with self._lock:
            place = f"{self._at}_{len(chat.said)}" if self._at else f"{len(chat.said)}"
            ids = [f"call_{place}_{at}" for at in range(len(calls))]  # the same when the episode repeats
            message = assistant(content, calls, ids)
            chat.said.append(plain(ChatMessage.model_validate(message)))
            if not chat.turn.done():
                chat.turn.set_result(Turn(message, turn))

    def _end_count(self, asked: _Count, found: int | HttpError) -> None:
        with self._lock:
            if asked in self._counts:
                self._counts.remove(asked)
                asked.found.set_result(found)

    def _refuse_counts(self) -> None:
        for asked in self._counts:
            asked.found.set_result(self._ended())
        self._counts.clear()

    def close(self, why: str) -> None:
        """Refuse the calls that wait, and further ones."""
        with self._lock:
            self._over = self._over or why
            self._refuse_counts()
            if self.turn is not None and not self.turn.done():
                self.turn.set_result(self._ended())

    def end(self, error: BaseException | None) -> None:
        """Note that the agent has ended. error: what it raised."""
        with self._lock:
            if error is None and self.turn is not None and not self.turn.done():
                error = EnvironmentFault("run ended before the answer to its call", key="agent.unanswered")
            self._over = self._over or "the agent has ended"
            self._refuse_counts()
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
    from tilth.engines.grammar import check_calls  # here: it imports numpy

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


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return True if the policy reads the same in both messages."""
    return mine == theirs or _key(mine) == _key(theirs)


def _key(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a message the policy reads or has written; ids of its calls are the client's matter."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    found = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message}
    return {**found, "tool_calls": calls} if calls else found
