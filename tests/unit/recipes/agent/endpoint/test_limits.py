"""Limits of the endpoint, over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest
from recipes.agent.endpoint import ChatEndpoint, serve, server
from recipes.language.listening import limits
from tests.unit.recipes.agent.endpoint.asking import model, post, posted, with_endpoint

BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
PATH = "/v1/chat/completions"


async def connect(endpoint: ChatEndpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(endpoint.base_url).port)


def head(endpoint: ChatEndpoint, *lines: str, token: str | None = None) -> bytes:
    first = (f"POST {PATH} HTTP/1.1", "Host: x", f"authorization: bearer {token or endpoint.api_key}")
    return "\r\n".join((*first, *lines, "", "")).encode()


def exchanged(act: Callable[[ChatEndpoint], Awaitable[bytes]], *turns: str) -> bytes:
    return with_endpoint(model(*turns), act)


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


def test_a_wrong_token_is_refused_before_the_body() -> None:
    async def act(endpoint: ChatEndpoint) -> bytes:
        # The body never comes.
        reader, writer = await connect(endpoint)
        writer.write(head(endpoint, "Content-Length: 1000000", "Expect: 100-continue", token="wrong"))
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.close()
        return answer

    assert exchanged(act).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("header", [{"Authorization": "bearer {}"}, {"Authorization": "", "x-api-key": "{}"}])
def test_tokens_of_every_client_are_read(header: dict[str, str]) -> None:
    async def act(endpoint: ChatEndpoint) -> int:
        sent = {name: value.format(endpoint.api_key) for name, value in header.items()}
        return (await asyncio.to_thread(post, endpoint, PATH, BODY, **sent))[0]

    assert with_endpoint(model("a"), act) == 200


@pytest.mark.parametrize("token", ["Bearer wrong", "Bearer \xfc", "Basic x", ""])
def test_other_tokens_get_nothing(token: str) -> None:
    llm = model("a")
    ((status, _, answer),) = posted(llm, PATH, BODY, Authorization=token)
    assert (status, answer["error"]["type"], llm.turns) == (401, "authentication_error", 0)


def test_the_token_of_another_run_gets_nothing() -> None:
    async def run() -> int:
        async with serve(model("a")) as mine, serve(model("b")) as other:
            crossed = ChatEndpoint(mine.base_url, other.api_key)
            return (await asyncio.to_thread(post, crossed, PATH, BODY))[0]

    assert asyncio.run(run()) == 401


def test_chunked_bodies_and_kept_connections_are_understood() -> None:
    async def act(endpoint: ChatEndpoint) -> bytes:
        chunks = b"".join(b"%x\r\n%s\r\n" % (1, BODY[n : n + 1]) for n in range(len(BODY))) + b"0\r\n\r\n"
        plain = head(endpoint, f"Content-Length: {len(BODY)}", "Connection: close") + BODY
        return await said(endpoint, head(endpoint, "Transfer-Encoding: chunked") + chunks, plain)

    assert exchanged(act, "a", "b").count(b"HTTP/1.1 200") == 2


def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async def act(endpoint: ChatEndpoint) -> bytes:
        reader, writer = await connect(endpoint)
        writer.write(head(endpoint, f"Content-Length: {len(BODY)}", "Expect: 100-continue", "Connection: close"))
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.write(BODY)
        rest = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return first + rest

    answer = exchanged(act, "a")
    assert answer.startswith(b"HTTP/1.1 100")
    assert b"HTTP/1.1 200" in answer


@pytest.mark.parametrize("line", ["Content-Length: many", "Content-Length: -1", "X: " + "a" * 70_000])
def test_a_head_that_is_none_is_answered(line: str) -> None:
    async def act(endpoint: ChatEndpoint) -> bytes:
        # A head that is too long is refused before its end.
        return await said(endpoint, head(endpoint, line)[:66_000])

    assert exchanged(act).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGEST_BODY", 1000)

    async def act(endpoint: ChatEndpoint) -> bytes:
        reader, writer = await connect(endpoint)
        if chunked:
            writer.write(head(endpoint, "Transfer-Encoding: chunked") + b"7d0\r\n" + b"x" * 2000)
        else:
            writer.write(head(endpoint, "Content-Length: 2000"))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        writer.close()
        return answer

    answer = exchanged(act)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"at most 1000 bytes" in answer


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.05)

    async def act(endpoint: ChatEndpoint) -> bytes:
        return await said(endpoint, head(endpoint, "Content-Length: 10") + b"{")

    assert exchanged(act).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", [b"", b"POST /v1"])
def test_a_connection_that_asks_nothing_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.05)

    async def act(endpoint: ChatEndpoint) -> bytes:
        try:
            return await said(endpoint, sent)
        except ConnectionResetError:
            return b""

    assert exchanged(act) == b""


@pytest.mark.security
def test_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 2)

    async def act(endpoint: ChatEndpoint) -> bytes:
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
        return last

    assert exchanged(act, "a", "b").startswith(b"HTTP/1.1 400")


@pytest.mark.security
def test_slow_connections_keep_nobody_out() -> None:
    async def act(endpoint: ChatEndpoint) -> bytes:
        slow = [await connect(endpoint) for _ in range(limits.MOST_CONNECTIONS + 100)]
        # A part of a head, a head without its body, and nothing.
        for (_, first), (_, second) in zip(slow[::3], slow[1::3], strict=False):
            first.write(head(endpoint)[:40])
            second.write(head(endpoint, "Content-Length: 100000", token="wrong"))
        answer = await asyncio.to_thread(post, endpoint, PATH, BODY)
        for _, writer in slow:
            writer.close()
        return json.dumps(answer).encode()

    assert b'"content": "a"' in exchanged(act, "a")


def test_a_large_body_is_decoded_while_all_threads_wait() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]}).encode()

    async def act(endpoint: ChatEndpoint) -> bytes:
        # As agents that are plain functions do, each in a thread.
        free = threading.Event()
        waiting = [asyncio.get_running_loop().run_in_executor(None, free.wait) for _ in range(40)]
        try:
            return await said(endpoint, head(endpoint, f"Content-Length: {len(body)}", "Connection: close") + body)
        finally:
            free.set()
            await asyncio.gather(*waiting)

    assert exchanged(act, "a").startswith(b"HTTP/1.1 ")


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


def test_requests_beyond_the_limit_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_REQUESTS", 1)
    llm: Any = model()

    async def act(endpoint: ChatEndpoint) -> tuple[Any, Any]:
        llm._engines = waits = Waits()
        first = asyncio.create_task(asyncio.to_thread(post, endpoint, PATH, BODY))
        await waits.asked.get()
        second = await asyncio.to_thread(post, endpoint, PATH, BODY)
        waits.goes.set()
        return await first, second

    first, second = with_endpoint(llm, act)
    assert first[0] == 200
    assert (second[0], second[1]["retry-after"]) == (429, "1")
    assert "x-should-retry" not in second[1]


def test_a_client_that_goes_away_costs_no_turn() -> None:
    llm: Any = model()

    async def act(endpoint: ChatEndpoint) -> None:
        llm._engines = waits = Waits()
        _, writer = await connect(endpoint)
        writer.write(head(endpoint, f"Content-Length: {len(BODY)}") + BODY)
        await waits.asked.get()
        writer.close()
        await asyncio.wait_for(waits.ended.get(), 30)

    with_endpoint(llm, act)
    assert llm.turns == 0
    assert [segment.drawn for segment in llm.segments()] == [0]


def test_small_answers_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[int] = []
    made = limits.TimedConnection.connection_made

    def look(connection: limits.TimedConnection, transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(connection, transport)

    monkeypatch.setattr(limits.TimedConnection, "connection_made", look)
    assert posted(model("a"), PATH, BODY)[0][0] == 200
    assert options == [1]
