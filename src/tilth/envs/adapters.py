"""Environments of other packages, as they are: ``rollout.environment=verifiers:NAME``, ``gymnasium:ID`` and others.

A subclass in a plain file chooses further options: see ``VerifiersEnvironment`` and ``GymnasiumEnvironment``.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, ClassVar

from tilth.core.errors import PluginError
from tilth.envs.environment import Environment, EnvironmentFault, Message

_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
TASKSET = "tilth.serve.agents.taskset:VerifiersTaskset"
"""Adapter of what ``verifiers`` is from 0.4 on: programs that call a model over HTTP."""


def adapted(kind: str, name: str) -> type[Environment]:
    """Return the class for an environment of another package. kind: a key of ``ADAPTERS``."""
    base = TASKSET if kind == "verifiers" and has_tasksets() else ADAPTERS[kind]
    return type(f"_{kind}", (resolve_name(base) if isinstance(base, str) else base,), {"id": name})


def has_tasksets() -> bool:
    """Return True if the installed ``verifiers`` is 0.4 or newer."""
    try:
        return tuple(map(int, version("verifiers").split(".")[:2])) >= (0, 4)
    except PackageNotFoundError:
        return False  # its adapter says so


def missing(kind: str, error: Exception) -> PluginError:
    """Return the error of a package that cannot be imported."""
    message = f"rollout.environment={kind}:NAME needs a package that cannot be imported: {error}"
    return PluginError(f"{message}; pip install {kind}", key=f"environment.{kind}")


def imported(kind: str, module: str) -> Any:
    """Import and return a module of the package of an adapter. PluginError if it cannot be."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(kind, error) from error


class VerifiersEnvironment(Environment, declares=False):
    """An environment of the package ``verifiers`` (0.1.10 to 0.3: SingleTurnEnv, MultiTurnEnv, ToolEnv ...), as it is.

    Its own loop runs; the client that it asks for completions is the policy. All episodes of a process share the
    environment and an event loop, as they do in that package, so one that blocks the loop holds up the others.
    """

    id: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    """Arguments of its ``load_environment``."""

    @classmethod
    def prepare(cls) -> None:
        """Load the environment, so that one that is missing ends the run at its start."""
        event_loop()  # here, since several threads that ask at once would each make one
        try:
            cls._loaded()
        except ImportError as error:
            raise missing("verifiers", error) from error
        except (ValueError, RuntimeError) as error:  # how the package reports a name that it cannot load
            raise PluginError(str(error), key="environment.verifiers.name") from error

    @classmethod
    @cache
    def _loaded(cls) -> Any:
        """Return the environment, loaded once in a process."""
        from verifiers import load_environment

        return load_environment(cls.id, **cls.options)

    @classmethod
    def records(cls, count: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of its dataset as records: the text of the prompt, the answer, and the whole row."""
        data = cls._loaded().get_dataset(n=count or -1)
        for row in data:
            turns = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
            plain = json.loads(json.dumps({**row, "prompt": turns}, default=str))
            yield {"prompt": "\n".join(_text(turn["content"]) for turn in turns), "row": plain}

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Begin its loop with the record's ``row``, or with its prompt, answer and info; return what it asks first."""
        turns = info.get("messages") or [{"role": "user", "content": info["prompt"]}]
        row = {"example_id": 0, "answer": "", "info": {}, **info.get("row", {**info, "prompt": list(turns)})}
        self._policy = _policy_client()
        self._rollout = asyncio.run_coroutine_threadsafe(
            self._loaded().run_rollout(row, self._policy, "policy", {}), event_loop()
        )
        self._heard: list[Message] = []
        return _on_loop(self._next())[0]

    def step(self, message: Message) -> tuple[Sequence[Message], bool]:
        """Answer its request with the policy's turn; return what it asks next."""
        self._heard.append(_as_chat(message))
        self._policy.say(message)
        return _on_loop(self._next())

    def reward(self) -> dict[str, Any]:
        """Return the score of its rubric; its metrics are parts. An episode that was cut is scored as it is."""
        if not self._rollout.done():
            event_loop().call_soon_threadsafe(self._policy.cut)
        found = self._rollout.result()
        if found.get("error"):
            raise EnvironmentFault(
                f"the environment failed: {found['error']!r:.200}", key="environment.verifiers.error"
            )
        numbers = {name: float(x) for name, x in (found.get("metrics") or {}).items() if isinstance(x, int | float)}
        return {**numbers, "reward": found["reward"]}

    def tools(self) -> dict[str, Any]:
        """Return what it offers with its newest request; it calls them itself."""
        return {one.name: offered(one.name, one.description, one.parameters) for one in self._policy.tools or ()}

    def close(self) -> None:
        """Cancel its loop if it still runs."""
        self._rollout.cancel()

    async def _next(self) -> tuple[list[Message], bool]:
        """Wait for its next request or its end; return the messages that the policy has not seen."""
        asked = asyncio.ensure_future(self._policy.asked.get())
        await asyncio.wait({asked, asyncio.wrap_future(self._rollout)}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return [], True
        messages: list[Message] = [_as_chat(message.model_dump(exclude_none=True)) for message in asked.result()]
        seen = len(self._heard)
        if [_key(m) for m in messages[:seen]] != [_key(m) for m in self._heard]:
            message = "the environment changed turns that the policy has seen; ids of a conversation are only appended"
            raise EnvironmentFault(message, key="environment.verifiers.rewrites")
        self._heard = messages
        return messages[seen:], False


def offered(name: str, description: str, parameters: Any) -> Any:
    """Return the description of a tool that an environment of another package calls itself."""
    function = {"name": name, "description": description, "parameters": parameters}
    return SimpleNamespace(schema={"type": "function", "function": function})


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _on_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result()


def _policy_client() -> Any:
    """Return a client of ``verifiers`` for one episode, whose completions are the policy's turns."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage, ToolCall

    class PolicyClient(Client):
        """Hands each request out and waits until the policy has spoken."""

        def __init__(self) -> None:
            super().__init__(None)
            self.asked: asyncio.Queue[Any] = asyncio.Queue()
            self.tools: Any = None
            self._said: asyncio.Queue[Any] = asyncio.Queue()

        def say(self, message: Message) -> None:
            """Give the policy's turn to who waits for it."""
            calls = [
                ToolCall(id=f"call-{i}", name=call["name"], arguments=call["problem"] or json.dumps(call["arguments"]))
                for i, call in enumerate(message.get("tool_calls") or ())
            ]
            said = ResponseMessage(
                content=message["content"],
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            response = Response(id="turn", created=int(time.time()), model="policy", message=said)
            event_loop().call_soon_threadsafe(self._said.put_nowait, response)

        def cut(self) -> None:
            """End the episode as one whose prompt is too long for the policy, which the environment then scores."""
            self._said.put_nowait(OverlongPromptError("the episode was cut"))

        async def get_response(self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            self.tools = tools
            await self.asked.put(prompt)
            said = await self._said.get()
            if isinstance(said, Exception):
                raise said
            return said

        async def close(self) -> None:
            pass

        def _unused(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError("get_response needs no native request")

        setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
        raise_from_native_response = from_native_response = _unused

    return PolicyClient()


def _as_chat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as text."""
    return {**message, "content": _text(message.get("content"))}


def _key(message: Mapping[str, Any]) -> tuple[str, str]:
    return message["role"], message["content"]


def _text(content: Any) -> str:
    """Return the text of a message's content, which may come in parts; EnvironmentFault for an image."""
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
        if other := [part for part in parts if part.get("type") != "text"]:
            message = f"a message has a part of type {other[0].get('type')!r}; the policy reads text"
            raise EnvironmentFault(message, key="environment.verifiers.content")
        return "".join(part["text"] for part in parts)
    return content or ""


class PlayedEnvironment(Environment, declares=False):
    """Base of the games of other packages. Each step's reward is that of its turn, so the episode's is their sum."""

    id: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of what makes one."""
    intro: ClassVar[str] = ""
    """Text before the first observation, such as the rules of the game."""
    _steps = 0

    @classmethod
    def records(cls, count: int) -> Iterator[dict[str, Any]]:
        """Yield records that differ in their seed."""
        for seed in range(count or 1000):
            yield {"prompt": f"{cls.id} {seed}", "seed": seed}

    def reward(self) -> dict[str, float]:
        """Return the number of steps, as a part: turns have the rewards."""
        return {"reward": 0.0, "steps": float(self._steps)}

    def _first(self, seen: str) -> Sequence[Message]:
        """Return the messages before the first turn."""
        return [{"role": "user", "content": "\n".join(filter(None, (self.intro, seen)))}]


class GymnasiumEnvironment(PlayedEnvironment, declares=False):
    """An environment of the package ``gymnasium`` whose observations are text, or are rendered as it, unmodified.

    Actions: the policy's turn where the action space is text, else a whole number in it. A turn that names no action
    is answered with what would be one. ``options`` are of ``gymnasium.make``.
    """

    @classmethod
    def prepare(cls) -> None:
        """Make one, so that a name that is none, or a space that is no text, ends the run at its start."""
        gymnasium = imported("gymnasium", "gymnasium")
        try:
            cls()._make().close()
        except gymnasium.error.Error as error:
            raise PluginError(f"gymnasium:{cls.id}: {error}", key="environment.gymnasium.name") from error

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Begin with the record's ``seed``."""
        if not isinstance(info.get("seed"), int):
            message = "the record has no column seed with a whole number, so that the game could not be played again"
            raise EnvironmentFault(message, key="environment.gymnasium.seed")
        self._env = self._make()
        seen, _ = self._env.reset(seed=info["seed"])
        return self._first(self._seen(seen))

    def step(self, message: Message) -> tuple[Sequence[Message], bool, float]:
        """Take the action of a turn."""
        action = self._action(message["content"].strip())
        if action is None:
            return [{"role": "user", "content": f"an action is {self._actions()}"}], False, 0.0
        seen, reward, ended, cut, _ = self._env.step(action)
        self._steps += 1
        return [{"role": "user", "content": self._seen(seen)}], bool(ended or cut), float(reward)

    def close(self) -> None:
        """Close the game."""
        self._env.close()

    def _make(self) -> Any:
        import gymnasium

        made = gymnasium.make(self.id, **self.options)
        if "ansi" in made.metadata.get("render_modes", ()) and "render_mode" not in self.options:
            made.close()
            made = gymnasium.make(self.id, render_mode="ansi", **self.options)
        if not isinstance(made.action_space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
            made.close()
            message = f"gymnasium:{self.id} has actions {made.action_space}; a policy can give text or a whole number"
            raise PluginError(message, key="environment.gymnasium.actions")
        return made

    def _seen(self, observation: Any) -> str:
        text = str(self._env.render() if self._env.render_mode == "ansi" else observation)
        return _COLOUR.sub(lambda found: "]" if found[1] in ("", "0") else "[", text)  # a colour marks a place

    def _action(self, text: str) -> Any:
        space = self._env.action_space
        if hasattr(space, "n"):
            try:
                action = int(text)
            except ValueError:
                return None
            return action if space.contains(action) else None
        return text if space.contains(text) else None

    def _actions(self) -> str:
        space = self._env.action_space
        if hasattr(space, "n"):
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        letters = "".join(sorted(space.character_set))
        return f"a text of {space.min_length} to {space.max_length} characters of {letters}"


ADAPTERS: dict[str, type[Environment] | str] = {
    "verifiers": VerifiersEnvironment,
    "gymnasium": GymnasiumEnvironment,
    "mcp": "tilth.envs.mcp:McpEnvironment",
    "openenv": "tilth.envs.openenv:OpenEnvironment",
    "harbor": "tilth.envs.harbor:HarborEnvironment",
}
"""Package -> its adapter, or the name of one that is imported where it is asked for."""
