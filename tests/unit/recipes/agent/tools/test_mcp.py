"""MCP servers: started by their commands, over all that the protocol lets them say, behind a guard of their lines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.tools import guard, mcp_servers
from recipes.agent.tools.mcp_servers import McpServers, McpTool, ServerCommand
from recipes.agent.tools.tool import Observation, Toolbox, ToolError, ToolUnavailable
from rlinf_core import ConfigError
from rlinf_core.foreign.budget import OverBudgetError

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


RAW_SERVER = str(Path(__file__).with_name("raw_mcp_server.py"))


@contextmanager
def tools_of(mode: str, names: tuple[str, ...] | None = None) -> Iterator[list[McpTool]]:
    servers = McpServers({"raw": ServerCommand((sys.executable, RAW_SERVER, mode), {}, names)})
    try:
        yield servers.tools
    finally:
        servers.close()


def called_raw(mode: str, argument: str = "hello") -> str:
    with tools_of(mode) as tools:
        return asyncio.run(tools[0].call(argument))


def test_tools_of_every_page_are_offered() -> None:
    with tools_of("pages", ("c",)) as tools:
        assert [tool.name for tool in tools] == ["c"]
    with tools_of("pages") as tools:
        assert [tool.name for tool in tools] == ["a", "b", "c"]


@pytest.mark.parametrize("mode", ["same_cursor", "cycle"])
def test_a_list_without_an_end_is_left(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with tools_of(mode) as tools:
        assert [tool.name for tool in tools] == ["a"]
    assert "does not end" in caplog.text


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("structured", '{"answer": 42}'),
        ("structured_text", "words"),
        ("resource", "the text"),
        ("blob", "[resource file:///a: a/b is not shown]"),
        ("link", "[resource file:///a: notes]"),
        ("image", "words\n[image: image/png is not shown]"),
    ],
)
def test_results_of_every_kind_are_told(mode: str, text: str) -> None:
    assert called_raw(mode) == text


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("structured_error", '{"error": "no such file"}'),
        ("silent_error", "failed without a reason"),
        ("refuses", "x is wrong"),
    ],
)
def test_errors_of_a_tool_are_told_to_the_model(mode: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        called_raw(mode)


def test_a_result_against_its_own_schema_is_the_servers_fault() -> None:
    with pytest.raises(ToolUnavailable, match="returned an invalid result"):
        called_raw("broken")


def test_a_failure_within_a_server_is_no_observation() -> None:
    with pytest.raises(ToolUnavailable, match="the database is gone"):
        called_raw("fails")


@pytest.mark.parametrize(
    ("mode", "described"),
    [
        ("any", "a"),
        ("optional", "a"),
        ("nullable", "a"),
        ("never", 'a (argument: JSON, {"x"?: any, "y"?: any})'),
        ("reference", "a"),
        ("loop", 'a (argument: JSON, {"x"?: any, "y"?: any})'),
        ("choice", 'a (argument: JSON, {"x"?: integer | null, "y"?: "a" | 1, "z"?: 2})'),
        ("types", 'a (argument: JSON, {"x"?: string | null, "y"?: object, "z"?: any})'),
    ],
)
def test_any_json_schema_is_described(mode: str, described: str) -> None:
    with tools_of(mode) as tools:
        assert [tool.description for tool in tools] == [described]


def test_arguments_by_name_reach_the_server() -> None:
    with tools_of("echo_arguments") as (tool,):
        cases = (
            (tool.argument({"x": "hi"}), {"x": "hi"}),
            ("hi", {"x": "hi"}),
            ("", {"x": ""}),
            (tool.argument({}), {}),
        )
        for argument, seen in cases:
            assert json.loads(asyncio.run(tool.call(argument))) == seen


def test_noise_of_a_server_is_told_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert called_raw("noise") == "words"
    lines = [record for record in caplog.records if record.name == "mcp.client.stdio"]
    assert len(lines) <= 3
    assert all(line.exc_info is None and line.levelno == logging.WARNING for line in lines)
    assert "Traceback" not in caplog.text


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
        asyncio.run(mcp_servers.listed_tools(client, "raw"))
    assert client.pages <= 2
