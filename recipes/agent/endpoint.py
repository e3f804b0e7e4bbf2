"""An OpenAI-compatible server on loopback for one run of an agent: agents of any framework are trained through it."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, NamedTuple, cast

from recipes.agent.llm import Chat, LanguageModel, LimitReached, ModelReply
from recipes.agent.messages import ChatMessage

# Largest request: a header line by asyncio's own limit, and a body.
_LARGEST_BODY: Final = 16 << 20
_ROLES: Final = ("system", "user", "assistant", "tool")
_PATHS: Final = ("/v1/chat/completions", "/chat/completions")


class ChatEndpoint(NamedTuple):
    """The address of a server and the token that it takes, for a client's `base_url` and `api_key`."""

    base_url: str
    api_key: str


class RequestError(Exception):
    """A request that is not answered with a turn: its status, and what the client is told."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@asynccontextmanager
async def serve(llm: LanguageModel) -> AsyncGenerator[ChatEndpoint]:
    """Serve chat completions of the model as long as the context lasts.

    A request whose messages go on after those of an earlier one and its reply continues that conversation; any other
    one begins a conversation of its own. All of them are part of the run.
    """
    token = secrets.token_urlsafe(32)
    connections = _Connections(_Chats(llm), token)
    server = await asyncio.start_server(connections.accept, "127.0.0.1", 0)
    try:
        port: int = server.sockets[0].getsockname()[1]
        yield ChatEndpoint(f"http://127.0.0.1:{port}/v1", token)
    finally:
        server.close()
        await connections.close()


class _Chats:
    """The conversations of a run, by the messages that they consist of."""

    def __init__(self, llm: LanguageModel) -> None:
        self._llm = llm
        self._known: dict[tuple[ChatMessage, ...], Chat] = {}

    async def reply(self, messages: tuple[ChatMessage, ...], stop: Sequence[str], most: int | None) -> ModelReply:
        """Return the model's next turn after some messages."""
        chat = self._continued(messages)
        reply = await chat.reply(stop, most)
        self._known[(*messages, ChatMessage("assistant", reply.text))] = chat
        return reply

    def _continued(self, messages: tuple[ChatMessage, ...]) -> Chat:
        for count in range(len(messages) - 1, 0, -1):
            # Taken out: a second request with the same past is a branch, which begins with words of its own.
            chat = self._known.pop(messages[:count], None)
            if chat is not None:
                for each in messages[count:]:
                    chat.add(each.text, each.role)
                return chat
        return self._llm.conversation(*messages)


class _Connections:
    """Connections of clients; requests of one connection are answered one after the other."""

    def __init__(self, chats: _Chats, token: str) -> None:
        self._chats = chats
        self._token = token.encode()
        self._open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection from now on."""
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """End all connections."""
        for each in self._open:
            each.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # the client has gone, or does not speak HTTP
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer the next request, and return whether another one may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        size = int(fields.get("content-length", "0"))
        if not 0 <= size <= _LARGEST_BODY:
            raise ValueError("a body of that size is not read")
        body = await reader.readexactly(size)
        status, kind, text = HTTPStatus.OK, "application/json", ""
        try:
            self._check(method, path, fields)
            kind, text = await self._completed(body)
        except RequestError as error:
            status, text = error.status, json.dumps({"error": {"message": str(error), "type": error.status.phrase}})
        sent = text.encode()
        lines = f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {kind}", f"Content-Length: {len(sent)}"
        writer.write("\r\n".join((*lines, "", "")).encode() + sent)
        await writer.drain()
        return fields.get("connection", "").lower() != "close"

    def _check(self, method: str, path: str, fields: dict[str, str]) -> None:
        given = fields.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self._token):
            raise RequestError(HTTPStatus.UNAUTHORIZED, "the token is not that of this task")
        if path.partition("?")[0] not in _PATHS:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no {path}; there is {_PATHS[0]}")
        if method != "POST":
            raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, "chat completions are asked for by POST")

    async def _completed(self, body: bytes) -> tuple[str, str]:
        """Return the kind and the text of an answer."""
        try:
            asked: Any = json.loads(body)
        except ValueError:
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body is no JSON") from None
        messages, stop, most = _read(asked)
        try:
            reply = await self._chats.reply(messages, stop, most)
        except LimitReached as limit:
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, f"no {limit.limit} are left for this task") from None
        return _written(reply, asked.get("model") or "policy", streams=bool(asked.get("stream")))


def _read(asked: Any) -> tuple[tuple[ChatMessage, ...], tuple[str, ...], int | None]:
    """Return the messages of a request, the texts that end its turn, and the most tokens of it."""
    request = cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}
    for name in ("tools", "functions", "response_format"):
        if request.get(name):
            message = f"`{name}` is not understood here: say in a message how tools are called"
            raise RequestError(HTTPStatus.BAD_REQUEST, message)
    if request.get("n") not in (None, 1):
        raise RequestError(HTTPStatus.BAD_REQUEST, "`n` above 1 is not understood here: ask again")
    given: Any = request.get("messages")
    messages: list[ChatMessage] = []
    for each in cast("list[Any]", given) if isinstance(given, list) else []:
        message = cast("dict[str, Any]", each) if isinstance(each, dict) else {}
        role, text = message.get("role"), message.get("content")
        if role not in _ROLES or not isinstance(text, str):
            raise RequestError(HTTPStatus.BAD_REQUEST, "a message has a `role` and a text as its `content`")
        messages.append(ChatMessage(role, text))
    most = request.get("max_completion_tokens") or request.get("max_tokens")
    if not messages or not (most is None or (isinstance(most, int) and most > 0)):
        raise RequestError(HTTPStatus.BAD_REQUEST, "`messages` is a list of messages, `max_tokens` a number from 1")
    stop: Any = request.get("stop") or ()
    texts = (stop,) if isinstance(stop, str) else tuple(map(str, stop))
    return tuple(messages), texts, most


def _written(reply: ModelReply, model: str, *, streams: bool) -> tuple[str, str]:
    """Return a reply as a chat completion, or as a stream of one piece."""
    said = {"role": "assistant", "content": reply.text}
    finish = "length" if reply.finish == "length" else "stop"
    common = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": 0, "model": model}
    if not streams:
        usage = {"prompt_tokens": 0, "completion_tokens": len(reply.tokens), "total_tokens": len(reply.tokens)}
        choice = {"index": 0, "message": said, "finish_reason": finish}
        return "application/json", json.dumps(
            {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
        )
    nothing: dict[str, str] = {}
    parts: tuple[dict[str, Any], ...]
    parts = ({"delta": said, "finish_reason": None}, {"delta": nothing, "finish_reason": finish})
    lines = [{**common, "object": "chat.completion.chunk", "choices": [{"index": 0, **part}]} for part in parts]
    return "text/event-stream", "".join(f"data: {json.dumps(each)}\n\n" for each in lines) + "data: [DONE]\n\n"
