"""The process between an MCP server and whoever reads its lines."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.tools import guard, mcp_servers
from rlinf_core.foreign.budget import OverBudgetError


def guarded(code: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def test_output_and_status_are_passed_on() -> None:
    done = guarded("print('a' * 100_000); print('b'); raise SystemExit(3)")
    assert (done.returncode, done.stdout) == (3, b"a" * 100_000 + b"\nb\n")


@pytest.mark.security
def test_an_endless_line_ends_the_command() -> None:
    done = guarded("import sys\nwhile True: sys.stdout.write('a' * 65536)")
    assert done.returncode != 0
    assert len(done.stdout) == guard.LONGEST_LINE
    assert b"a line of more than" in done.stderr


@pytest.mark.security
@pytest.mark.parametrize(("tools", "size"), [(50, 10), (1, 5000)])
def test_an_endless_list_of_tools_is_refused(monkeypatch: pytest.MonkeyPatch, tools: int, size: int) -> None:
    class Client:
        """Lists further tools at each request."""

        pages = 0

        async def list_tools(self, cursor: str | None) -> Any:
            self.pages += 1
            tool = SimpleNamespace(model_dump_json=lambda: '{"name": "%s"}' % ("a" * size))
            return SimpleNamespace(tools=[tool] * tools, next_cursor=str(self.pages))

    monkeypatch.setattr(mcp_servers, "_LARGEST_LIST", 10_000)
    client = Client()
    with pytest.raises(OverBudgetError, match="the list may take"):
        asyncio.run(mcp_servers._listed_tools(client, "raw"))
    assert client.pages <= 2
