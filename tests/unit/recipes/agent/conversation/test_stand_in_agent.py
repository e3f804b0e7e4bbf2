"""The agent of a rehearsal: as many turns, tokens and seconds as were recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from recipes.agent.conversation.agents import AgentTask, stand_in_agent
from recipes.agent.conversation.chat_model import DrawSettings
from recipes.agent.conversation.turn_messages import ChatMessage
from rlinf_core.process import pacing
from rlinf_core.process.pacing import PacedCalls, Pacing

TASK = AgentTask("what?", (ChatMessage("user", "what?"),), "", {})


class Model:
    """Notes the tokens that each turn may have."""

    def __init__(self, sample: int) -> None:
        self.settings = DrawSettings(sample, 7, 1.0, max_turns=8, max_tokens=1000, max_new_tokens=500)
        self.turns: list[int] = []
        self.said: list[str] = []

    def conversation(self, *messages: ChatMessage) -> Model:
        self.said += [message.text for message in messages]
        return self

    def add(self, text: str) -> None:
        self.said.append(text)

    async def reply(self, max_new_tokens: int) -> None:
        self.turns.append(max_new_tokens)


def test_turns_tokens_and_pauses_are_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = {"answer": ((30.0, 1), (60.0, 1)), "driver/turns": ((2.5, 1),), "driver/pause": ((0.25, 1),)}
    monkeypatch.setattr(pacing, "active", PacedCalls(Pacing({}, sizes)))
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    models = [Model(sample) for sample in range(400)]
    for model in models:
        model_seen: Any = model
        asyncio.run(stand_in_agent(TASK, model_seen, None))  # type: ignore[arg-type]
    turns = [len(model.turns) for model in models]
    assert set(turns) == {2, 3}
    assert sum(turns) / len(turns) == pytest.approx(2.5, abs=0.1)
    assert sum(sum(model.turns) for model in models) / len(models) == pytest.approx(45, abs=2)
    assert len(slept) == sum(turns) - len(models)
    assert set(slept) == {0.25}
