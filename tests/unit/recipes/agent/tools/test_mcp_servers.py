"""MCP servers that are started by their commands; run by an interpreter that has the package mcp."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipes.agent.tools.mcp_servers import McpServers, ServerCommand
from recipes.agent.tools.tool import ToolUnavailable
from recipes.agent.tools.toolbox import Observation, Toolbox
from rlinf_core import ConfigError

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(find_spec("mcp") is None, reason="needs the package mcp: pip install 'mcp>=2,<3'"),
]

SERVER = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))
# Starts the servers in a process of its own, shows the pids that `child` tells of, and waits to be killed.
HOLDER = """
import asyncio, sys
from recipes.agent.tools.mcp_servers import McpServers, ServerCommand
servers = McpServers({"own": ServerCommand(sys.argv[1:], {})})
tools = {each.name: each for each in servers.tools}
print(asyncio.run(tools["child"].call("")), flush=True)
sys.stdin.read()
"""


def _started() -> Iterator[McpServers]:
    started = McpServers({"own": ServerCommand(SERVER, {"COLOUR": "a b;$HOME"})})
    yield started
    started.close()


servers = pytest.fixture(_started, name="servers")
# Of tests that leave the server as it is.
unharmed = pytest.fixture(_started, name="unharmed", scope="module")


def called(servers: McpServers, *calls: tuple[str, str], timeout: float = 30.0) -> list[Observation]:
    tools = Toolbox(servers.tools, timeout)

    async def run() -> list[Observation]:
        return [await tools.call(*call) for call in calls]

    return asyncio.run(run())


def lost(servers: McpServers, name: str, timeout: float = 30.0) -> str:
    """Return why a call has no answer: it was made twice, and other calls have one."""
    (seen,) = called(servers, (name, ""), timeout=timeout)
    assert seen.failure
    return seen.text.removeprefix("error: ")


def asked_again(servers: McpServers) -> Observation | None:
    try:
        return called(servers, ("pid", ""))[0]
    except ToolUnavailable:
        return None


def ended(pid: int) -> bool:
    """Return whether a process has ended, after a while in which it may."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_tools_are_offered_and_called(unharmed: McpServers) -> None:
    described = {tool.name: tool.description for tool in unharmed.tools}
    assert described["add"] == 'Add two numbers. (argument: JSON, {"first": integer, "second"?: integer})'
    assert described["variable"] == "Show a variable."

    seen = called(
        unharmed,
        ("add", '{"first": 3, "second": 4}'),
        ("add", '{"first": 3}'),
        ("variable", "COLOUR"),
        ("variable", '{"name": "COLOUR"}'),
    )
    assert [(item.text, item.failure) for item in seen] == [("7", ""), ("4", ""), ("a b;$HOME", ""), ("a b;$HOME", "")]


def test_errors_are_observations(unharmed: McpServers) -> None:
    seen = called(unharmed, ("fail", ""), ("add", "three"), ("add", '{"first": "x"}'), ("add", '{"first": 3}'))
    assert [item.failure for item in seen] == ["error", "error", "error", ""]
    assert "it went wrong" in seen[0].text
    assert seen[1].text == "error: the argument of add must be a JSON object"
    assert "first" in seen[2].text


def test_a_server_that_dies_any_number_of_times_is_started_again(servers: McpServers) -> None:
    assert lost(servers, "die") == "the server of die has exited; restarting it"
    assert called(servers, ("add", '{"first": 3}'))[0].text == "4"
    for _ in range(3):
        lost(servers, "die")
    assert called(servers, ("add", '{"first": 3}'))[0].text == "4"


def test_a_call_that_hangs_holds_up_no_other(servers: McpServers) -> None:
    assert lost(servers, "hang", timeout=0.5) == "no answer within 0.5 s"
    assert called(servers, ("add", '{"first": 3}'))[0].text == "4"


def test_server_is_restarted_after_three_unanswered_calls(servers: McpServers) -> None:
    (before,) = called(servers, ("pid", ""))
    assert lost(servers, "hang", timeout=0.3) == "no answer within 0.3 s"
    lost(servers, "hang", timeout=0.3)
    # The old one may answer, leave a call without an answer, or end under it, until it has been told of the third.
    answers = (asked_again(servers) for _ in range(1000))
    after = next(answer for answer in answers if answer and not answer.failure and answer.text != before.text)
    assert after.text.isdecimal()


def test_a_server_ends_with_whoever_started_it_however_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, *SERVER], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 2
        holder.send_signal(signal.SIGKILL)
    assert [ended(pid) for pid in pids] == [True, True]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (ServerCommand(("no-such-program",), {}), "`no-such-program` does not exist"),
        (ServerCommand((sys.executable, "-c", "1"), {}), "does not start"),
        (ServerCommand(SERVER, {}, ("multiply",)), "has no tool `multiply`"),
    ],
)
def test_a_server_that_cannot_be_used_ends_the_start(command: ServerCommand, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        McpServers({"own": command})


def test_only_the_tools_that_are_asked_for() -> None:
    servers = McpServers({"own": ServerCommand(SERVER, {}, ("add",))})
    assert [tool.name for tool in servers.tools] == ["add"]
    servers.close()
