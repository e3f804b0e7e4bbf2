from __future__ import annotations

import asyncio

from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.environments.env_agent import EnvAgent
from recipes.agent.environments.text_environment import TextEnvironment, TextStep
from recipes.agent.tools.toolbox import Toolbox
from tests.unit.recipes.agent.test_llm import SETTINGS, Script, tokens


class Counting(TextEnvironment):
    """An episode that ends with `stop`; a number is its own reward."""

    stop = (".",)
    closed = 0

    async def reset(self, seed: int) -> str:
        return f"seed {seed}:"

    async def step(self, text: str) -> TextStep:
        said = text.removesuffix(".")
        return TextStep("over", 2.0, True) if said == "stop" else TextStep("next:", float(said))

    async def close(self) -> None:
        Counting.closed += 1


def played(*turns: str) -> tuple[AgentOutcome, LanguageModel]:
    model = LanguageModel(Script(*turns), SETTINGS._replace(max_tokens=200))
    task = AgentTask("episode 7", (ChatMessage("user", "episode 7"),), "", {"seed": 7})
    return asyncio.run(EnvAgent(Counting)(task, model, Toolbox((), 30.0))), model


def test_what_an_environment_says_is_told_and_not_learned() -> None:
    outcome, model = played("0.", "3.", "stop.")
    assert outcome == AgentOutcome(answer="stop.", reward=2.0, parts={"return": 5.0, "unfinished": 0.0})
    (segment,) = model.segments()
    assert segment.prompt == tokens("seed 7:")
    assert segment.tokens == tokens("0.next:3.next:stop.")
    assert [token for token, drawn in zip(segment.tokens, segment.trained, strict=True) if drawn] == [
        *tokens("0.3.stop."),
    ]


def test_an_episode_that_has_no_end_keeps_what_was_gained() -> None:
    before = Counting.closed
    outcome, _ = played("1.", "1.", "1.", "1.", "1.")
    assert outcome == AgentOutcome(reward=0.0, parts={"return": 4.0, "unfinished": 1.0})
    assert Counting.closed == before + 1
