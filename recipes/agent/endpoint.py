"""An OpenAI-compatible server on loopback for one run of an agent: agents of any framework are trained through it."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, NamedTuple, cast

from recipes.agent.called_tools import (
    FunctionCall,
    as_mapping,
    call_ids,
    calls_as_text,
    find_calls,
    function_names,
    with_instructions,
)
from recipes.agent.conversation.chat_model import Chat, LanguageModel, LimitReached, ModelReply
from recipes.agent.conversation.turn_messages import ChatMessage, Role

# Largest request: a header line by asyncio's own limit, and a body.
_LARGEST_BODY: Final = 16 << 20
_ROLES: Final = {each: each for each in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_PATHS: Final = ("/v1/chat/completions", "/chat/completions")


class ChatRequest(NamedTuple):
    """A request, as far as it is understood.

    Attributes:
        messages: with those of the assistant as the model wrote them.
        functions: names of the functions that may be called.
        stop: texts that end the turn.
        most: tokens of the turn; None: as many as a turn may have.
        model: name that comes back.
        streams: whether the answer is a stream.
        usage: whether a stream ends with the tokens that were used.
    """

    messages: tuple[ChatMessage, ...]
    functions: tuple[str, ...]
    stop: tuple[str, ...]
    most: int | None
    model: str
    streams: bool
    usage: bool


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
        # What the model wrote where it called functions, by the id of each call: clients send back the calls alone.
        self._written: dict[str, str] = {}

    async def reply(self, request: ChatRequest) -> tuple[ModelReply, str, tuple[FunctionCall, ...]]:
        """Return the model's next turn, what it says in it, and the functions that it calls."""
        chat = self._continued(request.messages)
        reply = await chat.reply(request.stop, request.most)
        self._known[(*request.messages, ChatMessage("assistant", reply.text))] = chat
        said, calls = find_calls(reply.text, request.functions)
        self._written.update((each.call_id, reply.text) for each in calls)
        return reply, said, calls

    def text(self, message: Mapping[str, Any]) -> str | None:
        """Return the text of a message, or None where it has none."""
        known = next((self._written[each] for each in call_ids(message) if each in self._written), None)
        if known is not None:
            return known
        content, calls = _content(message.get("content")), calls_as_text(message)
        return (content or "") + calls if calls else content

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
        request = _read(asked, self._chats)
        try:
            reply, said, calls = await self._chats.reply(request)
        except LimitReached as limit:
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, f"no {limit.limit} are left for this task") from None
        return _completion(request, reply, said, calls)


def _read(asked: Any, chats: _Chats) -> ChatRequest:
    """Return a request, as far as it is understood.

    Raises:
        RequestError: it asks for something that there is not.
    """
    request = as_mapping(asked)
    for name in ("functions", "response_format"):
        if request.get(name):
            raise _not_understood(f"`{name}` is not understood here: use `tools`, or say in a message what is wanted")
    if request.get("n") not in (None, 1):
        raise _not_understood("`n` above 1 is not understood here: ask again")
    choice: Any = request.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _not_understood("`tool_choice` is `auto` or `none` here: the model chooses")
    messages = _messages(request.get("messages"), chats)
    most: Any = request.get("max_completion_tokens") or request.get("max_tokens")
    if not messages or not (most is None or (isinstance(most, int) and most > 0)):
        raise _not_understood("`messages` is a list of messages, `max_tokens` a number from 1")
    tools: Any = request.get("tools") or ()
    try:
        functions = function_names(tools)
    except (TypeError, ValueError) as error:
        raise _not_understood(str(error)) from None
    if functions:
        messages = with_instructions(messages, tools)
    stop: Any = request.get("stop") or ()
    return ChatRequest(
        messages,
        () if choice == "none" else tuple(functions),
        (stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        most,
        str(request.get("model") or "policy"),
        bool(request.get("stream")),
        bool(as_mapping(request.get("stream_options")).get("include_usage")),
    )


def _messages(given: Any, chats: _Chats) -> tuple[ChatMessage, ...]:
    messages: list[ChatMessage] = []
    for each in cast("list[Any]", given) if isinstance(given, list) else []:
        message = as_mapping(each)
        role, text = _ROLES.get(str(message.get("role"))), chats.text(message)
        if role is None or text is None:
            raise _not_understood("a message has a `role` and a text as its `content`")
        messages.append(ChatMessage(cast("Role", role), text))
    return tuple(messages)


def _content(given: Any) -> str | None:
    """Return the text of a message's content, which is a text or a list of parts; None where a part is no text."""
    if isinstance(given, str):
        return given
    parts = [as_mapping(each).get("text") for each in cast("list[Any]", given)] if isinstance(given, list) else [None]
    texts = [each for each in parts if isinstance(each, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _completion(request: ChatRequest, reply: ModelReply, said: str, calls: Sequence[FunctionCall]) -> tuple[str, str]:
    """Return the kind and the text of a chat completion, or of a stream of one piece."""
    message: dict[str, Any] = {"role": "assistant", "content": said or None if calls else said}
    if calls:
        message["tool_calls"] = [each.entry() for each in calls]
    finish = "tool_calls" if calls else "length" if reply.finish == "length" else "stop"
    common = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": 0, "model": request.model}
    usage = {"prompt_tokens": 0, "completion_tokens": len(reply.tokens), "total_tokens": len(reply.tokens)}
    if not request.streams:
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return "application/json", json.dumps(
            {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
        )
    if calls:
        message["tool_calls"] = [{"index": number, **each.entry()} for number, each in enumerate(calls)]
    nothing: dict[str, str] = {}
    parts = ({"delta": message, "finish_reason": None}, {"delta": nothing, "finish_reason": finish})
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, **part}]} for part in parts]
    if request.usage:
        chunks.append({"choices": [], "usage": usage})
    lines = [{**common, "object": "chat.completion.chunk", **each} for each in chunks]
    return "text/event-stream", "".join(f"data: {json.dumps(each)}\n\n" for each in lines) + "data: [DONE]\n\n"


def _not_understood(message: str) -> RequestError:
    return RequestError(HTTPStatus.BAD_REQUEST, message)
