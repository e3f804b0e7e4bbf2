from __future__ import annotations

import asyncio

import pytest

from recipes.agent.conversation.agents import AgentOutcome, AgentTask, tool_agent
from recipes.agent.conversation.chat_model import DrawSettings, LanguageModel, LimitReached
from recipes.agent.conversation.conversation import ConversationError
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest
from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.toolbox import Toolbox
from recipes.language.answers.answer_group import TurnRecord

SETTINGS = DrawSettings(sample=2, seed=5, temperature=1.0, max_turns=4, max_tokens=40, max_new_tokens=10)


class Script:
    """Engines that say what a test has written: token ids are those of characters, and a turn ends with 0."""

    def __init__(self, *turns: str) -> None:
        self._turns = list(turns)
        self.requests: list[DrawRequest] = []

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        self.requests.append(request)
        await asyncio.sleep(0)
        observed = tuple(ord(item) for message in request.messages for item in message.text)
        room = request.max_tokens - len(request.context) - len(observed)
        if room < 1:
            return DrawnTurn(0, (), (), (), (), "", "length")
        text = self._turns.pop(0)
        ends = any(text.endswith(item) for item in request.stop)
        tokens = tuple(map(ord, text)) + (() if ends else (0,))
        return DrawnTurn(0, observed, tokens, (-1.0,) * len(tokens), (3,) * len(tokens), text, "stop")


def tokens(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_an_agent_uses_tools_until_it_answers() -> None:
    script, turns = Script("<calculator>2*3</calculator>", "6"), list[TurnRecord]()
    model = LanguageModel(script, SETTINGS._replace(max_tokens=80), turns.append)
    task = AgentTask("2*3=", (ChatMessage("user", "2*3="),), "6", {})

    outcome = asyncio.run(tool_agent(task, model, Toolbox([Calculator()], 30.0)))

    assert outcome == AgentOutcome(answer="6")
    (segment,) = model.segments()
    assert segment.prompt == tokens("2*3=")
    assert segment.tokens == (*tokens("<calculator>2*3</calculator><result>6</result>6"), 0)
    learned = [token for token, drawn in zip(segment.tokens, segment.trained, strict=True) if drawn]
    assert learned == [*tokens("<calculator>2*3</calculator>6"), 0]
    assert segment.sample == 2
    assert [(turn.who, turn.text) for turn in turns] == [
        ("task", "2*3="),
        ("model", "<calculator>2*3</calculator>"),
        ("model", "6"),
    ]
    # What the model said comes back to the engine as the tokens that it drew.
    assert script.requests[1].context == tokens("2*3=<calculator>2*3</calculator>")
    assert script.requests[1].messages == (ChatMessage("tool", "<result>6</result>"),)


def test_turns_are_limited_over_all_conversations() -> None:
    model = LanguageModel(Script(*"abcdef"), SETTINGS)

    async def run() -> None:
        first, second = model.conversation("a"), model.conversation("b")
        for _ in range(4):
            await first.reply()
            await second.reply()

    with pytest.raises(LimitReached) as reached:
        asyncio.run(run())
    assert reached.value.limit == "turns"
    assert model.turns == 4
    assert [segment.drawn for segment in model.segments()] == [4, 4]


def test_a_conversation_that_is_full_ends_the_run() -> None:
    model = LanguageModel(Script("a"), SETTINGS)

    async def run() -> None:
        chat = model.conversation("x" * 30)
        await chat.reply()
        chat.add("y" * 9)
        await chat.reply()

    with pytest.raises(LimitReached) as reached:
        asyncio.run(run())
    assert reached.value.limit == "tokens"
    # What did not fit was never told to the model.
    (segment,) = model.segments()
    assert len(segment.prompt) + len(segment.tokens) == 32


def test_branches_are_segments_that_share_what_came_before() -> None:
    turns: list[TurnRecord] = []
    model = LanguageModel(script := Script("a", "b", "c"), SETTINGS, turns.append)

    async def run() -> None:
        trunk = model.conversation("x")
        await trunk.reply()
        branch = trunk.fork()
        branch.add("y")
        await asyncio.gather(trunk.reply(), branch.reply())
        branch.credit(0.5)

    asyncio.run(run())

    trunk, branch = model.segments()
    assert trunk.prompt == tokens("x")
    assert branch.prompt == (*tokens("xa"), 0, *tokens("y"))
    assert branch.tokens == (*tokens("c"), 0)
    assert branch.rewards == (0.0, 0.5)
    assert turns[-1] == TurnRecord("reward", "+0.5", segment=1)
    assert trunk.tokens == (*tokens("a"), 0, *tokens("b"), 0)
    # Equal conversations draw other tokens in each branch.
    assert len({request.sample for request in script.requests}) == 2


def test_the_model_says_one_thing_at_a_time() -> None:
    model = LanguageModel(Script("a", "b"), SETTINGS)

    async def run() -> None:
        chat = model.conversation("x")
        await asyncio.gather(chat.reply(), chat.reply())

    with pytest.raises(RuntimeError, match=r"`fork\(\)`"):
        asyncio.run(run())


def test_a_run_without_a_turn_has_a_segment_that_teaches_nothing() -> None:
    model = LanguageModel(Script(), SETTINGS)
    with pytest.raises(ConversationError):
        model.conversation("x").credit(1.0)
    (segment,) = model.segments()
    assert segment.drawn == 0
