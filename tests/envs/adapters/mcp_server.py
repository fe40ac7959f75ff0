"""A real MCP server for the tests: as a program it speaks over stdin and stdout; `server` is the object itself."""

import asyncio
import os

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests", log_level="CRITICAL")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Writes a note."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@server.tool()
async def hang() -> str:
    """Does not answer."""
    await asyncio.sleep(60)
    return "late"


@server.tool()
def die() -> str:
    """Ends the server's process."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
