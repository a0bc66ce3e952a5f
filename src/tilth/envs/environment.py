"""Environments: one small class for episodes of several turns, and its tools.

An environment lives in a process without torch (``envs.process``), one object per episode. What it returns becomes text
that the policy reads, never tokens that are trained.
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pydantic

from tilth.config.plugins import declare
from tilth.core.errors import TilthError
from tilth.envs.calls import ToolCall

F = TypeVar("F", bound=Callable[..., Any])
Message = Mapping[str, Any]
"""role ("system", "user", "assistant" or "tool") and content; the policy's also has tool_calls, a list of name and
arguments."""
_IS_TOOL = "_tilth_tool"


class Tool:
    """A typed function under a name.

    ``__call__`` takes the arguments of a call and returns the text of the answer, whatever happens in it.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self._checked = pydantic.validate_call(function)

    @property
    def schema(self) -> dict[str, Any]:
        """The function's description in the form that chat templates take: type, name, description, parameters."""
        signature: Any = self.function
        parameters = pydantic.TypeAdapter(signature).json_schema()
        about = (inspect.getdoc(self.function) or "").partition("\n\n")[0].replace("\n", " ")
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        try:
            found = self._checked(**arguments)
            if inspect.isawaitable(found):
                found = asyncio.get_event_loop().run_until_complete(found)
            return as_text(found)
        except pydantic.ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: arguments of {self.name}: {wrong}"
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is its answer
            return f"error: {type(error).__name__}: {error}"


def as_text(value: Any) -> str:
    """Return what a tool gave back as text: a text as it is, bytes decoded, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return json.dumps(value, ensure_ascii=False, default=str)


class EnvironmentFault(TilthError):
    """An environment did what it must not."""


def tool(function: F) -> F:
    """Declare a method of an environment as a tool that the policy can call.

    Its arguments are typed and checked (pydantic); the first paragraph of its docstring describes it. What it returns
    becomes the text of a message; an exception too, so that the policy can try again.
    """
    setattr(function, _IS_TOOL, True)
    return function


class Environment:
    """One episode. Subclass it in a plugin; ``rollout.environment`` is the name of the class in small letters.

    Each method may be ``async``. Every episode has an object of its own, made without arguments.
    """

    describes_tools: ClassVar[bool] = True
    """False: the prompt does not list the tools, so any chat template will do."""
    most_text: ClassVar[int] = 4000
    """Characters of one message of a tool that the policy reads; the rest is cut."""

    def __init_subclass__(cls, declares: bool = True, **options: Any) -> None:
        super().__init_subclass__(**options)
        if declares and not cls.__name__.startswith("_"):
            declare("environment", name_of(cls))(cls)

    @classmethod
    def prepare(cls) -> None:
        """Load what the episodes of a process share, before the first one. Raises PluginError."""

    @classmethod
    def records(cls, count: int) -> Iterator[Mapping[str, Any]]:
        """Yield the records that the environment brings, at most ``count``; 0: all. Default: it brings none."""
        message = f"{name_of(cls)} brings no records; its prompts come from data.source"
        raise EnvironmentFault(message, key="environment.records")

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Begin the episode and return its first messages.

        info: the columns of the prompt's record; ``prompt`` its text, ``messages`` its turns. Default: the prompt.
        """
        return info.get("messages") or [{"role": "user", "content": info["prompt"]}]

    def step(self, message: Message) -> tuple[Sequence[Message], bool] | tuple[Sequence[Message], bool, float]:
        """Answer a message of the policy: further messages, True if the episode is over, and the turn's reward where
        turns have one. It goes to the tokens of that turn, and is a part of the episode's reward.

        Default: call the tools that it names; the episode is over when it names none.
        """
        found = self.call_tools(message)
        return found, not found

    def reward(self) -> Any:
        """Return the episode's reward, as a reward function does: a number, or a dict with ``reward`` and its parts.

        The rewards of its turns are added to it; an environment that rewards turns alone returns 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method reward")

    def close(self) -> Any:
        """Release what the episode holds; called at its end, whatever the end was. Default: nothing."""

    def call_tools(self, message: Message) -> list[Message]:
        """Call the tools that a message names, in order; an unknown or broken call gets an answer that says so."""
        known = self.tools()
        calls = [ToolCall(**call) for call in message.get("tool_calls") or ()]
        late = [c.name for c in calls if c.name in known and inspect.iscoroutinefunction(known[c.name].function)]
        if late and _in_a_loop():
            text = f"call_tools waits for the async tool {late[0]}, which an async step cannot do: write def step"
            raise EnvironmentFault(text, key="environment.step.async")
        return [{"role": "tool", "name": c.name, "content": self._answer(known, c)} for c in calls]

    def _answer(self, known: Mapping[str, Tool], call: ToolCall) -> str:
        if call.problem:
            return f"error: {call.problem}"
        if call.name not in known:
            return f"error: there is no tool {call.name!r}; there is {', '.join(known) or 'none'}"
        return shortened(known[call.name](call.arguments), self.most_text)

    @classmethod
    def lists_tools(cls) -> bool:
        """Return True if the class has tools that prompts list, as far as it does not override ``tools``."""
        return cls.describes_tools and any(getattr(getattr(cls, name), _IS_TOOL, False) for name in dir(cls))

    def tools(self) -> dict[str, Tool]:
        """Return the episode's tools by name."""
        found = inspect.getmembers(self, lambda member: getattr(member, _IS_TOOL, False))
        return {name: Tool(name, method) for name, method in found}


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class SelfDriven(Environment, declares=False):
    """An episode whose own code asks the policy for turns; base of ``tilth.Agent``."""

    sampling: ClassVar[Mapping[str, Any]] = {}
    """Keys of the recipe's section ``rollout`` that say how turns are drawn; empty: there is no recipe."""

    def limits(self) -> Mapping[str, Any]:
        """Return limits of the turn that is asked for, within the recipe's: ``max_tokens``, ``stop`` (texts); and
        ``details``, True for its ids and log-probs.

        The message of the turn then has its whole ``text`` besides, ``finish``, ``stopped`` (the stop text of these
        limits that ended it, if one did), ``counts`` of the tokens before it and in it, and the details: ``ids``,
        ``pieces`` (each token's text) and ``logprobs``.

        ``count``, True: no turn is asked for, but the tokens of a prompt, which goes on with conversation
        ``conversation``, or lists ``tools`` and begins one (None). The message then has ``counted``, or ``refused``,
        why there is no such prompt.
        """
        raise NotImplementedError

    def cut(self, why: str) -> None:
        """End the episode, whose policy has no further turn; then comes ``reward``."""
        raise NotImplementedError


class Answering(Environment, declares=False):
    """Asks the record's prompt; the turn without a call is the answer."""

    describes_tools = False  # a small model learns them from examples

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Ask the question."""
        self.info, self.said = info, ""
        return [{"role": "user", "content": info["prompt"]}]

    def step(self, message: Message) -> Any:
        """Call the tools of a turn, or take it as the answer."""
        self.said = message["content"]
        return super().step(message)


def name_of(cls: type) -> str:
    """Return the name of an environment's class in a recipe: ``WordGame`` -> ``word_game``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def shortened(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters and, if it was longer, how many are missing."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more characters)"
