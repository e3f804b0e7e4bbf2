"""Calls within thoughts, special tokens in turns, and halves of characters, in an agent's conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("starlette")

from recipes.agent.call_forms import HERMES, find_calls
from recipes.agent.conversation.agents import AgentTask, tool_agent
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest, TurnEncoder
from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.tool import FunctionTool
from recipes.agent.tools.toolbox import TEXTS_MENDED, Toolbox
from tests.unit.recipes.agent.endpoint.asking import CALL, OTHER_CALL, PARAMETERS, posted
from tests.unit.recipes.agent.test_llm import SETTINGS, Script
from tests.unit.recipes.language.habits import tokenizer_of

SCHEMAS = {"add": PARAMETERS}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
ASKED = [{"role": "user", "content": "?"}]


class Says(Script):
    """Engines that say texts of a test, with what a worker knows of them besides."""

    def __init__(self, *turns: str, **known: Any) -> None:
        super().__init__(*turns)
        self._known = known

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        return (await super().draw(request))._replace(**self._known)


def model(*turns: str, **known: Any) -> LanguageModel:
    return LanguageModel(Says(*turns, **known), SETTINGS._replace(max_tokens=4000, max_new_tokens=1000))


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
    tools: list[dict[str, Any]] = TOOLS if key == "messages" else [{"type": "function", **TOOLS[0]["function"]}]
    body = {"model": "policy", key: ASKED, "tools": tools}
    for text, thinking in ((f"<think>{CALL}</think>no", False), (f"{CALL}</think>no", True)):
        ((status, _, answer),) = posted(model(text, thinking=thinking), path, body)
        assert status == 200
        said = answer["choices"][0]["message"] if key == "messages" else answer["output"][0]["content"][0]
        assert said.get("content", said.get("text")) == text
        assert "tool_calls" not in said


def test_agent_does_not_use_a_tool_in_a_thought() -> None:
    task = AgentTask("2*3=", (ChatMessage("user", "2*3="),), "6", {})
    for text, thinking in (("<think><calculator>2*3</calculator>", False), ("<calculator>2*3</calculator>", True)):
        tools = Toolbox([Calculator()], 30.0)
        outcome = asyncio.run(tool_agent(task, model(text, thinking=thinking), tools))
        assert outcome.answer == text
        assert not tools.figures["agent/tool_calls"]


def test_agent_finds_a_call_between_special_tokens() -> None:
    task = AgentTask("2*3=", (ChatMessage("user", "2*3="),), "6", {})
    tools = Toolbox([Calculator()], 30.0)
    # The text of a turn is without special tokens that mean nothing to the run.
    model_of = LanguageModel(
        Says("2*3", "6", raw="<calculator>2*3</calculator>"), SETTINGS._replace(max_tokens=80, max_turns=1)
    )
    with pytest.raises(Exception, match="no turns are left"):
        asyncio.run(tool_agent(task, model_of, tools))
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


def test_endpoint_refuses_a_message_with_half_of_a_character() -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "a\ud800"}]}
    ((status, _, answer),) = posted(model("no"), "/chat/completions", body)
    assert status == 400
    assert "half of a character" in answer["error"]["message"]
    assert "'a\\ud800'" in answer["error"]["message"]
