"""Requests with mistakes by seed: the endpoint answers each, none by a server's error."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
from typing import Any
from urllib.parse import urlsplit

import pytest

from recipes.agent.endpoint import ChatEndpoint
from tests.mistakes import HOSTILE, garbled, mutated
from tests.unit.recipes.agent.endpoint.asking import PARAMETERS, model, with_endpoint

pytestmark = pytest.mark.security

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
FUNCTION = {"name": "add", "description": "d", "parameters": PARAMETERS, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"of": [1]}'}}
USED = {"type": "tool_use", "id": "c1", "name": "add", "input": {"of": [1]}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]}
RETURNED = {"role": "tool", "tool_call_id": "c1", "content": "1"}
COMMON: dict[str, Any] = {"model": "m", "stream": False, "temperature": 1, "top_p": 1}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {**COMMON, "messages": MESSAGES, "max_tokens": 9, "n": 1, "stop": ["a"], "tool_choice": "auto"},
        {
            **COMMON,
            "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}, RETURNED],
            "tools": [{"type": "function", "function": FUNCTION}],
            "parallel_tool_calls": True,
            "stream_options": {"include_usage": True},
        },
    ],
    "/v1/messages": [
        {**COMMON, "messages": MESSAGES[1:], "max_tokens": 9, "system": "s", "stop_sequences": ["a"]},
        {
            **COMMON,
            "messages": [
                *MESSAGES[1:],
                {"role": "assistant", "content": [USED]},
                {"role": "user", "content": [RESULT]},
            ],
            "tools": [{"name": "add", "description": "d", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 9,
        },
    ],
    "/v1/responses": [
        {**COMMON, "input": "x", "instructions": "s", "max_output_tokens": 9, "store": True},
        {
            **COMMON,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"of": [1]}'},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "text"}},
        },
    ],
}


def status_of(endpoint: ChatEndpoint, path: str, body: bytes) -> tuple[int, str]:
    """Return the status and the text of an answer, whole streams included."""
    url = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
    try:
        connection.request("POST", path, body, {"Authorization": f"Bearer {endpoint.api_key}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def drawn(draw: random.Random) -> tuple[str, bytes]:
    """Return the path and the body of a request with mistakes."""
    path = draw.choice(list(REQUESTS))
    right = draw.choice(REQUESTS[path])
    whole = json.dumps(right).encode()
    kinds = (json.dumps(mutated(draw, right)).encode(), garbled(draw, whole), draw.choice(HOSTILE))
    return path, draw.choices(kinds, (6, 2, 1))[0]


@pytest.mark.parametrize("path", REQUESTS)
def test_requests_without_mistakes_are_answered(path: str) -> None:
    async def act(endpoint: ChatEndpoint) -> list[tuple[int, str]]:
        bodies = [json.dumps(request).encode() for request in REQUESTS[path]]
        return [await asyncio.to_thread(status_of, endpoint, path, body) for body in bodies]

    answers = with_endpoint(model("b", "b"), act)
    assert [status for status, _ in answers] == [200, 200], answers


@pytest.mark.parametrize(
    ("seed", "mistakes"), [(0, 150), *(pytest.param(seed, 2000, marks=pytest.mark.nightly) for seed in range(1, 4))]
)
def test_mistakes_by_seed_are_answered(seed: int, mistakes: int) -> None:
    draw = random.Random(seed)

    async def act(endpoint: ChatEndpoint) -> list[int]:
        statuses: list[int] = []
        for _ in range(mistakes):
            path, body = drawn(draw)
            status, text = await asyncio.to_thread(status_of, endpoint, path, body)
            assert status < 500, (path, body, text)
            assert "event: error" not in text, (path, body, text)
            statuses.append(status)
        return statuses

    assert {200, 400} <= set(with_endpoint(model(*"b" * mistakes * 64), act))
