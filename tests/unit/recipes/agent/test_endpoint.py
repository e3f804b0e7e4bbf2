from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.endpoint import ChatEndpoint, serve
from tests.unit.recipes.agent.test_llm import SETTINGS, Script, tokens


def ask(
    endpoint: ChatEndpoint, body: Any, *, token: str | None = None, path: str = "/chat/completions"
) -> tuple[int, str]:
    """Ask as any client would: plain HTTP, from another thread."""
    url = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
    try:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", url.path + path, sent, {"Authorization": f"Bearer {token or endpoint.api_key}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def asked(model: LanguageModel, *bodies: Any, **options: Any) -> list[tuple[int, str]]:
    async def run() -> list[tuple[int, str]]:
        async with serve(model) as endpoint:
            return [await asyncio.to_thread(ask, endpoint, each, **options) for each in bodies]

    return asyncio.run(run())


def test_requests_that_go_on_are_one_conversation_and_others_branches() -> None:
    model = LanguageModel(Script("a", "b", "c", "d"), SETTINGS)
    first, second, changed = messages("x"), messages("x", "a", "y"), messages("x", "A", "y")

    found = asked(model, *({"model": "m", "messages": each} for each in (first, second, changed, second)))

    assert [status for status, _ in found] == [200] * 4
    said = [json.loads(text)["choices"][0]["message"]["content"] for _, text in found]
    assert said == ["a", "b", "c", "d"]
    went_on, other, again = model.segments()
    assert went_on.prompt == tokens("x")
    assert went_on.tokens == (*tokens("a"), 0, *tokens("y"), *tokens("b"), 0)
    assert went_on.trained == (True, True, False, True, True)
    # A past that is not what the model said is told to it, and not learned from.
    assert other.prompt == tokens("xAy")
    assert again.prompt == tokens("xay")


def test_a_stream_has_the_whole_reply_and_an_end() -> None:
    ((status, text),) = asked(LanguageModel(Script("abc"), SETTINGS), {"messages": messages("x"), "stream": True})

    *events, last, rest = text.split("\n\n")
    assert (status, last, rest) == (200, "data: [DONE]", "")
    choices = [json.loads(each.removeprefix("data: "))["choices"][0] for each in events]
    assert choices[0]["delta"]["content"] == "abc"
    assert choices[-1]["finish_reason"] == "stop"


def test_a_token_of_another_task_gets_nothing() -> None:
    mine, other = LanguageModel(Script("a"), SETTINGS), LanguageModel(Script("b"), SETTINGS)

    async def run() -> list[tuple[int, str]]:
        async with serve(mine) as endpoint, serve(other) as another:
            return [
                await asyncio.to_thread(ask, endpoint, {"messages": messages("x")}, token=token)
                for token in (another.api_key, "wrong", "ü")
            ]

    found = asyncio.run(run())
    assert [status for status, _ in found] == [401] * 3
    assert mine.turns == 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "no JSON"),
        ([], "list of messages"),
        ({"messages": []}, "list of messages"),
        ({"messages": [{"role": "user"}]}, "`content`"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "`role`"),
        ({"messages": messages("x"), "max_tokens": 0.5}, "`max_tokens`"),
        ({"messages": messages("x"), "tools": [{}]}, "an entry of `tools`"),
        ({"messages": messages("x"), "tools": 5}, "not iterable"),
        ({"messages": messages("x"), "tool_choice": "required"}, "`tool_choice`"),
        (
            {"messages": messages("x"), "response_format": {"type": "json_object"}},
            "`response_format` is not understood",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "`content`"),
        ({"messages": messages("x"), "n": 2}, "`n` above 1"),
    ],
)
def test_what_cannot_be_answered_is_told(body: Any, why: str) -> None:
    model = LanguageModel(Script("a"), SETTINGS)
    ((status, text),) = asked(model, body)
    assert status == 400
    assert why in json.loads(text)["error"]["message"]
    assert model.turns == 0


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"of": [1, 2]}}</tool_call>'


@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_a_clients_functions_come_back_as_the_model_wrote_them(streams: bool) -> None:
    # The second call is of no function that there is, and is text.
    written = f"I see. {CALL} <tool_call>{{}}</tool_call>"
    model = LanguageModel(Script(written, "3"), SETTINGS._replace(max_tokens=900))
    first = {"messages": messages("x"), "tools": [ADD], "stream": streams}

    async def run() -> tuple[dict[str, Any], str]:
        async with serve(model) as endpoint:
            status, text = await asyncio.to_thread(ask, endpoint, first)
            assert status == 200
            if streams:
                choice = json.loads(text.partition("\n")[0].removeprefix("data: "))["choices"][0]["delta"]
            else:
                choice = json.loads(text)["choices"][0]["message"]
            (call,) = choice["tool_calls"]
            # A client sends back what matters to it.
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
            seen = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            second = {"messages": [*first["messages"], said, seen], "tools": [ADD]}
            return choice, (await asyncio.to_thread(ask, endpoint, second))[1]

    choice, answer = asyncio.run(run())

    assert choice["content"] == "I see."
    assert choice["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"of": [1, 2]}'}
    assert json.loads(answer)["choices"][0]["message"]["content"] == "3"
    (segment,) = model.segments()
    # One conversation, and nothing of it was written anew.
    assert segment.tokens == (*tokens(written), 0, *tokens("3"), *tokens("3"), 0)
    assert segment.trained == (True,) * (len(written) + 1) + (False,) + (True,) * 2
    assert '"name": "add"' in "".join(map(chr, segment.prompt))


def test_calls_that_the_model_did_not_write_are_told_to_it() -> None:
    model = LanguageModel(Script("a"), SETTINGS._replace(max_tokens=900))
    call = {"id": "other", "type": "function", "function": {"name": "add", "arguments": '{"of": [1, 2]}'}}
    given = [*messages("x"), {"role": "assistant", "content": "so", "tool_calls": [call]}]

    ((status, _),) = asked(model, {"messages": given})

    assert status == 200
    (segment,) = model.segments()
    assert segment.prompt == tokens(f"xso{CALL}")


def test_parts_of_text_and_developers_are_understood() -> None:
    model = LanguageModel(Script("a"), SETTINGS)
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    ((status, _),) = asked(model, {"messages": [{"role": "developer", "content": parts}]})
    assert status == 200
    assert model.segments()[0].prompt == tokens("xy")


def test_paths_and_limits_are_told() -> None:
    model = LanguageModel(Script("a"), SETTINGS._replace(max_turns=1))
    assert asked(model, {}, path="/models")[0][0] == 404
    found = asked(model, {"messages": messages("x")}, {"messages": messages("y")})
    assert [status for status, _ in found] == [200, 429]
    assert "no turns are left" in found[1][1]
