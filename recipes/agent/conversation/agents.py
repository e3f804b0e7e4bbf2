"""Agents: their inputs and outcomes, the built-in agent, and the stand-in of a rehearsal.

The built-in agent calls tools until it answers. The stand-in takes as many turns, and waits as long for tools, as
recorded runs.
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
        messages: the messages that put the question to the model.
        answer: the reference answer, for agents that judge themselves.
        row: all fields of the task in its source.
    """

    prompt: str
    messages: tuple[ChatMessage, ...]
    answer: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """The outcome of a run.

    Attributes:
        answer: the text for `reward.reward_type` to score.
        reward: the reward; None: `answer` is scored.
        parts: named parts of the reward, which become metrics.
    """

    answer: str = ""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


# An agent: a custom function, or one of those below. A returned text is an outcome with that answer.
Agent = Callable[[AgentTask, LanguageModel, Toolbox], Awaitable[AgentOutcome | str]]


async def tool_agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Let the model use tools until it writes a turn without a call, its answer.

    It calls functions if the toolbox offers any and the chat template teaches a form; else it makes one plain call per
    turn.
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
    """Run the calls in a turn, and return the messages with their results; empty without calls."""
    if reply.form is None:
        # If a special token ends the turn, only the text without special tokens ends with the call.
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


# Names in records: the sizes of conversations in tokens, and constants of `LanguageFlow.constants`.
_ANSWER: Final = "answer"
_TURNS, _PAUSE = "driver/turns", "driver/pause"


async def stand_in_agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Hold a stand-in conversation whose tokens are spread evenly over its turns."""
    settings = llm.settings
    draws = random.Random(f"{task.prompt}:{settings.seed}:{settings.sample}")
    lengths, numbers = zip(*(pacing.recorded(_ANSWER) or ((settings.max_new_tokens, 1),)), strict=True)
    (tokens,) = draws.choices(lengths, numbers)
    mean = _constant(_TURNS, 1.0)
    # Round at random, so that the mean is the recorded mean.
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
