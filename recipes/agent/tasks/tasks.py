"""Generated tasks, the corpus of lookup tasks, first messages, and the tools that `agent.tools` names."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from recipes.agent.call_forms import FunctionCall
from recipes.agent.config.agent_config import EPISODES, AgentConfig, AgentDataConfig
from recipes.agent.conversation.turn_messages import ChatMessage, Role
from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.search import Search, read_corpus
from recipes.agent.tools.tool import FunctionTool, Tool, ToolError, ToolUnavailable
from recipes.language.config.problem_config import MOST_GENERATED
from recipes.language.data.load_problems import load_problems
from recipes.language.data.problems import Problem, ProblemSet, require_text
from recipes.language.sandbox import sandbox
from recipes.language.sandbox.sandbox import MIB, SandboxLimits
from rlinf_core import ConfigError
from rlinf_core.registry import import_target

T = TypeVar("T")

# The number of persons, and of towns and rivers.
_PERSONS: Final = 400
_PLACES: Final = 80
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class Episodes:
    """Seeds of an environment; evaluation seeds are held out from training.

    Args:
        evaluation: whether those of evaluation are asked for.
        size: the number of tasks.
    """

    def __init__(self, *, evaluation: bool, size: int) -> None:
        self._first, self._size = (MOST_GENERATED, size) if evaluation else (0, MOST_GENERATED)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Problem:
        seed = self._first + index
        return Problem(prompt=f"episode {seed}", answer="", row={"seed": seed}, source=EPISODES)


def load_tasks(data: AgentDataConfig, *, evaluation: bool) -> ProblemSet:
    """Return the training or evaluation tasks.

    Raises:
        ConfigError: see `load_problems`.
    """
    if data.source == EPISODES:
        return Episodes(evaluation=evaluation, size=data.val_size)
    if data.source == "calculations":
        return calculations(evaluation=evaluation, size=data.val_size, seed=data.seed)
    if data.source == "lookups":
        return lookups(evaluation=evaluation, size=data.val_size, seed=data.seed)
    return load_problems(data, evaluation=evaluation)


def calculations(*, evaluation: bool, size: int, seed: int) -> list[Problem]:
    """Return products of two two-digit numbers, such as `12*34=`; evaluation tasks are held out from training.

    Args:
        evaluation: whether those of evaluation are asked for.
        size: the number of evaluation tasks, at most half of all.
        seed: the seed of the split.
    """
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(f"calculations {seed}").shuffle(pairs)
    return [
        Problem(
            prompt=f"{first}*{second}=",
            answer=str(first * second),
            row={"calls": [["calculator", f"{first}*{second}"]]},
            source="calculations",
        )
        for first, second in _part(pairs, evaluation, size)
    ]


def lookups(*, evaluation: bool, size: int, seed: int) -> list[Problem]:
    """Return questions for the river at a person's home, such as `river home kobu?`, which need two lookups.

    Evaluation persons are held out from training. Arguments as for `calculations`.
    """
    homes, rivers = _facts(seed)
    return [
        Problem(
            prompt=f"river home {person}?",
            answer=rivers[homes[person]],
            row={"calls": [["search", f"home {person}"], ["search", f"river {homes[person]}"]]},
            source="lookups",
        )
        for person in _part(list(homes), evaluation, size)
    ]


def lookup_corpus(seed: int) -> list[str]:
    """Return the documents with the answers of `lookups`, one fact each."""
    homes, rivers = _facts(seed)
    documents = [f"home {person} {town}" for person, town in homes.items()]
    return documents + [f"river {town} {river}" for town, river in rivers.items()]


def _facts(seed: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return each person's home town and each town's river; all names differ."""
    names = ["".join(letters) for letters in itertools.product(_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS)]
    chance = random.Random(f"lookups {seed}")
    chance.shuffle(names)
    persons, rest = names[:_PERSONS], names[_PERSONS:]
    towns, rivers = rest[:_PLACES], rest[_PLACES : 2 * _PLACES]
    return {person: chance.choice(towns) for person in persons}, dict(zip(towns, rivers, strict=True))


def _part(every: list[T], evaluation: bool, size: int) -> list[T]:
    held = min(size, len(every) // 2)
    return every[:held] if evaluation else every[held:]


def first_messages(task: Problem, data: AgentDataConfig, instructions: str) -> tuple[ChatMessage, ...]:
    """Return the initial messages of a task's conversation.

    Args:
        task: the problem.
        data: the configuration of prompts.
        instructions: directions for the use of tools; included in the system message of a chat template.

    Raises:
        ConfigError: the problem consists of messages, and no chat template is used.
    """
    if not data.apply_chat_template:
        require_text(task)
        return (ChatMessage("user", data.few_shot + task.prompt),)
    written = task.messages or ({"role": "user", "content": task.prompt},)
    messages = [row_message(message) for message in written]
    messages[-1] = messages[-1]._replace(text=data.few_shot + messages[-1].text)
    if messages[0].role != "system" and (data.system_prompt or instructions):
        messages.insert(0, ChatMessage("system", data.system_prompt))
    if messages[0].role == "system":
        first = messages[0]
        messages[0] = first._replace(text="\n\n".join(filter(None, (first.text, instructions))))
    return tuple(messages)


def row_message(message: Mapping[str, Any]) -> ChatMessage:
    """Convert a row's message, as `read_messages` returns it, to one of a conversation."""
    calls: list[Any] = message.get("tool_calls", [])
    return ChatMessage(
        cast("Role", message["role"]),
        message["content"],
        tuple(_row_call(call.get("id", ""), call.get("function", call)) for call in calls),
        str(message.get("tool_call_id", "")),
        str(message.get("name", "")),
    )


def _row_call(call_id: object, function: Mapping[str, Any]) -> FunctionCall:
    return FunctionCall(function["name"], json.dumps(function["arguments"], ensure_ascii=False), str(call_id))


def make_tools(config: AgentConfig, search: Tool | None = None, further: Sequence[Tool] = ()) -> list[Tool]:
    """Return the tools of agents.

    Args:
        config: the configuration of the job.
        search: the search tool; None: one with an index made here.
        further: additional tools.

    Raises:
        ConfigError: a tool cannot be imported or called, names repeat, the corpus cannot be read, or there is no
            sandbox.
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
    # Imported only where needed, as it imports much.
    from recipes.agent.tools.mcp_servers import McpServers, ServerCommand

    commands = {
        name: ServerCommand((*server.command, *server.args), server.env, server.tools)
        for name, server in config.agent.mcp.items()
    }
    return list(McpServers(commands).tools)


def make_search(config: AgentConfig) -> Search:
    """Return the search tool with a new index.

    Raises:
        ConfigError: the corpus cannot be read.
    """
    path = config.agent.settings.corpus_path
    documents = lookup_corpus(config.data.seed) if path is None else read_corpus(path)
    return Search(documents, config.agent.settings.search_results)


def _tool(name: str, config: AgentConfig) -> Tool:
    if name == "calculator":
        return Calculator()
    if name == "python":
        return Python(SandboxLimits(config.agent.tool_timeout, config.agent.settings.python_memory_mib * MIB))
    if name == "search":
        return make_search(config)
    return FunctionTool(cast("Callable[[str], Any]", import_target(name, "tool")), name)


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
        try:
            ran = await sandbox.run(argument, self._limits)
        except sandbox.SandboxError as error:
            raise ToolUnavailable(f"the sandbox could not be made: {error}") from None
        if ran.flooded:
            raise ToolError(f"the program wrote more than {sandbox.OUTPUT_BYTES} bytes")
        if ran.status != 0:
            raise ToolError(sandbox.reason_of(ran))
        return ran.output.rstrip("\n")
