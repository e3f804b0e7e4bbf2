"""Tools of Model Context Protocol (MCP) servers, which are started by their commands."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from recipes.agent.tools import guard
from recipes.agent.tools.tool import CallLost, Tool, ToolError, ToolHealth, ToolUnavailable
from rlinf_core import ConfigError
from rlinf_core.foreign.budget import Budget, json_size
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.process.proc import MARK
from rlinf_core.process.requirements import install_command, missing_modules

# Some servers are downloaded at their first start.
_START_SECONDS: Final = 60.0
# Consecutive unanswered calls after which a server is restarted.
_MOST_SILENT: Final = 3
# The maximum pages of a list of tools, and their total bytes.
_MOST_PAGES: Final = 1000
_LARGEST_LIST: Final = 128 << 20
# Error codes of MCP: a closed connection; a timeout or an internal error of the server.
_CONNECTION_CLOSED: Final = -32000
_OF_SERVER: Final = frozenset((-32001, -32603))
# The maximum depth of references within a schema.
_MOST_REFERENCES: Final = 8
LOGGER = logging.getLogger("rlinf")


class ServerCommand(NamedTuple):
    """A server to start: its command, its variables, and the tools to offer; None: all."""

    command: Sequence[str]
    env: Mapping[str, str]
    tools: Sequence[str] | None = None


class McpTool(Tool):
    """A tool of a server. Its argument is a JSON object, or a text if the tool takes a single text.

    Args:
        server: the server that offers it.
        name, description: the server's name and description of it.
        schema: the JSON Schema of the arguments.
    """

    def __init__(self, server: McpServer, name: str, description: str, schema: Mapping[str, Any]) -> None:
        self.name = name
        self.parameters = schema
        self._server = server
        self.health = server.health
        self._text = only_text(schema)
        summary = description.strip().partition("\n")[0]
        self.description = summary if self._text else f"{summary} (argument: JSON, {written_schema(schema)})".strip()

    def argument(self, values: Mapping[str, Any]) -> str:
        return json.dumps(dict(values), ensure_ascii=False)

    async def call(self, argument: str) -> str:
        return await self._server.call(self.name, self._arguments(argument))

    def _arguments(self, text: str) -> dict[str, Any]:
        try:
            arguments: Any = load_json(text) if text.strip() else {}
        except ValueError:
            arguments = None
        # An empty text is the text of a tool that takes one, but `{}` a call without arguments.
        if isinstance(arguments, dict) and (text.strip() or self._text is None):
            return cast("dict[str, Any]", arguments)
        if self._text is None:
            raise ToolError(f"the argument of {self.name} must be a JSON object")
        return {self._text: text}


class McpServers:
    """The servers of this process, which end with it however it ends.

    Args:
        commands: the commands by server name.

    Raises:
        ConfigError: the package mcp is missing, or a server does not start.
    """

    def __init__(self, commands: Mapping[str, ServerCommand]) -> None:
        if missing_modules(["mcp"]):
            raise ConfigError("`agent.mcp` needs the package mcp", help=f"run `{install_command('mcp')}`")
        stdio = logging.getLogger("mcp.client.stdio")
        if not any(isinstance(noise_filter, _Noise) for noise_filter in stdio.filters):
            stdio.addFilter(_Noise())
        self._loop = asyncio.new_event_loop()
        # The servers end with the thread that starts them.
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlinf-mcp", daemon=True)
        self._thread.start()
        self._servers = [McpServer(name, command, self._loop) for name, command in commands.items()]
        started = [server.start() for server in self._servers]
        try:
            self.tools = [tool for future in started for tool in future.result(_START_SECONDS + 1)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers."""
        for stopped in [server.stop() for server in self._servers]:
            stopped.result(_START_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class McpServer:
    """A server, which is restarted when it dies.

    Args:
        name: the server's name in the configuration.
        command: the command that starts it.
        loop: the event loop of its connection.
    """

    def __init__(self, name: str, command: ServerCommand, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._command = command
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self._client: asyncio.Future[Any] = loop.create_future()
        self._silent = 0
        # One for all tools of the server, as a call that breaks one tool breaks the others.
        self.health = ToolHealth()

    def start(self) -> Future[list[McpTool]]:
        """Start the server, and return its tools as a future; ConfigError: it does not start, or lacks a requested
        tool."""
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop)

    def stop(self) -> Future[None]:
        """Stop the server."""
        return asyncio.run_coroutine_threadsafe(self._stop(), self._loop)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server from any event loop.

        Raises:
            ToolError: the tool reports a failure.
            CallLost: the server exited, failed internally, or returned an invalid result.
            ToolUnavailable: the server cannot be restarted.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop))

    async def _start(self) -> list[McpTool]:
        path = self._command.env.get("PATH")
        program = self._command.command[0]
        if shutil.which(program, path=path) is None:
            raise ConfigError(
                f"the MCP server `{self._name}` cannot be started: `{program}` does not exist",
                help="install it, or correct `agent.mcp`",
            )
        self._task = asyncio.create_task(self._keep())
        try:
            async with asyncio.timeout(_START_SECONDS):
                listed = await listed_tools(await asyncio.shield(self._client), self._name)
        except Exception as error:  # noqa: BLE001 - of the server
            await self._stop()
            raise ConfigError(
                f"the MCP server `{self._name}` does not start",
                why=f"{type(error).__name__}: {error}",
                help=f"try its command by hand: {' '.join(self._command.command)}",
            ) from None
        tools = {tool.name: McpTool(self, tool.name, tool.description or "", tool.input_schema) for tool in listed}
        asked = self._command.tools
        missing = sorted(set(asked or ()) - set(tools))
        if missing:
            raise ConfigError(
                f"the MCP server `{self._name}` has no tool `{missing[0]}`", help=f"it has {', '.join(tools)}"
            )
        return [tool for name, tool in tools.items() if asked is None or name in asked]

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        """Keep a connection to the server, restarting it when it breaks, until a restart fails."""
        mcp: Any = import_module("mcp")
        arguments = ["-I", "-S", str(Path(guard.__file__)), str(os.getpid()), *self._command.command]
        # The cluster finds and ends remaining processes of a worker by this mark.
        env = {**self._command.env, **({MARK: os.environ[MARK]} if MARK in os.environ else {})}
        while True:
            try:
                parameters = mcp.StdioServerParameters(command=sys.executable, args=arguments, env=env)
                async with mcp.Client(parameters) as client:
                    self._client.set_result(client)
                    await self._broken.wait()
            except Exception as error:  # noqa: BLE001 - of the server; passed to the waiting caller
                if not self._client.done():
                    self._client.set_exception(error)
                    self._client.exception()  # there may be no waiter
            if not self._broken.is_set():
                return
            self._broken.clear()

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._task is None or self._task.done():
            raise ToolUnavailable(f"the server of {name} has exited and is not restarted")
        try:
            client = await asyncio.shield(self._client)
        except Exception:  # noqa: BLE001 - of the server, or of its start
            raise ToolUnavailable(f"the server of {name} has exited and cannot be restarted") from None
        try:
            result = await client.call_tool(name, arguments)
        except asyncio.CancelledError:
            self._silent += 1
            if self._silent >= _MOST_SILENT:
                self._lose(client)
            raise
        except Exception as error:  # noqa: BLE001 - of the server, or of the library
            mcp: Any = import_module("mcp")
            code = cast("Any", error).code if isinstance(error, mcp.MCPError) else _CONNECTION_CLOSED
            if code in _OF_SERVER:
                raise CallLost(f"the server of {name} failed: {first_line(error)}") from None
            if code != _CONNECTION_CLOSED:
                raise ToolError(str(error)) from None
            if isinstance(error, ValueError | RuntimeError):
                raise CallLost(f"the server of {name} returned an invalid result: {first_line(error)}") from None
            self._lose(client)
            raise CallLost(f"the server of {name} has exited; restarting it") from None
        self._silent = 0
        text = result_text(result)
        if result.is_error:
            raise ToolError(text or "the tool failed without a reason")
        return text

    def _lose(self, client: Any) -> None:
        """Restart the server, unless that has happened since a call started."""
        if self._client.done() and self._client.exception() is None and self._client.result() is client:
            self._silent = 0
            self._client = self._loop.create_future()
            self._broken.set()


async def listed_tools(client: Any, server: str) -> list[Any]:
    """Return the tools of all pages of a server's list.

    Raises:
        OverBudgetError: the list is too long.
    """
    tools: list[Any] = []
    cursor, seen = None, set[str]()
    budget = Budget(_LARGEST_LIST, "the list")
    while True:
        page = await client.list_tools(cursor=cursor)
        budget.take(sum(json_size(tool.model_dump_json()) for tool in page.tools))
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools
        if cursor in seen or len(seen) >= _MOST_PAGES:
            LOGGER.warning("the tool list of the MCP server `%s` does not end: using %d pages", server, len(seen))
            return tools
        seen.add(cursor)


class _Noise(logging.Filter):
    """Condenses log records about non-protocol output of a server to a single line."""

    _left = 3

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        error = record.exc_info[1] if record.exc_info else None
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        record.msg = f"{record.getMessage()}: {first_line(error)}" if error else record.getMessage()
        record.args = ()
        self._left -= 1
        return self._left >= 0


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def only_text(schema: Mapping[str, Any]) -> str | None:
    """Return the name of a tool's only argument if it is a text; otherwise None."""
    properties = _mapping(schema.get("properties"))
    if len(properties) != 1:
        return None
    ((name, property_schema),) = properties.items()
    kinds = _kind(property_schema, schema).split(" | ")
    # An argument of any type may be a text, and so may one of the type "string or null".
    takes_text = property_schema is True or property_schema == {} or set(kinds) in ({"string"}, {"string", "null"})
    return name if takes_text else None


def written_schema(schema: Mapping[str, Any]) -> str:
    """Return a signature of the arguments for the model: `{"path": string, "lines"?: integer}`."""
    required: Any = schema.get("required")
    needed = cast("list[Any]", required) if isinstance(required, list) else []
    listed = (
        f"{json.dumps(name)}{'' if name in needed else '?'}: {_kind(property_schema, schema)}"
        for name, property_schema in _mapping(schema.get("properties")).items()
    )
    return "{" + ", ".join(listed) + "}"


def result_text(result: Any) -> str:
    """Return the result of a call as text: its texts, the texts of resources, and placeholders for other content.

    Args:
        result: a `CallToolResult` of the package mcp.
    """
    parts = [_part(part) for part in result.content]
    # A server need not repeat a structured result as text.
    if result.structured_content is not None and not any(part.type == "text" for part in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _part(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        kind = part.resource.mime_type or "binary data"
        return text if isinstance(text, str) else f"[resource {part.resource.uri}: {kind} is not shown]"
    if part.type == "resource_link":
        return f"[resource {part.uri}: {part.name}]"
    return f"[{part.type}: {getattr(part, 'mime_type', None) or 'this'} is not shown]"


def _kind(schema: Any, root: Mapping[str, Any], references: int = 0) -> str:
    """Return a short description of the values that a JSON Schema accepts; `any` if it is too complex."""
    fields = _mapping(schema)
    target = fields.get("$ref")
    if isinstance(target, str):
        return _kind(_found(target, root), root, references + 1) if references < _MOST_REFERENCES else "any"
    for name in ("enum", "const"):
        if name in fields:
            values: Any = fields[name] if name == "enum" and isinstance(fields[name], list) else [fields[name]]
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(fields.get(name), list) and references < _MOST_REFERENCES:
            kinds = [_kind(alternative, root, references + 1) for alternative in fields[name]]
            return "any" if "any" in kinds else " | ".join(dict.fromkeys(kinds)) or "any"
    kind = fields.get("type")
    if isinstance(kind, list):
        return " | ".join(map(str, cast("list[Any]", kind))) or "any"
    return kind if isinstance(kind, str) else "any"


def _found(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within a schema; None if it does not exist."""
    value: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        value = _mapping(value).get(part.replace("~1", "/").replace("~0", "~"))
    return value


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
