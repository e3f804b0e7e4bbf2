"""An MCP server with tools that work, fail, hang, and end it; run by `test_mcp.py`."""

from __future__ import annotations

import asyncio
import os
import subprocess

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools")


@server.tool()
def add(first: int, second: int = 1) -> str:
    """Add two numbers.

    More than the model is told.
    """
    return str(first + second)


@server.tool()
def variable(name: str) -> str:
    """Show a variable."""
    return os.environ.get(name, "none")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("it went wrong")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Answer never."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def pid() -> str:
    """Show the process id of the server."""
    return str(os.getpid())


@server.tool()
def child() -> str:
    """Start a process that outlives its parent, in a session of its own, and show its pid with the server's."""
    script = "sleep 1000 >/dev/null 2>&1 </dev/null & echo $!"
    started = subprocess.run(["setsid", "sh", "-c", script], capture_output=True, text=True, check=True)
    return f"{started.stdout.strip()} {os.getpid()}"


if __name__ == "__main__":
    server.run()
