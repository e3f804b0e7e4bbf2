"""Agents: what they are given, what comes of them, and the one that uses tools until it answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.tools.toolbox import Toolbox


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


# An agent: a function of the user's, or the one below. A text is an outcome with that answer.
Agent = Callable[[AgentTask, LanguageModel, Toolbox], Awaitable[AgentOutcome | str]]


async def tool_agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Let the model use tools, one call a turn, until it writes a turn without a call: its answer."""
    chat = llm.conversation(*task.messages)
    while True:
        reply = await chat.reply(stop=tools.stop)
        call = tools.find_call(reply.text)
        if call is None:
            return AgentOutcome(answer=reply.text)
        chat.add(tools.written(await tools.call(call.name, call.argument)), role="tool")
