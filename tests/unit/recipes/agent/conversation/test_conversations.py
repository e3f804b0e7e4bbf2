"""Conversations of agents: what is learned from, thoughts, special tokens, halves of characters, and a rehearsal's."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from recipes.agent.conversation.agents import AgentOutcome, AgentTask, stand_in_agent, tool_agent
from recipes.agent.conversation.call_forms import HERMES, find_calls
from recipes.agent.conversation.chat_model import ConversationError, DrawSettings, LanguageModel, LimitReached
from recipes.agent.conversation.turn_messages import ChatMessage, TurnEncoder
from recipes.agent.tools.computing_tools import Calculator
from recipes.agent.tools.tool import TEXTS_MENDED, FunctionTool, Toolbox
from recipes.language.answers.answer_group import TurnRecord
from rlinf_core.process import pacing
from rlinf_core.process.pacing import PacedCalls, Pacing
from tests.unit.recipes.agent.endpoint.asking import CALL, OTHER_CALL, PARAMETERS, posted
from tests.unit.recipes.agent.scripted import SETTINGS, Script, model, tokens
from tests.unit.recipes.language.habits import tokenizer_of

TASK = AgentTask("2*3=", (ChatMessage("user", "2*3="),), "6", {})


def test_an_agent_uses_tools_until_it_answers() -> None:
    script, turns = Script("<calculator>2*3</calculator>", "6"), list[TurnRecord]()
    llm = LanguageModel(script, SETTINGS._replace(max_tokens=80), turns.append)

    outcome = asyncio.run(tool_agent(TASK, llm, Toolbox([Calculator()], 30.0)))

    assert outcome == AgentOutcome(answer="6")
    (segment,) = llm.segments()
    assert segment.prompt == tokens("2*3=")
    assert segment.tokens == (*tokens("<calculator>2*3</calculator><result>6</result>6"), 0)
    learned = [token for token, drawn in zip(segment.tokens, segment.trained, strict=True) if drawn]
    assert learned == [*tokens("<calculator>2*3</calculator>6"), 0]
    assert (segment.sample, set(segment.drawn_versions)) == (2, {3})
    assert [(turn.who, turn.text) for turn in turns] == [
        ("task", "2*3="),
        ("model", "<calculator>2*3</calculator>"),
        ("model", "6"),
    ]
    # What the model said comes back to the engine as the tokens that it drew.
    assert script.requests[1].context == tokens("2*3=<calculator>2*3</calculator>")
    assert script.requests[1].messages == (ChatMessage("tool", "<result>6</result>"),)


async def test_turns_are_limited_over_all_conversations() -> None:
    llm = LanguageModel(Script(*"abcdef"), SETTINGS)
    first, second = llm.conversation("a"), llm.conversation("b")
    for chat in (first, second) * 2:
        await chat.reply()
    with pytest.raises(LimitReached) as reached:
        await first.reply()
    assert reached.value.limit == "turns"
    assert llm.turns == 4
    assert [segment.drawn for segment in llm.segments()] == [4, 4]


async def test_a_conversation_that_is_full_ends_the_run() -> None:
    llm = LanguageModel(Script("a"), SETTINGS)
    chat = llm.conversation("x" * 30)
    await chat.reply()
    chat.add("y" * 9)
    with pytest.raises(LimitReached) as reached:
        await chat.reply()
    assert reached.value.limit == "tokens"
    # What did not fit was never told to the model.
    (segment,) = llm.segments()
    assert len(segment.prompt) + len(segment.tokens) == 32


async def test_branches_are_segments_that_share_what_came_before() -> None:
    turns: list[TurnRecord] = []
    llm = LanguageModel(script := Script("a", "b", "c"), SETTINGS, turns.append)
    trunk = llm.conversation("x")
    await trunk.reply()
    branch = trunk.fork()
    branch.add("y")
    await asyncio.gather(trunk.reply(), branch.reply())
    branch.credit(cast("Any", np.float32([0.5])))
    trunk, branch = llm.segments()
    assert trunk.prompt == tokens("x")
    assert branch.prompt == (*tokens("xa"), 0, *tokens("y"))
    assert branch.tokens == (*tokens("c"), 0)
    assert branch.rewards == (0.0, 0.5)
    assert turns[-1] == TurnRecord("reward", "+0.5", segment=1)
    assert trunk.tokens == (*tokens("a"), 0, *tokens("b"), 0)
    # Equal conversations draw other tokens in each branch.
    assert len({request.sample for request in script.requests}) == 2


async def test_the_model_says_one_thing_at_a_time() -> None:
    chat = LanguageModel(Script("a", "b"), SETTINGS).conversation("x")
    with pytest.raises(RuntimeError, match=r"`fork\(\)`"):
        await asyncio.gather(chat.reply(), chat.reply())


@pytest.mark.parametrize(
    "settings", [{"stop": ["a", ""]}, {"stop": ""}, {"stop": [3]}, {"max_new_tokens": 0}, {"max_new_tokens": 2.5}]
)
async def test_a_turn_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    llm = model("a")
    with pytest.raises(ValueError, match=f"`{name}` is "):
        await llm.conversation("x").reply(**settings)
    assert (llm.turns, llm.limit) == (0, "")


async def test_a_message_of_meanwhile_comes_after_the_turn() -> None:
    llm = LanguageModel(script := Script("a", "b"), SETTINGS)
    chat = llm.conversation("x")
    speaking = asyncio.create_task(chat.reply())
    await asyncio.sleep(0)
    chat.add("y")
    await speaking
    await chat.reply()
    assert [request.messages for request in script.requests] == [(ChatMessage("user", text),) for text in "xy"]


async def test_one_stop_text_is_not_its_letters() -> None:
    llm = LanguageModel(script := Script("a"), SETTINGS)
    await llm.conversation("x").reply(stop="end")
    assert script.requests[0].stop == ("end",)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (({"role": "user", "content": "x"},), "a message is dict"),
        ((5,), "a message is int"),
        ((None,), "a message is NoneType"),
        ((ChatMessage("user", cast("Any", 5)),), "a message is ChatMessage"),
        (("x", "assisstant"), "the role of a message is 'assisstant', not one of system, user, assistant, tool"),
    ],
)
def test_what_is_no_message_is_refused(message: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        model().conversation("x").add(*message)


def test_a_run_without_a_turn_has_a_segment_that_teaches_nothing() -> None:
    llm = LanguageModel(Script(), SETTINGS)
    with pytest.raises(RuntimeError, match="set the reward after a reply"):
        llm.conversation("x").credit(1.0)
    (segment,) = llm.segments()
    assert segment.drawn == 0


def test_a_turn_that_lacks_figures_is_refused() -> None:
    with pytest.raises(ConversationError, match="2 tokens, 1 log-probabilities and 2 versions"):
        asyncio.run(model("a", logprobs=(0.0,)).conversation("x").reply())


async def test_a_reward_of_a_turn_comes_with_its_last_token() -> None:
    llm = model("a", "b")
    chat = llm.conversation("x")
    await chat.reply()
    chat.add("y")
    chat.credit(0.5)
    await chat.reply()
    (segment,) = llm.segments()
    assert segment.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)
    assert segment.rewards == (0.0, 0.5, 0.0, 0.0, 0.0)


SCHEMAS = {"add": PARAMETERS}
OFFERED = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
ASKED = [{"role": "user", "content": "?"}]


def called(text: str, **options: Any) -> list[str]:
    return [call.arguments for call in find_calls(text, HERMES, SCHEMAS, **options)[1]]


@pytest.mark.parametrize(
    ("text", "thinking", "count"),
    [
        (f"<think>{CALL}</think>no", False, 0),
        (f"<think>{CALL}", False, 0),
        (f"[THINK]{CALL}[/THINK]{OTHER_CALL}", False, 1),
        (f"{CALL}</think>no", True, 0),
        (f"{CALL}</think>{OTHER_CALL}", True, 1),
        (f"{CALL}<think>and</think>{OTHER_CALL}", False, 2),
        (CALL.replace("[1, 2]", '["<think>"]') + OTHER_CALL, False, 2),
    ],
)
def test_call_within_a_thought_is_none(text: str, thinking: bool, count: int) -> None:
    assert len(called(text, thinking=thinking)) == count


@pytest.mark.parametrize(("path", "key"), [("/chat/completions", "messages"), ("/responses", "input")])
def test_endpoint_returns_a_thought_s_call_as_text(path: str, key: str) -> None:
    tools: list[dict[str, Any]] = OFFERED if key == "messages" else [{"type": "function", **OFFERED[0]["function"]}]
    body = {"model": "policy", key: ASKED, "tools": tools}
    for text, thinking in ((f"<think>{CALL}</think>no", False), (f"{CALL}</think>no", True)):
        ((status, _, answer),) = posted(model(text, thinking=thinking), path, body)
        assert status == 200
        said = answer["choices"][0]["message"] if key == "messages" else answer["output"][0]["content"][0]
        assert said.get("content", said.get("text")) == text
        assert "tool_calls" not in said


def test_agent_does_not_use_a_tool_in_a_thought() -> None:
    for text, thinking in (("<think><calculator>2*3</calculator>", False), ("<calculator>2*3</calculator>", True)):
        tools = Toolbox([Calculator()], 30.0)
        outcome = asyncio.run(tool_agent(TASK, model(text, thinking=thinking), tools))
        assert outcome.answer == text
        assert not tools.figures["agent/tool_calls"]


def test_agent_finds_a_call_between_special_tokens() -> None:
    tools = Toolbox([Calculator()], 30.0)
    # The text of a turn is without special tokens that mean nothing to the run.
    llm = model("2*3", "6", raw="<calculator>2*3</calculator>", max_tokens=80, max_turns=1, max_new_tokens=10)
    with pytest.raises(Exception, match="no turns are left"):
        asyncio.run(tool_agent(TASK, llm, tools))
    assert tools.figures["agent/tool_calls"] == 1


def test_stop_text_of_a_special_token_is_named_to_the_client() -> None:
    body = {"model": "policy", "messages": ASKED, "max_tokens": 9, "stop_sequences": ["<|im_end|>"]}
    ((status, _, answer),) = posted(model("four", raw="four<|im_end|>"), "/messages", body)
    assert (status, answer["stop_reason"], answer["stop_sequence"]) == (200, "stop_sequence", "<|im_end|>")
    assert answer["content"] == [{"type": "text", "text": "four"}]


def test_prompt_that_opens_a_thought_is_known_by_its_tokens() -> None:
    encoder = TurnEncoder(tokenizer_of("bytes"), apply_chat_template=False)
    for prompt, opened in (
        ("<|user|>a<|assistant|>\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("a", False),
    ):
        assert encoder.opens_thought(encoder.encode((), [ChatMessage("user", prompt)])) is opened


def test_half_of_a_character_is_mended_and_counted() -> None:
    def broken(argument: str) -> str:
        return "a\ud83d"

    tools = Toolbox([FunctionTool(broken)], 30.0)
    assert asyncio.run(tools.call("broken", "x")).text == "a\ufffd"
    assert tools.figures[TEXTS_MENDED] == 1
    llm = model()
    chat = llm.conversation("\udc80b")
    chat.add(ChatMessage("tool", "c\ud800"))
    assert [message.text for message in chat.pending] == ["\ufffdb", "c\ufffd"]
    assert llm.mended == 2
    # Of a call, which the client would be sent, there is no text to be sent.
    assert called(CALL.replace("[1, 2]", r'["\ud800"]')) == []


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
    for seen in models:
        llm: Any = seen
        asyncio.run(stand_in_agent(TASK, llm, None))  # type: ignore[arg-type]
    turns = [len(seen.turns) for seen in models]
    assert set(turns) == {2, 3}
    assert sum(turns) / len(turns) == pytest.approx(2.5, abs=0.1)
    assert sum(sum(seen.turns) for seen in models) / len(models) == pytest.approx(45, abs=2)
    assert len(slept) == sum(turns) - len(models)
    assert set(slept) == {0.25}
