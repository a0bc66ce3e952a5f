"""A server as the examples of the SDK write them: typed functions as tools, over standard input and output, or HTTP."""

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
taken = []


@server.tool()
def look(shelf: int) -> str:
    """Look at a shelf."""
    if shelf > 2:
        raise ToolError("there is no such shelf")
    return f"plum {os.environ.get('SHELF', '')}"


@server.tool()
def take(item: str) -> list[str]:
    """Take an item."""
    taken.append(item)
    return [*taken]


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    server.run()
