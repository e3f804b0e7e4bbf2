"""Generated tasks, the corpus of lookup tasks, first messages, the tools that `agent.tools` names, and examples
of conversations for the warm start of models built from scratch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from recipes.agent.agent_config import EPISODES, AgentConfig, AgentDataConfig
from recipes.agent.conversation.agents import TextEnvironment, environment_maker
from recipes.agent.conversation.call_forms import FunctionCall
from recipes.agent.conversation.turn_messages import ChatMessage, Role, TurnEncoder
from recipes.agent.tools.computing_tools import Calculator, Search, read_corpus
from recipes.agent.tools.tool import FunctionTool, Tool, Toolbox, ToolError, ToolUnavailable
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.answers.sequences import undrawn
from recipes.language.config.problem_config import MOST_GENERATED
from recipes.language.data.problem_sources import load_problems
from recipes.language.data.problems import Problem, ProblemSet, require_text, training_order
from recipes.language.sandbox import sandbox
from recipes.language.sandbox.sandbox import MIB, SandboxLimits
from recipes.language.text.text_tokens import TextTokens
from recipes.training.seeding import Purpose, derive_seed
from rlinf_core import ConfigError
from rlinf_core.registry import import_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def conversations(config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Return `actor.warm_start.steps` batches of conversations on training tasks.

    In at least half of them, tools lead to the right answer; in the others the answer is a guess: that of another task.
    The first turns that are trained on call a tool at the rate `tool_share`.
    """
    data, start = config.data, config.actor.warm_start
    if data.source == EPISODES:
        return _episodes(config, tokenizer)
    tasks = load_tasks(data, evaluation=False)
    tools = Toolbox(make_tools(config), config.agent.tool_timeout)
    writer = _Writer(config, tokenizer)
    chance = random.Random(derive_seed(config.actor.seed, Purpose.WEIGHTS))
    count = start.steps * data.rollout_batch_size
    share = start.tool_share
    # The shares of conversations with tools, and of these with a trained beginning, which all guesses have.
    used = max(0.5, share)
    begun = share * (1 - used) / ((1 - share) * used) if share < 1 else 1.0
    shown: list[Answer] = []
    for index in training_order(len(tasks), 0, count, seed=config.actor.seed, shuffle=True):
        task = tasks[index]
        calls: list[tuple[str, str]] = task.row.get("calls", [])
        # Without the needed tools, only a guess is possible.
        chosen = used if {name for name, _ in calls} <= set(tools.names) else 0.0
        if not calls:
            shown.append(writer.written(task, [(task.answer, True)]))
        elif chance.random() < chosen:
            conversation = writer.written(task, [*asyncio.run(_used(tools, calls)), (task.answer, True)])
            shown.append(
                conversation
                if chance.random() < begun
                else replace(conversation, trained=(False, *conversation.trained[1:]))
            )
        else:
            shown.append(writer.written(task, [(tasks[chance.randrange(len(tasks))].answer, True)]))
    return shown


def _episodes(config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Return episodes of the environment's example actions at skill `tool_share`; none if it has no examples."""
    settings, start = config.agent.environment, config.actor.warm_start
    make: Any = environment_maker(settings) if settings.type == "treasure" or ":" in settings.type else None
    if getattr(make, "example", TextEnvironment.example) is TextEnvironment.example:
        return []
    tasks, writer = load_tasks(config.data, evaluation=False), _Writer(config, tokenizer)
    chance = random.Random(derive_seed(config.actor.seed, Purpose.WEIGHTS))
    shown: list[Answer] = []
    for seed in range(start.steps * config.data.rollout_batch_size):
        play = _played(make(), seed, chance, start.tool_share, config.agent.max_turns)
        first, turns = asyncio.run(play)
        shown.append(writer.written(replace(tasks[seed], prompt=first), turns))
    return shown


async def _played(
    environment: TextEnvironment, seed: int, chance: random.Random, skill: float, most: int
) -> tuple[str, list[tuple[str, bool]]]:
    """Return the initial text of an environment and the turns of an episode, as `_used` does."""
    try:
        first, turns = await environment.reset(seed), list[tuple[str, bool]]()
        for _ in range(most):
            said = environment.example(chance, skill)
            step = await environment.step(said)
            turns.append((said, True))
            if step.done:
                break
            turns.append((step.text, False))
        return first, turns
    finally:
        await environment.close()


async def _used(tools: Toolbox, calls: Iterable[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Return turns that call tools, and the tools' results: texts, and whether the model is trained on them."""
    turns: list[tuple[str, bool]] = []
    for name, argument in calls:
        turns.append((f"<{name}>{argument}</{name}>", True))
        turns.append((tools.written(await tools.call(name, argument)), False))
    return turns


class _Writer:
    """Writes conversations as tokens."""

    def __init__(self, config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._data = config.data
        self._texts, self._end = TextTokens(tokenizer), cast("Any", tokenizer).eos_token_id
        self._encoder = TurnEncoder(
            tokenizer,
            apply_chat_template=config.data.apply_chat_template,
            template_arguments=config.data.chat_template_kwargs,
        )

    def written(self, task: Problem, turns: Iterable[tuple[str, bool]]) -> Answer:
        prompt = self._encoder.encode((), first_messages(task, self._data, ""))
        tokens: list[int] = []
        trained: list[bool] = []
        for text, learned in turns:
            if learned:
                encoded = tuple(self._texts.behind(text))
            else:
                encoded = self._encoder.encode((*prompt, *tokens), [ChatMessage("tool", text)])
            tokens += encoded
            trained += [learned] * len(encoded)
        return undrawn(prompt, (*tokens, self._end), (*trained, True))
