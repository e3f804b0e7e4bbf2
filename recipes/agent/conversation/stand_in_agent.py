"""The agent of a rehearsal: it says nothing, in as many turns as runs recorded, and waits as long for its tools."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.tools.toolbox import Toolbox
from rlinf_core.process import pacing

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
