"""Anthropic's Messages, by their own client where it can say what a test wants to say."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.unit.recipes.agent.endpoint.asking import CALL, OTHER_CALL, PARAMETERS, model, posted, with_anthropic
from tests.unit.recipes.agent.test_llm import tokens

PATH = "/v1/messages"
ADD: Any = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
HI: Any = [{"role": "user", "content": "x"}]


def test_a_message_has_text_usage_and_a_reason() -> None:
    async def run(client: anthropic.AsyncAnthropic) -> Any:
        system: Any = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
        parts: Any = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]
        extra = {"temperature": 1.0, "top_p": 1}
        return await client.messages.create(model="m", max_tokens=9, system=system, messages=parts, extra_body=extra)

    llm = model("abc")
    message = with_anthropic(llm, run)
    assert [part.text for part in message.content] == ["abc"]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "m")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 4)
    assert llm.segments()[0].prompt == tokens("sxy")


def test_a_conversation_goes_on_token_by_token() -> None:
    async def run(client: anthropic.AsyncAnthropic) -> Any:
        first = await client.messages.create(model="m", max_tokens=9, messages=HI)
        said: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "y"}]
        return await client.messages.create(model="m", max_tokens=9, messages=said)

    llm = model("a", "b")
    with_anthropic(llm, run)
    (segment,) = llm.segments()
    assert segment.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)


def test_messages_of_one_role_are_one_turn() -> None:
    llm = model("a")
    posted(llm, PATH, {"max_tokens": 9, "messages": [*HI, {"role": "user", "content": "y"}]})
    assert llm.segments()[0].prompt == tokens("x\ny")


def test_a_stop_sequence_is_named_and_not_shown() -> None:
    async def run(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.create(model="m", max_tokens=9, messages=HI, stop_sequences=["c", "\nEnd"])

    message = with_anthropic(model("ab\nEnd"), run)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("ab", "stop_sequence", "\nEnd")


@pytest.mark.parametrize("streams", [False, True])
def test_tools_go_out_and_their_results_come_back(streams: bool) -> None:
    async def run(client: anthropic.AsyncAnthropic) -> tuple[Any, Any]:
        inputs: dict[str, Any] = {"model": "m", "max_tokens": 999, "messages": HI, "tools": [ADD]}
        if streams:
            async with client.messages.stream(**inputs) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.create(**inputs)
        results: Any = [
            {"type": "tool_result", "tool_use_id": part.id, "content": "7", "is_error": part.input["of"] == [3, 4]}
            for part in message.content
            if part.type == "tool_use"
        ]
        again: Any = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        return message, await client.messages.create(**{**inputs, "messages": again})

    llm = model(f"So: {CALL}{OTHER_CALL}", "done")
    message, answer = with_anthropic(llm, run)
    assert [part.type for part in message.content] == ["text", "tool_use", "tool_use"]
    assert (message.content[1].input, message.stop_reason) == ({"of": [1, 2]}, "tool_use")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (1, len(f"So: {CALL}{OTHER_CALL}") + 1)
    assert answer.content[0].text == "done"
    (segment,) = llm.segments()
    assert segment.tokens[-len("7error: 7done") - 1 :] == (*tokens("7error: 7done"), 0)


def test_a_stream_of_text_has_every_event() -> None:
    async def run(client: anthropic.AsyncAnthropic) -> list[str]:
        stream = await client.messages.create(model="m", max_tokens=9, messages=HI, stream=True)
        return [event.type async for event in stream]

    assert with_anthropic(model("abc"), run) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_tokens_are_counted_without_a_turn() -> None:
    async def run(client: anthropic.AsyncAnthropic) -> int:
        return (await client.messages.count_tokens(model="m", messages=HI, system="abc")).input_tokens

    llm = model("a")
    assert with_anthropic(llm, run) == 4
    assert (llm.turns, llm.segments()[0].drawn) == (0, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"max_tokens": None}, "`max_tokens` is missing"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "user or assistant"),
        ({"messages": [*HI, {"role": "assistant", "content": "so"}]}, "continuing a turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "`image`"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`web_search_20250305`"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice`"),
        ({"tool_choice": "none"}, "`tool_choice` must be an object"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "`thinking`"),
        ({"temperature": 0.1}, "`temperature`"),
        ({"top_k": 5}, "`top_k`"),
        ({"container": "x"}, "`container` is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_in_its_words(change: dict[str, Any], why: str) -> None:
    ((status, _, answer),) = posted(model("a"), PATH, {"max_tokens": 9, "messages": HI, **change})
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert why in answer["error"]["message"]


def test_errors_are_those_that_the_client_knows() -> None:
    async def run(client: anthropic.AsyncAnthropic) -> list[type[Exception]]:
        kinds: list[type[Exception]] = []
        for item in (client, client.with_options(api_key="wrong")):
            try:
                await item.messages.create(model="m", max_tokens=9, messages=HI)
            except anthropic.APIStatusError as error:
                kinds.append(type(error))
        return kinds

    assert with_anthropic(model(max_turns=0), run) == [anthropic.RateLimitError, anthropic.AuthenticationError]
