"""Limits of the endpoint, over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest

from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest
from recipes.agent.endpoint import ChatEndpoint, serve, server
from recipes.language import loopback_server
from tests.mistakes import HOSTILE, garbled, mutated
from tests.unit.recipes.agent.endpoint.asking import PARAMETERS, post, posted, raw
from tests.unit.recipes.agent.scripted import model

BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
PATH = "/v1/chat/completions"


async def connect(endpoint: ChatEndpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(endpoint.base_url).port)


def head(endpoint: ChatEndpoint, *lines: str, token: str | None = None) -> bytes:
    first = (f"POST {PATH} HTTP/1.1", "Host: x", f"authorization: bearer {token or endpoint.api_key}")
    return "\r\n".join((*first, *lines, "", "")).encode()


async def said(endpoint: ChatEndpoint, *parts: bytes) -> bytes:
    """Send parts, and return all that comes back until the server closes."""
    reader, writer = await connect(endpoint)
    for part in parts:
        writer.write(part)
        await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


async def test_a_wrong_token_is_refused_before_the_body() -> None:
    async with serve(model()) as endpoint:
        # The body never comes.
        reader, writer = await connect(endpoint)
        writer.write(head(endpoint, "Content-Length: 1000000", "Expect: 100-continue", token="wrong"))
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("header", [{"Authorization": "bearer {}"}, {"Authorization": "", "x-api-key": "{}"}])
async def test_tokens_of_every_client_are_read(header: dict[str, str]) -> None:
    async with serve(model("a")) as endpoint:
        sent = {name: value.format(endpoint.api_key) for name, value in header.items()}
        result = (await asyncio.to_thread(post, endpoint, PATH, BODY, **sent))[0]
    assert result == 200


@pytest.mark.parametrize("token", ["Bearer wrong", "Bearer \xfc", "Basic x", ""])
def test_other_tokens_get_nothing(token: str) -> None:
    llm = model("a")
    ((status, _, answer),) = posted(llm, PATH, BODY, Authorization=token)
    assert (status, answer["error"]["type"], llm.turns) == (401, "authentication_error", 0)


async def test_the_token_of_another_run_gets_nothing() -> None:
    async with serve(model("a")) as mine, serve(model("b")) as other:
        crossed = ChatEndpoint(mine.base_url, other.api_key)
        result = (await asyncio.to_thread(post, crossed, PATH, BODY))[0]
    assert result == 401


async def test_chunked_bodies_and_kept_connections_are_understood() -> None:
    async with serve(model("a", "b")) as endpoint:
        chunks = b"".join(b"%x\r\n%s\r\n" % (1, BODY[n : n + 1]) for n in range(len(BODY))) + b"0\r\n\r\n"
        plain = head(endpoint, f"Content-Length: {len(BODY)}", "Connection: close") + BODY
        result = await said(endpoint, head(endpoint, "Transfer-Encoding: chunked") + chunks, plain)
    assert result.count(b"HTTP/1.1 200") == 2


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with serve(model("a")) as endpoint:
        reader, writer = await connect(endpoint)
        writer.write(head(endpoint, f"Content-Length: {len(BODY)}", "Expect: 100-continue", "Connection: close"))
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.write(BODY)
        rest = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        answer = first + rest
    assert answer.startswith(b"HTTP/1.1 100")
    assert b"HTTP/1.1 200" in answer


@pytest.mark.parametrize("line", ["Content-Length: many", "Content-Length: -1", "X: " + "a" * 70_000])
async def test_a_head_that_is_none_is_answered(line: str) -> None:
    async with serve(model()) as endpoint:
        # A head that is too long is refused before its end.
        result = await said(endpoint, head(endpoint, line)[:66_000])
    assert result.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_server, "LARGEST_BODY", 1000)
    async with serve(model()) as endpoint:
        reader, writer = await connect(endpoint)
        if chunked:
            writer.write(head(endpoint, "Transfer-Encoding: chunked") + b"7d0\r\n" + b"x" * 2000)
        else:
            writer.write(head(endpoint, "Content-Length: 2000"))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"at most 1000 bytes" in answer


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_server, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(loopback_server, "HEAD_SECONDS", 0.05)
    async with serve(model()) as endpoint:
        result = await said(endpoint, head(endpoint, "Content-Length: 10") + b"{")
    assert result.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", [b"", b"POST /v1"])
async def test_a_connection_that_asks_nothing_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_server, "HEAD_SECONDS", 0.05)
    async with serve(model()) as endpoint:
        with contextlib.suppress(ConnectionResetError):
            assert await said(endpoint, sent) == b""


@pytest.mark.security
async def test_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_server, "MOST_CONNECTIONS", 2)
    async with serve(model("a", "b")) as endpoint:
        # One that has shown the token stays, whatever strangers do.
        reader, known = await connect(endpoint)
        known.write(head(endpoint, f"Content-Length: {len(BODY)}") + BODY)
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 30)).startswith(b"HTTP/1.1 200")
        strangers = [await connect(endpoint) for _ in range(5)]
        for first, _ in strangers[:3]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(first.read(), 30) == b""
        answer = await asyncio.to_thread(post, endpoint, PATH, BODY)
        assert answer
        known.write(head(endpoint, "Content-Length: 2", "Connection: close") + b"{}")
        last = await asyncio.wait_for(reader.read(), 30)
        for _, writer in (*strangers, (reader, known)):
            writer.close()
    assert last.startswith(b"HTTP/1.1 400")


@pytest.mark.security
async def test_slow_connections_keep_nobody_out() -> None:
    async with serve(model("a")) as endpoint:
        slow = [await connect(endpoint) for _ in range(loopback_server.MOST_CONNECTIONS + 100)]
        # A part of a head, a head without its body, and nothing.
        for (_, first), (_, second) in zip(slow[::3], slow[1::3], strict=False):
            first.write(head(endpoint)[:40])
            second.write(head(endpoint, "Content-Length: 100000", token="wrong"))
        answer = await asyncio.to_thread(post, endpoint, PATH, BODY)
        for _, writer in slow:
            writer.close()
    assert '"content": "a"' in json.dumps(answer)


async def test_a_large_body_is_decoded_while_all_threads_wait() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]}).encode()
    # As agents that are plain functions do, each in a thread.
    free = threading.Event()
    waiting = [asyncio.get_running_loop().run_in_executor(None, free.wait) for _ in range(40)]
    async with serve(model("a")) as endpoint:
        try:
            answer = await said(endpoint, head(endpoint, f"Content-Length: {len(body)}", "Connection: close") + body)
        finally:
            free.set()
            await asyncio.gather(*waiting)
    assert answer.startswith(b"HTTP/1.1 ")


class Waits:
    """Engines that answer when they are let go."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[DrawRequest] = asyncio.Queue()
        self.goes = asyncio.Event()
        self.ended: asyncio.Queue[None] = asyncio.Queue()

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        self.asked.put_nowait(request)
        try:
            await self.goes.wait()
        finally:
            self.ended.put_nowait(None)
        return DrawnTurn(0, (1,), (2,), (0.0,), (0,), "a", "stop")


async def test_requests_beyond_the_limit_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_REQUESTS", 1)
    llm: Any = model()
    async with serve(llm) as endpoint:
        llm._engines = waits = Waits()
        first = asyncio.create_task(asyncio.to_thread(post, endpoint, PATH, BODY))
        await waits.asked.get()
        second = await asyncio.to_thread(post, endpoint, PATH, BODY)
        waits.goes.set()
        first, second = await first, second
    assert first[0] == 200
    assert (second[0], second[1]["retry-after"]) == (429, "1")
    assert "x-should-retry" not in second[1]


async def test_a_client_that_goes_away_costs_no_turn() -> None:
    llm: Any = model()
    async with serve(llm) as endpoint:
        llm._engines = waits = Waits()
        _, writer = await connect(endpoint)
        writer.write(head(endpoint, f"Content-Length: {len(BODY)}") + BODY)
        await waits.asked.get()
        writer.close()
        await asyncio.wait_for(waits.ended.get(), 30)
    assert llm.turns == 0
    assert [segment.drawn for segment in llm.segments()] == [0]


def test_small_answers_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[int] = []
    made = loopback_server.TimedConnection.connection_made

    def look(connection: loopback_server.TimedConnection, transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(connection, transport)

    monkeypatch.setattr(loopback_server.TimedConnection, "connection_made", look)
    assert posted(model("a"), PATH, BODY)[0][0] == 200
    assert options == [1]


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


def drawn(draw: random.Random) -> tuple[str, bytes]:
    """Return the path and the body of a request with mistakes."""
    path = draw.choice(list(REQUESTS))
    right = draw.choice(REQUESTS[path])
    whole = json.dumps(right).encode()
    kinds = (json.dumps(mutated(draw, right)).encode(), garbled(draw, whole), draw.choice(HOSTILE))
    return path, draw.choices(kinds, (6, 2, 1))[0]


@pytest.mark.security
@pytest.mark.parametrize("path", REQUESTS)
def test_requests_without_mistakes_are_answered(path: str) -> None:
    answers = posted(model("b", "b"), path, *REQUESTS[path])
    assert [status for status, _, _ in answers] == [200, 200], answers


@pytest.mark.security
@pytest.mark.parametrize(
    ("seed", "mistakes"), [(0, 150), *(pytest.param(seed, 2000, marks=pytest.mark.nightly) for seed in range(1, 4))]
)
async def test_mistakes_by_seed_are_answered(seed: int, mistakes: int) -> None:
    draw = random.Random(seed)
    async with serve(model(*"b" * mistakes * 64)) as endpoint:
        statuses: list[int] = []
        for _ in range(mistakes):
            path, body = drawn(draw)
            status, _, text = await asyncio.to_thread(raw, endpoint, path, body)
            assert status < 500, (path, body, text)
            assert "event: error" not in text, (path, body, text)
            statuses.append(status)
    assert {200, 400} <= set(statuses)
