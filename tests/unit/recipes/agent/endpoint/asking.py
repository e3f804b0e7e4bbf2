"""Requests to the endpoint of a run whose model says what a test has written."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anthropic
import openai

from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.endpoint import ChatEndpoint, serve
from tests.unit.recipes.agent.test_llm import SETTINGS, Script

T = TypeVar("T")
PARAMETERS = {"type": "object", "properties": {"of": {"type": "array"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"of": [1, 2]}}</tool_call>'
OTHER_CALL = CALL.replace("[1, 2]", "[3, 4]")


def model(*turns: str, **settings: Any) -> LanguageModel:
    return LanguageModel(Script(*turns), SETTINGS._replace(**{"max_tokens": 4000, "max_new_tokens": 1000, **settings}))


def with_endpoint(llm: LanguageModel, act: Callable[[ChatEndpoint], Awaitable[T]]) -> T:
    async def run() -> T:
        async with serve(llm) as endpoint:
            return await act(endpoint)

    return asyncio.run(run())


def with_openai(llm: LanguageModel, act: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    async def run(endpoint: ChatEndpoint) -> T:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            return await act(client)

    return with_endpoint(llm, run)


def with_anthropic(llm: LanguageModel, act: Callable[[anthropic.AsyncAnthropic], Awaitable[T]]) -> T:
    async def run(endpoint: ChatEndpoint) -> T:
        async with anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key) as client:
            return await act(client)

    return with_endpoint(llm, run)


def post(endpoint: ChatEndpoint, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Ask as any client would: plain HTTP, for use in another thread."""
    url = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {endpoint.api_key}", **headers}
        connection.request("POST", path, data, sent)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, json.loads(answer.read())
    finally:
        connection.close()


def posted(llm: LanguageModel, path: str, *bodies: Any, **headers: str) -> list[tuple[int, dict[str, str], Any]]:
    async def run(endpoint: ChatEndpoint) -> list[tuple[int, dict[str, str], Any]]:
        return [await asyncio.to_thread(post, endpoint, path, body, **headers) for body in bodies]

    return with_endpoint(llm, run)
