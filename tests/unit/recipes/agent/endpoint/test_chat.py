"""Chat completions, by OpenAI's own client where it can say what a test wants to say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipes.agent.conversation.call_forms import CallForm
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest
from tests.unit.recipes.agent.endpoint.asking import CALL, OTHER_CALL, PARAMETERS, openai_of, posted
from tests.unit.recipes.agent.scripted import SETTINGS, model, tokens

PATH = "/v1/chat/completions"
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
HI: Any = [{"role": "user", "content": "x"}]


def messages(*texts: str) -> Any:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


async def test_continued_requests_are_one_conversation_others_branch() -> None:
    llm = model("a", "b", "c", "d")
    first, second, changed = messages("x"), messages("x", "a", "y"), messages("x", "A", "y")
    async with openai_of(llm) as client:
        result = [
            (await client.chat.completions.create(model="m", messages=item)).choices[0].message.content
            for item in (first, second, changed, second)
        ]
    assert result == ["a", "b", "c", "d"]
    went_on, other, again = llm.segments()
    assert went_on.prompt == tokens("x")
    assert went_on.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)
    assert went_on.trained == (True, True, False, True, True)
    # A past that is not what the model said is told to it, and not learned from.
    assert other.prompt == tokens("xAy")
    assert again.prompt == tokens("xay")


async def test_usage_counts_the_prompt_and_every_answer() -> None:
    llm = model("ab", "c", "de", max_turns=9)
    async with openai_of(llm) as client:
        first = await client.chat.completions.create(model="m", messages=HI)
        second = await client.chat.completions.create(model="m", messages=messages("x", "ab", "yz"), n=2)
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (1, 3, 4)
    assert first.created > 1_600_000_000
    assert [choice.message.content for choice in second.choices] == ["c", "de"]
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (6, 5)
    # Each answer is learned from, in a conversation of its own.
    assert [segment.drawn for segment in llm.segments()] == [5, 3]


async def test_a_stop_text_is_learned_and_not_shown() -> None:
    llm = model("Action: look\nObservation:", "done")
    async with openai_of(llm) as client:
        stop = ["\nObservation:", "never"]
        first = await client.chat.completions.create(model="m", messages=HI, stop=stop)
        said = first.choices[0].message.content
        await client.chat.completions.create(model="m", messages=messages("x", said or "", "y"))
    assert said == "Action: look"
    (segment,) = llm.segments()
    assert segment.tokens[:25] == tokens("Action: look\nObservation:")


@pytest.mark.parametrize("stops", ["b", ["d", "b"]])
async def test_the_earliest_stop_text_ends_the_content(stops: Any) -> None:
    async with openai_of(model("abcd")) as client:
        choice = (await client.chat.completions.create(model="m", messages=HI, stop=stops)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("a", "stop")


async def test_a_stream_has_the_whole_reply_and_its_usage() -> None:
    async with openai_of(model("abc")) as client:
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True, stream_options=options)
        *chunks, last = [event async for event in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 1, 4)


@pytest.mark.parametrize("streams", [False, True])
async def test_calls_go_out_and_their_results_come_back(streams: bool) -> None:
    # The third call is of no function that there is, and is text.
    written = f"I see. {CALL}{OTHER_CALL} <tool_call>{{}}</tool_call>"
    llm = model(written, "3 and 7")
    async with openai_of(llm) as client:
        if streams:
            async with client.chat.completions.stream(model="m", messages=HI, tools=[ADD]) as stream:
                message: Any = (await stream.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(model="m", messages=HI, tools=[ADD])).choices[0].message
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(message.tool_calls, "37", strict=True)
        ]
        # A client sends back what matters to it.
        said: Any = message.model_dump(include={"role", "tool_calls"})
        again = await client.chat.completions.create(model="m", messages=[*HI, said, *results], tools=[ADD])
        answer = again.choices[0].message.content
    assert message.content == "I see."
    assert [tool_call.function.arguments for tool_call in message.tool_calls] == ['{"of": [1, 2]}', '{"of": [3, 4]}']
    assert answer == "3 and 7"
    (segment,) = llm.segments()
    # One conversation, and nothing of it was written anew.
    assert segment.tokens == (*tokens(written), 0, *tokens("37"), *tokens("3 and 7"), 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["tool_calls"][0]["function"].update(arguments='{"of": [9]}'),
        lambda said: said["tool_calls"].pop(),
        lambda said: said.update(content="I saw."),
    ],
)
async def test_calls_that_a_client_changed_are_told_as_changed(change: Any) -> None:
    llm = model(f"I see. {CALL}{OTHER_CALL}", "done")
    async with openai_of(llm) as client:
        message: Any = (await client.chat.completions.create(model="m", messages=HI, tools=[ADD])).choices[0].message
        said: Any = message.model_dump(include={"role", "content", "tool_calls"})
        change(said)
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await client.chat.completions.create(model="m", messages=[*HI, said, result], tools=[ADD])
    script: Any = llm._engines
    turn = script.requests[1].messages[1]
    assert [call.arguments for call in turn.calls] == [call["function"]["arguments"] for call in said["tool_calls"]]
    # The changed turn begins a conversation of its own, and is not learned from.
    assert (turn.text, script.requests[1].context, len(llm.segments())) == (said["content"], (), 2)


async def test_calls_in_other_spellings_are_the_models() -> None:
    llm = model(CALL, "done")
    async with openai_of(llm) as client:
        message: Any = (await client.chat.completions.create(model="m", messages=HI, tools=[ADD])).choices[0].message
        said: Any = message.model_dump(include={"role", "tool_calls"})
        said["tool_calls"][0]["function"]["arguments"] = '{ "of":[1,2]}'
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await client.chat.completions.create(model="m", messages=[*HI, said, result], tools=[ADD])
    assert len(llm.segments()) == 1


async def test_one_call_at_a_time_is_kept_to() -> None:
    llm = model(CALL + OTHER_CALL)
    async with openai_of(llm) as client:
        result = await client.chat.completions.create(model="m", messages=HI, tools=[ADD], parallel_tool_calls=False)
    assert len(result.choices[0].message.tool_calls) == 1
    script: Any = llm._engines
    # The engine ends the turn with the first call.
    assert script.requests[0].tools.single


async def test_no_call_is_made_where_none_may_be() -> None:
    async with openai_of(model(CALL)) as client:
        choice = (
            await client.chat.completions.create(model="m", messages=HI, tools=[ADD], tool_choice="none")
        ).choices[0]
    assert (choice.message.tool_calls, choice.message.content, choice.finish_reason) == (None, CALL, "stop")


def test_calls_in_the_form_of_the_chat_template_are_read() -> None:
    class Native:
        async def draw(self, request: DrawRequest) -> DrawnTurn:
            form = CallForm("json", "[TOOL_CALLS]")
            raw = '[TOOL_CALLS] [{"name": "add", "arguments": {}}]'
            return DrawnTurn(0, (1,), (2,), (0.0,), (0,), raw[13:], "stop", raw, form)

    ((status, _, answer),) = posted(LanguageModel(Native(), SETTINGS), PATH, {"messages": HI, "tools": [ADD]})
    message = answer["choices"][0]["message"]
    assert (status, message["content"], message["tool_calls"][0]["function"]["name"]) == (200, None, "add")


def test_calls_of_another_model_are_told_to_it() -> None:
    llm = model("a")
    call = {"id": "other", "type": "function", "function": {"name": "add", "arguments": '{"of": [1, 2]}'}}
    inputs = [*HI, {"role": "assistant", "content": "so", "tool_calls": [call]}]
    inputs.append({"role": "tool", "content": "3", "tool_call_id": "other"})
    ((status, _, _),) = posted(llm, PATH, {"messages": inputs})
    assert status == 200
    script: Any = llm._engines
    assert [call.name for call in script.requests[0].messages[1].calls] == ["add"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "temperature": 1, "top_p": 1.0, "n": 1, "logprobs": False},
        {"temperature": 0.6, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop": None},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "stop": [], "tools": [], "max_tokens": None},
        {"messages": [*HI, {"role": "assistant", "content": None}, *HI]},
        {"messages": [*HI, {"role": "assistant", "content": None, "refusal": "no"}, *HI]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *HI]},
        {"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]},
    ],
)
def test_what_means_nothing_else_is_accepted(fields: dict[str, Any]) -> None:
    ((status, _, answer),) = posted(model("a", temperature=0.6), PATH, {"messages": HI, **fields})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "a")


def test_evaluation_accepts_the_temperature_of_training() -> None:
    llm = model("a", "b", temperature=0.0, training_temperature=0.7)
    response = posted(llm, PATH, *({"messages": HI, "temperature": value} for value in (0.7, 0.9)))
    assert [status for status, _, _ in response] == [200, 400]


def test_a_refusal_of_the_template_leaves_the_conversation() -> None:
    llm = model("a", "b")
    script: Any = llm._engines
    draw = script.draw

    async def refuse(request: DrawRequest) -> DrawnTurn:
        if request.messages[-1].text == "bad":
            return DrawnTurn(0, (), (), (), (), "", "length", refusal="roles must alternate")
        return await draw(request)

    script.draw = refuse
    asked = (HI, messages("x", "a", "bad"), messages("x", "a", "y"))
    response = posted(llm, PATH, *({"messages": item} for item in asked))
    assert [status for status, _, _ in response] == [200, 400, 200]
    assert "roles must alternate" in response[1][2]["error"]["message"]
    (segment,) = llm.segments()
    assert segment.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)


async def test_the_end_of_turns_is_not_tried_again() -> None:
    import openai

    async with openai_of(model("a", max_turns=1)) as client:
        await client.chat.completions.create(model="m", messages=HI)
        with pytest.raises(openai.RateLimitError, match="no turns left") as refused:
            await client.chat.completions.create(model="m", messages=HI)
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_the_end_of_tokens_is_that_of_turns() -> None:
    assert posted(model("a", max_tokens=1), PATH, {"messages": HI})[0][0] == 429


def test_an_engine_that_has_failed_is_status_503() -> None:
    llm = model("a")

    async def lost(request: DrawRequest) -> DrawnTurn:
        return DrawnTurn(0, (), (), (), (), "", "aborted", failure="the engine is gone")

    llm._engines.draw = lost  # type: ignore[method-assign]
    status, *_ = posted(llm, PATH, {"messages": HI})[0]
    assert status == 503
    assert (llm.failure, llm.turns) == ("the engine is gone", 0)


async def test_models_are_listed() -> None:
    import openai

    async with openai_of(model()) as client:
        assert [item.id async for item in await client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="/v1/models/ does not exist"):
            await client.get("/models/", cast_to=object)


def test_other_paths_are_named() -> None:
    result = posted(model(), "/v1/embeddings", {}) + posted(model(), "/v1/models", {})
    assert [status for status, _, _ in result] == [404, 405]
    assert "/v1/chat/completions" in json.dumps(result[0][2])
