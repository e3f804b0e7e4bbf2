"""Agents: their inputs and outcomes, the built-in one, and the one of a rehearsal.

The built-in agent calls tools until it answers. The agent of a rehearsal says nothing, in as many turns as runs
recorded, and waits as long for its tools.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from recipes.agent.call_forms import find_calls
from recipes.agent.conversation.chat_model import LanguageModel, ModelReply
from recipes.agent.conversation.turn_messages import ChatMessage, ToolOffer
from recipes.agent.tools.toolbox import Toolbox
from rlinf_core.process import pacing


class AgentTask(NamedTuple):
    """A task of an agent.

    Attributes:
        prompt: the question.
        messages: how it is put to the model.
        answer: the right one, for agents that judge themselves.
        row: everything that its source says of it.
    """

    prompt: str
    messages: tuple[ChatMessage, ...]
    answer: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """The outcome of a run.

    Attributes:
        answer: text that `reward.reward_type` scores.
        reward: the reward itself; None: the answer is scored.
        parts: named parts of the reward, which become metrics.
    """

    answer: str = ""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


# An agent: a user's function, or the one below. A text is an outcome with that answer.
Agent = Callable[[AgentTask, LanguageModel, Toolbox], Awaitable[AgentOutcome | str]]


async def tool_agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Let the model use tools until it writes a turn without a call: its answer.

    It calls them as functions where the toolbox offers some and its chat template teaches a form, one call a turn else.
    """
    functions = tuple(json.dumps(function, ensure_ascii=False) for function in tools.functions)
    chat = llm.conversation(*task.messages, tools=ToolOffer(functions, tools.instructions) if functions else None)
    while True:
        reply = await chat.reply(stop=tools.stop)
        messages = await _answers(tools, reply)
        if not messages:
            return AgentOutcome(answer=reply.text)
        for message in messages:
            chat.add(message)


async def _answers(tools: Toolbox, reply: ModelReply) -> list[ChatMessage]:
    """Return the messages that answer the calls in a turn; none where it has none."""
    if reply.form is None:
        # Where a special token ends a turn, only the text without it ends with the call.
        call = tools.find_call(reply.raw, thinking=reply.thinking) or tools.find_call(
            reply.text, thinking=reply.thinking
        )
        if call is None:
            return []
        return [ChatMessage("tool", tools.written(await tools.call(call.name, call.argument)))]
    schemas = {function["function"]["name"]: function["function"]["parameters"] for function in tools.functions}
    _, calls = find_calls(reply.raw, reply.form, schemas, thinking=reply.thinking)
    seen = await asyncio.gather(*(tools.call(call.name, json.loads(call.arguments)) for call in calls))
    return [
        ChatMessage("tool", observation.text, call_id=call.call_id, name=call.name)
        for call, observation in zip(calls, seen, strict=True)
    ]


# Sizes of a record: tokens of conversations; and what its flow makes of it, see `LanguageFlow.constants`.
_ANSWER: Final = "answer"
_TURNS, _PAUSE = "driver/turns", "driver/pause"


async def stand_in_agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Hold a conversation whose tokens are spread evenly over its turns."""
    settings = llm.settings
    draws = random.Random(f"{task.prompt}:{settings.seed}:{settings.sample}")
    lengths, numbers = zip(*(pacing.recorded(_ANSWER) or ((settings.max_new_tokens, 1),)), strict=True)
    (tokens,) = draws.choices(lengths, numbers)
    mean = _constant(_TURNS, 1.0)
    # Whole turns, whose mean is the recorded one.
    turns = max(1, min(settings.max_turns, int(mean) + (draws.random() < mean % 1)))
    chat = llm.conversation(*task.messages)
    for turn in range(turns):
        if turn:
            await asyncio.sleep(_constant(_PAUSE, 0.0))
            chat.add(".")
        await chat.reply(max_new_tokens=max(1, round(tokens / turns)))
    return AgentOutcome(answer="")


def _constant(phase: str, otherwise: float) -> float:
    sizes = pacing.recorded(phase)
    return sizes[0][0] if sizes else otherwise
