from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from recipes.agent.endpoint import ChatEndpoint, serve
from recipes.agent.llm import LanguageModel
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
        ({"messages": messages("x"), "tools": [{}]}, "`tools` is not understood"),
        ({"messages": messages("x"), "n": 2}, "`n` above 1"),
    ],
)
def test_what_cannot_be_answered_is_told(body: Any, why: str) -> None:
    model = LanguageModel(Script("a"), SETTINGS)
    ((status, text),) = asked(model, body)
    assert status == 400
    assert why in json.loads(text)["error"]["message"]
    assert model.turns == 0


def test_paths_and_limits_are_told() -> None:
    model = LanguageModel(Script("a"), SETTINGS._replace(max_turns=1))
    assert asked(model, {}, path="/models")[0][0] == 404
    found = asked(model, {"messages": messages("x")}, {"messages": messages("y")})
    assert [status for status, _ in found] == [200, 429]
    assert "no turns are left" in found[1][1]
