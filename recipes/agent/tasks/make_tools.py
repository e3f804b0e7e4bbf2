"""Construction of the tools that `agent.tools` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from recipes.agent.config.agent_config import AgentConfig
from recipes.agent.tasks.tasks import lookup_corpus
from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.search import Search, read_corpus
from recipes.agent.tools.tool import FunctionTool, Tool, ToolError, ToolUnavailable
from recipes.language.sandbox import sandbox
from recipes.language.sandbox.sandbox import MIB, SandboxLimits
from rlinf_core import ConfigError
from rlinf_core.registry import import_target


def make_tools(config: AgentConfig, search: Tool | None = None, further: Sequence[Tool] = ()) -> list[Tool]:
    """Return the tools of agents.

    Args:
        config: the configuration of the job.
        search: asks for what is searched; None: the index is made here.
        further: tools besides those of `agent.tools`.

    Raises:
        ConfigError: one cannot be imported, has the name of another, the corpus cannot be read, or there is no sandbox.
    """
    tools = [search if name == "search" and search else _tool(name, config) for name in config.agent.tools]
    tools += further
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two tools are named `{name}`", help="rename one of them")
    return tools


def start_servers(config: AgentConfig) -> list[Tool]:
    """Start the MCP servers of this process, and return their tools.

    Raises:
        ConfigError: see `McpServers`.
    """
    if not config.agent.mcp:
        return []
    # For the processes that need it: it imports much.
    from recipes.agent.tools.mcp_servers import McpServers, ServerCommand

    commands = {
        name: ServerCommand((*server.command, *server.args), server.env, server.tools)
        for name, server in config.agent.mcp.items()
    }
    return list(McpServers(commands).tools)


def make_search(config: AgentConfig) -> Search:
    """Return the search, with an index made here.

    Raises:
        ConfigError: the corpus cannot be read.
    """
    path = config.agent.corpus_path
    documents = lookup_corpus(config.data.seed) if path is None else read_corpus(path)
    return Search(documents, config.agent.search_results)


def _tool(name: str, config: AgentConfig) -> Tool:
    if name == "calculator":
        return Calculator()
    if name == "python":
        return Python(SandboxLimits(config.agent.tool_timeout, config.agent.python_memory_mib * MIB))
    if name == "search":
        return make_search(config)
    function = import_target(name, "tool")
    if not callable(function):
        raise ConfigError(f"tool `{name}` is not a function", help="name a function from text to text")
    return FunctionTool(cast("Callable[[str], str]", function))


class Python(Tool):
    """The Python interpreter with its standard library; returns what the program printed.

    Raises:
        ConfigError: this machine has no sandbox.
    """

    name = "python"
    description = "runs a Python program and gives what it prints"
    computes = True

    def __init__(self, limits: sandbox.SandboxLimits) -> None:
        sandbox.check()
        self._limits = limits

    async def call(self, argument: str) -> str:
        """See `Tool`."""
        try:
            ran = await sandbox.run(argument, self._limits)
        except sandbox.SandboxError as error:
            raise ToolUnavailable(f"the sandbox could not be made: {error}") from None
        if ran.flooded:
            raise ToolError(f"the program wrote more than {sandbox.OUTPUT_BYTES} bytes")
        if ran.status != 0:
            raise ToolError(sandbox.reason_of(ran))
        return ran.output.rstrip("\n")
