"""Anthropic's Messages and OpenAI's Responses by their own clients, and what all protocols of the endpoint refuse."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.agent.conversation.chat_model import LanguageModel
from tests.unit.recipes.agent.endpoint.asking import CALL, OTHER_CALL, PARAMETERS, anthropic_of, openai_of, posted
from tests.unit.recipes.agent.scripted import SETTINGS, Script, model, tokens

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKED: Any = [{"role": "user", "content": "x"}]


def conversation(path: str, call: Any, result: Any) -> dict[str, Any]:
    """Return a request with one call and one result, of these ids; None: without the field."""

    def named(field: str, value: Any) -> dict[str, Any]:
        return {} if value is None else {field: value}

    if path == CHAT:
        calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}, **named("id", call)}]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"messages": [*ASKED, said, {"role": "tool", "content": "3", **named("tool_call_id", result)}]}
    if path == MESSAGES:
        use = {"type": "tool_use", "name": "add", "input": {}, **named("id", call)}
        answer = {"type": "tool_result", "content": "3", **named("tool_use_id", result)}
        said = {"role": "assistant", "content": [use]}
        return {"model": "m", "max_tokens": 10, "messages": [*ASKED, said, {"role": "user", "content": [answer]}]}
    called = {"type": "function_call", "name": "add", "arguments": "{}", **named("call_id", call)}
    answered = {"type": "function_call_output", "output": "3", **named("call_id", result)}
    return {"input": [*ASKED, called, answered]}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("call", "result", "message"),
    [
        ("one", "other", "`other`: no call before it has this id"),
        ("one", None, "is missing: no call before it has this id"),
        ("one", 1, "is missing: no call before it has this id"),
        (None, None, "needs a name and an id"),
        ("", "", "needs a name and an id"),
    ],
)
def test_result_without_its_call_is_refused(path: str, call: Any, result: Any, message: str) -> None:
    ((status, _, answer),) = posted(model("a"), path, conversation(path, call, result))
    assert status == 400
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_result_of_its_call_is_taken(path: str) -> None:
    ((status, _, _),) = posted(model("a"), path, conversation(path, "one", "one"))
    assert status == 200


OFFERED: Any = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}


async def test_a_message_has_text_usage_and_a_reason() -> None:
    llm = model("abc")
    async with anthropic_of(llm) as client:
        system: Any = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
        parts: Any = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]
        extra = {"temperature": 1.0, "top_p": 1}
        message = await client.messages.create(model="m", max_tokens=9, system=system, messages=parts, extra_body=extra)
    assert [part.text for part in message.content] == ["abc"]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "m")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 4)
    assert llm.segments()[0].prompt == tokens("sxy")


async def test_messages_go_on_token_by_token() -> None:
    llm = model("a", "b")
    async with anthropic_of(llm) as client:
        first = await client.messages.create(model="m", max_tokens=9, messages=ASKED)
        said: Any = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": "y"}]
        await client.messages.create(model="m", max_tokens=9, messages=said)
    (segment,) = llm.segments()
    assert segment.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)


def test_messages_of_one_role_are_one_turn() -> None:
    llm = model("a")
    posted(llm, MESSAGES, {"max_tokens": 9, "messages": [*ASKED, {"role": "user", "content": "y"}]})
    assert llm.segments()[0].prompt == tokens("x\ny")


async def test_a_stop_sequence_is_named_and_not_shown() -> None:
    async with anthropic_of(model("ab\nEnd")) as client:
        message = await client.messages.create(model="m", max_tokens=9, messages=ASKED, stop_sequences=["c", "\nEnd"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("ab", "stop_sequence", "\nEnd")


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_of_messages_go_out_and_their_results_come_back(streams: bool) -> None:
    llm = model(f"So: {CALL}{OTHER_CALL}", "done")
    async with anthropic_of(llm) as client:
        inputs: dict[str, Any] = {"model": "m", "max_tokens": 999, "messages": ASKED, "tools": [OFFERED]}
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
        again: Any = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        answer = await client.messages.create(**{**inputs, "messages": again})
    assert [part.type for part in message.content] == ["text", "tool_use", "tool_use"]
    assert (message.content[1].input, message.stop_reason) == ({"of": [1, 2]}, "tool_use")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (1, len(f"So: {CALL}{OTHER_CALL}") + 1)
    assert answer.content[0].text == "done"
    (segment,) = llm.segments()
    assert segment.tokens[-len("7error: 7done") - 1 :] == (*tokens("7error: 7done"), 0)


async def test_a_stream_of_messages_has_every_event() -> None:
    async with anthropic_of(model("abc")) as client:
        stream = await client.messages.create(model="m", max_tokens=9, messages=ASKED, stream=True)
        result = [event.type async for event in stream]
    assert result == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_tokens_are_counted_without_a_turn() -> None:
    turns: list[Any] = []
    llm = LanguageModel(Script("a"), SETTINGS, turns.append)
    async with anthropic_of(llm) as client:
        result = (await client.messages.count_tokens(model="m", messages=ASKED, system="abc")).input_tokens
    assert result == 4
    assert (llm.turns, llm.segments()[0].drawn, turns) == (0, 0, [])


BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED},
    MESSAGES: {"max_tokens": 9, "messages": ASKED},
    RESPONSES: {"input": "x"},
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
MADE: Any = {"id": "one", "type": "function", "function": {"name": "add", "arguments": "{}"}}
# By path: a body, or what changes a right one, and a part of the answer.
REFUSED: dict[str, list[tuple[Any, str]]] = {
    CHAT: [
        (b"{", "not JSON"),
        (b'{"messages": NaN}', "holds NaN"),
        (b"\xff", "the body is not UTF-8 text"),
        ('{"messages": []}'.encode("utf-16"), "the body is UTF-16 text"),
        (b"[" * 200_000, "nested more than 100 levels deep"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a character"),
        (b'{"temperature": 1, "messages": [], "temperature": 0}', "the body names the key 'temperature' twice"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "names the key 'content' twice"),
        ([], "not a JSON object"),
        (b"{}", "`messages`"),
        ({"messages": []}, "at least one message"),
        ({"messages": [1]}, "`messages` must be a list of objects"),
        ({"messages": [{"role": "user"}]}, "`content`"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "`role`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "`image_url` is not supported: the model reads only text",
        ),
        ({"max_tokens": 0}, "`max_tokens` must be an integer from 1"),
        ({"max_completion_tokens": True}, "`max_completion_tokens`"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "are different limits"),
        ({"tools": [{}]}, "an entry of `tools`"),
        ({"tools": 5}, "`tools` must be a list"),
        ({"tools": [ADD, ADD]}, "a unique `name`"),
        ({"tool_choice": "required"}, "`tool_choice`"),
        ({"response_format": {"type": "json_object"}}, "`response_format`"),
        ({"n": 0}, "`n` must be an integer from 1 to 64"),
        ({"logprobs": True}, "`logprobs`"),
        ({"top_logprobs": 3}, "`top_logprobs`"),
        ({"temperature": 0.2}, "`temperature` is 1 in this run, but the request has 0.2"),
        ({"temperature": "hot"}, "`temperature` must be a number"),
        ({"top_p": 0.9}, "`top_p` is 1 in this run"),
        ({"seed": 7}, "`seed`"),
        ({"logit_bias": {"5": 1}}, "`logit_bias`"),
        ({"stop": ""}, "`stop`"),
        ({"stream": "yes"}, "`stream` must be true or false"),
        ({"model": 5}, "`model` must be a text"),
        ({"stream_options": "include_usage"}, "`stream_options` must be an object"),
        ({"stream_options": {"include_usage": "yes"}}, "`include_usage` must be true or false"),
        ({"tools": [{"type": "function", "function": "add"}]}, "`function` must be an object"),
        ({"messages": [*ASKED, {"role": "assistant", "function_call": {"name": "add"}}]}, "write `tool_calls`"),
        (
            {"messages": [*ASKED, {"role": "assistant", "tool_calls": [MADE, MADE]}]},
            "2 calls of one message have",
        ),
        ({"top_k": 5}, "`top_k` is not supported"),
    ],
    MESSAGES: [
        ({"max_tokens": None}, "`max_tokens` is missing"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "user or assistant"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "so"}]}, "continuing a turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "`image`"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`web_search_20250305`"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice`"),
        ({"tool_choice": "none"}, "`tool_choice` must be an object"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "`thinking`"),
        ({"temperature": 0.1}, "`temperature`"),
        ({"top_k": 5}, "`top_k`"),
        ({"container": "x"}, "`container` is not supported"),
    ],
    RESPONSES: [
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
}


@pytest.mark.parametrize(("path", "change", "why"), [(path, *row) for path, rows in REFUSED.items() for row in rows])
def test_what_cannot_be_done_is_refused_in_its_words(path: str, change: Any, why: str) -> None:
    llm = model("a")
    body = {**BASES[path], **change} if isinstance(change, dict) else change
    ((status, _, answer),) = posted(llm, path, body)
    assert (status, answer["error"]["type"], llm.turns) == (400, "invalid_request_error", 0)
    assert why in answer["error"]["message"]
    assert answer.get("type") == ("error" if path == MESSAGES else None)


async def test_errors_are_those_that_the_client_knows() -> None:
    import anthropic

    async with anthropic_of(model(max_turns=0)) as client:
        kinds: list[type[Exception]] = []
        for item in (client, client.with_options(api_key="wrong")):
            try:
                await item.messages.create(model="m", max_tokens=9, messages=ASKED)
            except anthropic.APIStatusError as error:
                kinds.append(type(error))
    assert kinds == [anthropic.RateLimitError, anthropic.AuthenticationError]


OF_RESPONSES: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}


async def test_a_response_has_text_and_usage() -> None:
    llm = model("abc")
    async with openai_of(llm) as client:
        response = await client.responses.create(model="m", input="x", instructions="s", max_output_tokens=9)
    assert (response.output_text, response.status, response.model) == ("abc", "completed", "m")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (2, 4, 6)
    assert llm.segments()[0].prompt == tokens("sx")


@pytest.mark.parametrize("by_id", [False, True])
async def test_responses_go_on_token_by_token(by_id: bool) -> None:
    llm = model("a", "b")
    async with openai_of(llm) as client:
        asked: Any = [{"role": "user", "content": "x"}]
        first = await client.responses.create(model="m", input=asked)
        following: Any = [{"role": "user", "content": [{"type": "input_text", "text": "y"}]}]
        said: Any = [line.model_dump() for line in first.output]
        past: Any = {"input": following, "previous_response_id": first.id}
        whole: Any = {"input": [*asked, *said, *following]}
        assert (await client.responses.create(model="m", **(past if by_id else whole))).output_text == "b"
    (segment,) = llm.segments()
    assert segment.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_of_responses_go_out_and_their_results_come_back(streams: bool) -> None:
    llm = model(f"So: {CALL}{OTHER_CALL}", "done")
    async with openai_of(llm) as client:
        if streams:
            async with client.responses.stream(model="m", input="x", tools=[OF_RESPONSES]) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await client.responses.create(model="m", input="x", tools=[OF_RESPONSES])
        results: Any = [
            {"type": "function_call_output", "call_id": line.call_id, "output": "7"}
            for line in response.output
            if line.type == "function_call"
        ]
        answer = await client.responses.create(
            model="m", input=results, tools=[OF_RESPONSES], previous_response_id=response.id
        )
    assert [line.type for line in response.output] == ["message", "function_call", "function_call"]
    assert response.output[1].arguments == '{"of": [1, 2]}'
    assert answer.output_text == "done"
    (segment,) = llm.segments()
    assert segment.tokens[-len("77done") - 1 :] == (*tokens("77done"), 0)


async def test_a_stream_of_a_response_has_every_event() -> None:
    async with openai_of(model("abc")) as client:
        stream = await client.responses.create(model="m", input="x", stream=True)
        events = [event async for event in stream]
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


async def test_a_response_that_is_not_stored_cannot_be_continued() -> None:
    import openai

    first, second = {"input": "x", "store": False}, {"input": "x"}
    async with openai_of(model("a", "b")) as client:
        response = await client.responses.create(model="m", **first)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", previous_response_id=response.id, **second)
