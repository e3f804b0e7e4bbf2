"""Requests to the endpoint of a run whose model says what a test has written."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.endpoint import ChatEndpoint, serve

if TYPE_CHECKING:
    # As a whole they take seconds, which every process that collects tests would spend.
    import anthropic
    import openai

PARAMETERS = {"type": "object", "properties": {"of": {"type": "array"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"of": [1, 2]}}</tool_call>'
OTHER_CALL = CALL.replace("[1, 2]", "[3, 4]")


@asynccontextmanager
async def openai_of(llm: LanguageModel) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a model's endpoint."""
    import openai

    async with (
        serve(llm) as endpoint,
        openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_of(llm: LanguageModel) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client of a model's endpoint."""
    import anthropic

    async with (
        serve(llm) as endpoint,
        anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key) as client,
    ):
        yield client


def raw(endpoint: ChatEndpoint, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, str], str]:
    """Ask as any client would: plain HTTP, for use in another thread; return the whole text of the answer."""
    url = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
    try:
        connection.request("POST", path, body, {"Authorization": f"Bearer {endpoint.api_key}", **headers})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def post(endpoint: ChatEndpoint, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    status, received, text = raw(
        endpoint, path, body if isinstance(body, bytes) else json.dumps(body).encode(), **headers
    )
    return status, received, json.loads(text)


def posted(llm: LanguageModel, path: str, *bodies: Any, **headers: str) -> list[tuple[int, dict[str, str], Any]]:
    async def run() -> list[tuple[int, dict[str, str], Any]]:
        async with serve(llm) as endpoint:
            return [await asyncio.to_thread(post, endpoint, path, body, **headers) for body in bodies]

    return asyncio.run(run())
