"""MCP servers that use all that the protocol lets them, over stdio."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the package mcp: pip install 'mcp>=2,<3'")

from recipes.agent.tools.mcp_servers import McpServers, McpTool, ServerCommand
from recipes.agent.tools.tool import ToolError, ToolUnavailable

SERVER = str(Path(__file__).with_name("raw_mcp_server.py"))


@contextmanager
def tools_of(mode: str, names: tuple[str, ...] | None = None) -> Iterator[list[McpTool]]:
    servers = McpServers({"raw": ServerCommand((sys.executable, SERVER, mode), {}, names)})
    try:
        yield servers.tools
    finally:
        servers.close()


def called(mode: str, argument: str = "hello") -> str:
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
    assert called(mode) == text


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
        called(mode)


def test_a_result_against_its_own_schema_is_the_servers_fault() -> None:
    with pytest.raises(ToolUnavailable, match="returned an invalid result"):
        called("broken")


def test_a_failure_within_a_server_is_no_observation() -> None:
    with pytest.raises(ToolUnavailable, match="the database is gone"):
        called("fails")


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
        assert json.loads(asyncio.run(tool.call(tool.argument({"x": "hi"})))) == {"x": "hi"}
        assert json.loads(asyncio.run(tool.call("hi"))) == {"x": "hi"}


def test_noise_of_a_server_is_told_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert called("noise") == "words"
    lines = [record for record in caplog.records if record.name == "mcp.client.stdio"]
    assert len(lines) <= 3
    assert all(line.exc_info is None and line.levelno == logging.WARNING for line in lines)
    assert "Traceback" not in caplog.text
