"""OpenAI's Responses, by their own client where it can say what a test wants to say."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.unit.recipes.agent.endpoint.asking import CALL, OTHER_CALL, PARAMETERS, model, posted, with_openai
from tests.unit.recipes.agent.test_llm import tokens

PATH = "/v1/responses"
ADD: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}


def test_a_response_has_text_and_usage() -> None:
    async def run(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(model="m", input="x", instructions="s", max_output_tokens=9)

    llm = model("abc")
    response = with_openai(llm, run)
    assert (response.output_text, response.status, response.model) == ("abc", "completed", "m")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (2, 4, 6)
    assert llm.segments()[0].prompt == tokens("sx")


@pytest.mark.parametrize("by_id", [False, True])
def test_a_conversation_goes_on_token_by_token(by_id: bool) -> None:
    async def run(client: openai.AsyncOpenAI) -> Any:
        asked: Any = [{"role": "user", "content": "x"}]
        first = await client.responses.create(model="m", input=asked)
        following: Any = [{"role": "user", "content": [{"type": "input_text", "text": "y"}]}]
        if by_id:
            return await client.responses.create(model="m", input=following, previous_response_id=first.id)
        said: Any = [line.model_dump() for line in first.output]
        return await client.responses.create(model="m", input=[*asked, *said, *following])

    llm = model("a", "b")
    assert with_openai(llm, run).output_text == "b"
    (segment,) = llm.segments()
    assert segment.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)


@pytest.mark.parametrize("streams", [False, True])
def test_tools_go_out_and_their_results_come_back(streams: bool) -> None:
    async def run(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        if streams:
            async with client.responses.stream(model="m", input="x", tools=[ADD]) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await client.responses.create(model="m", input="x", tools=[ADD])
        results: Any = [
            {"type": "function_call_output", "call_id": line.call_id, "output": "7"}
            for line in response.output
            if line.type == "function_call"
        ]
        answer = await client.responses.create(model="m", input=results, tools=[ADD], previous_response_id=response.id)
        return response, answer

    llm = model(f"So: {CALL}{OTHER_CALL}", "done")
    response, answer = with_openai(llm, run)
    assert [line.type for line in response.output] == ["message", "function_call", "function_call"]
    assert response.output[1].arguments == '{"of": [1, 2]}'
    assert answer.output_text == "done"
    (segment,) = llm.segments()
    assert segment.tokens[-len("77done") - 1 :] == (*tokens("77done"), 0)


def test_a_stream_of_text_has_every_event() -> None:
    async def run(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.responses.create(model="m", input="x", stream=True)
        return [event async for event in stream]

    events = with_openai(model("abc"), run)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(9))
    assert events[-1].response.output_text == "abc"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"input": None}, "`input`"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "`item_reference`"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "`input_image`"),
        ({"previous_response_id": "resp_x"}, "no stored response `resp_x`"),
        ({"tools": [{"type": "web_search"}]}, "`web_search`"),
        ({"tool_choice": "required"}, "`tool_choice`"),
        ({"text": {"format": {"type": "json_object"}}}, "`text`"),
        ({"text": "json"}, "`text` must be an object"),
        ({"text": {"format": "json_object"}}, "`format` must be an object"),
        ({"reasoning": {"effort": "high"}}, "`reasoning`"),
        ({"background": True}, "`background`"),
        ({"temperature": 0.3}, "`temperature`"),
        ({"max_output_tokens": 0}, "`max_output_tokens`"),
        ({"conversation": "c"}, "`conversation` is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(change: dict[str, Any], why: str) -> None:
    ((status, _, answer),) = posted(model("a"), PATH, {"input": "x", **change})
    assert status == 400
    assert why in answer["error"]["message"]


def test_a_response_that_is_not_stored_cannot_be_continued() -> None:
    first, second = {"input": "x", "store": False}, {"input": "x"}

    async def run(client: openai.AsyncOpenAI) -> Any:
        response = await client.responses.create(model="m", **first)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", previous_response_id=response.id, **second)

    with_openai(model("a", "b"), run)
