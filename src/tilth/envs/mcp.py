"""Tools of a server of the Model Context Protocol (package ``mcp``): ``rollout.environment=mcp:URL``, ``mcp:COMMAND``.

A subclass in a plain file chooses its reward and the server's variables: see ``McpEnvironment``.
"""

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, ClassVar

from tilth.core.errors import PluginError
from tilth.envs.adapters import event_loop, imported
from tilth.envs.environment import Answering, EnvironmentFault, Message
from tilth.rewards.functions import load_reward


class McpTool:
    """A tool of the server in the form of ``environment.Tool``."""

    def __init__(self, tool: Any, client: Any) -> None:
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        self.schema: dict[str, Any] = {"type": "function", "function": function}
        self.name, self.function, self._client = tool.name, self.__call__, client

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of what the tool gives back, an error of its too. Raises EnvironmentFault if the server has
        ended."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        call = self._client.call_tool(self.name, dict(arguments))
        try:
            found = asyncio.run_coroutine_threadsafe(call, event_loop()).result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise EnvironmentFault(f"the server has ended: {error}", key="environment.mcp.ended") from error
            return f"error: {error}"
        texts = [getattr(block, "text", f"[{block.type}]") for block in found.content]
        return "\n".join(texts) if texts else json.dumps(found.structured_content, ensure_ascii=False)


class McpEnvironment(Answering, declares=False):
    """Episode whose tools are a server's; the turn without a call is the answer, which a reward function scores.

    Each episode has a session of its own and, where ``id`` is a command, a process of its own, which runs as you do.
    """

    describes_tools = True
    id: ClassVar[str] = ""
    """URL (streamable HTTP), or a command that speaks over its standard input and output."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Of a command: ``env``, its variables besides PATH, HOME and the like; ``cwd``, its folder."""
    scored_by: ClassVar[str] = "exact"
    """Reward function of the answer, as ``reward.function`` names it; or override ``reward``."""
    _over: asyncio.Event | None = None
    _tools: Mapping[str, Any] = {}

    @classmethod
    def prepare(cls) -> None:
        """Start a server and list its tools, so that one that does not start ends the run at its start."""
        imported("mcp", "mcp")
        event_loop()  # here, since several threads that ask at once would each make one
        one = cls()
        try:
            one._begin()
        except Exception as error:
            raise PluginError(f"mcp:{cls.id}: {error!r}", key="environment.mcp.server") from error
        finally:
            one.close()

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Begin a session and ask the record's prompt."""
        asked = super().reset(info)
        self._begin()
        return info.get("messages") or asked

    def reward(self) -> Any:
        """Return what ``scored_by`` gives for the answer."""
        return load_reward(self.scored_by)(self.info["prompt"], self.said, self.info)

    def tools(self) -> dict[str, Any]:
        """Return the tools that the server listed when the episode began."""
        return {**self._tools}

    def close(self) -> None:
        """End the session, and the process of a command."""
        if self._over is not None:
            event_loop().call_soon_threadsafe(self._over.set)

    def _begin(self) -> None:
        self._over, listed = asyncio.Event(), Future[dict[str, Any]]()
        life = asyncio.run_coroutine_threadsafe(self._live(listed), event_loop())
        wait([life, listed], return_when=FIRST_COMPLETED)
        self._tools = listed.result() if listed.done() else life.result()

    async def _live(self, listed: "Future[dict[str, Any]]") -> Any:
        """Hold the session until the episode is over: one task must open and close it."""
        from mcp import Client, StdioServerParameters

        server: Any = self.id
        if not self.id.startswith(("http://", "https://")):
            command, *arguments = shlex.split(self.id)
            server = StdioServerParameters(command=command, args=arguments, **self.options)
        async with Client(server) as client:
            page = await client.list_tools()
            found = [*page.tools]
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                found += page.tools
            listed.set_result({tool.name: McpTool(tool, client) for tool in found})
            assert self._over is not None
            await self._over.wait()
