"""Agents: an episode that is a program of any client of OpenAI or Anthropic, whose calls the policy answers.

It runs in a process of environments: a call's new messages are what an environment says, its answer is the policy's
turn. Imports no torch, and the HTTP server on first use.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from tilth.core.errors import PluginError
from tilth.envs.environment import EnvironmentFault, Message, SelfDriven
from tilth.serve.agents.conversation import MODEL, AgentConversations

if TYPE_CHECKING:
    from tilth.serve.agents.server import AgentServer


class Agent(SelfDriven, declares=False):
    """One episode. Subclass it in a plugin; ``rollout.serve=true`` and ``rollout.environment`` choose it by the name of
    the class in small letters.

    Every episode has an object of its own, made without arguments. In a conversation each call's messages begin with
    those of the call before and its answer.
    """

    conversations: ClassVar[int] = 1
    """Most conversations of an episode: a call that goes on with none of them opens a further one, or is refused. All
    of them are trained on, with the episode's reward, and have ``model.context`` tokens together."""
    _conversations: AgentConversations | None = None

    def run(self, info: dict[str, Any], base_url: str, api_key: str, model: str) -> Any:
        """Play the episode with any client: ``OpenAI(base_url=base_url, api_key=api_key)``, or
        ``Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)``; may be ``async``.

        info: the columns of the prompt's record. The key is the episode's own, and good until ``run`` ends.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method run")

    @classmethod
    def prepare(cls) -> None:
        """Start the server of this process. Raises PluginError if its packages are missing, or for ``conversations``
        below 1."""
        if type(cls.conversations) is not int or cls.conversations < 1:
            message = f"{cls.__name__}.conversations = {cls.conversations!r} is not a number from 1 on"
            raise PluginError(message, key="environment.conversations")
        _server()

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Begin ``run`` and return the messages of its first call."""
        server = _server()
        self._conversations = server.open(AgentConversations(type(self).sampling, type(self).conversations))
        self._thread = Thread(target=self._play, args=(info, server), name="agent", daemon=True)
        self._thread.start()
        first, _ = self._next()
        return first

    def step(self, message: Message) -> tuple[Sequence[Message], bool]:
        """Answer the call with the policy's turn; return what the next call adds, or that ``run`` has ended."""
        assert self._conversations is not None
        self._conversations.answer(message)
        return self._next()

    def limits(self) -> Mapping[str, Any]:
        assert self._conversations is not None
        return self._conversations.limits

    def tools(self) -> dict[str, Any]:
        """Return the tools that the calls list; the agent calls them itself."""
        listed = self._conversations.tools if self._conversations is not None else ()
        return {str(at): SimpleNamespace(schema=schema) for at, schema in enumerate(listed)}

    def cut(self, why: str) -> None:
        """Refuse further calls (400, ``context_length_exceeded``) and wait for the end of ``run``. What it raises then
        is a consequence, so the episode is scored all the same."""
        assert self._conversations is not None
        self._conversations.close(why)
        self._thread.join()

    def close(self) -> Any:
        """Refuse further calls. A subclass that has its own calls this too."""
        if self._conversations is not None:
            self._conversations.close("it has ended")
            _server().remove(self._conversations)

    def _next(self) -> tuple[Sequence[Message], bool]:
        assert self._conversations is not None
        new = self._conversations.next()
        if new is None and self._conversations.turn is None:
            raise EnvironmentFault("run ended without a call of the model", key="agent.silent")
        return new or [], new is None

    def _play(self, info: dict[str, Any], server: "AgentServer") -> None:
        assert self._conversations is not None
        try:
            found = self.run(info, server.address, self._conversations.token, MODEL)
            if inspect.isawaitable(found):
                asyncio.run(_awaited(found))
        except BaseException as error:  # noqa: BLE001 - whatever user code raises fails this episode alone
            self._conversations.end(error)
        else:
            self._conversations.end(None)


async def _awaited(found: Awaitable[Any]) -> None:
    await found


def _server() -> "AgentServer":
    """Return the server of this process, which the first one who asks starts."""
    try:
        from tilth.serve.agents.server import agent_server
    except ImportError as error:
        message = f"rollout.serve=true needs a package that cannot be imported: {error}"
        message = f"{message}; pip install '.[serve]' in Tilth's folder"
        raise PluginError(message, key="rollout.serve.package") from error
    return agent_server()
