"""A loopback server for one run of an agent, through which agents of any framework are trained."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.endpoint import chat, messages, responses
from recipes.agent.endpoint.chats import Ask, Chats, SaidTurn
from recipes.language.loopback_server import RequestError, check_length, json_body, listening, prove, unless_gone

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_CLIENT_GONE: Final = 499


class ChatEndpoint(NamedTuple):
    """The address of a server and its token, for a client's `base_url` and `api_key`."""

    base_url: str
    api_key: str

    @property
    def root_url(self) -> str:
        """The address without the version, as clients of Anthropic expect it."""
        return self.base_url.removesuffix("/v1")


class Dialect(Protocol):
    """The functions of a protocol."""

    def read(self, request: dict[str, Any], chats: Chats, /) -> Ask: ...
    def written(
        self, request: dict[str, Any], ask: Ask, answers: Sequence[SaidTurn], chats: Chats, /
    ) -> dict[str, Any] | Iterator[str]: ...
    def error(self, status: HTTPStatus, message: str, /) -> dict[str, Any]: ...


@asynccontextmanager
async def serve(llm: LanguageModel) -> AsyncGenerator[ChatEndpoint]:
    """Serve the model while the context is open: chat completions, Anthropic's Messages, OpenAI's Responses.

    A request whose messages extend those of an earlier request and its reply continues that conversation; any other
    request begins a new one. All of them are part of the run.
    """
    token = secrets.token_urlsafe(32)
    async with listening(TokenGate(_application(Chats(llm)), token, _refused)) as port:
        yield ChatEndpoint(f"http://127.0.0.1:{port}/v1", token)


def _application(chats: Chats) -> Starlette:
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/chat/completions": _turns(cast("Dialect", chat), chats),
        "/v1/messages": _turns(cast("Dialect", messages), chats),
        "/v1/messages/count_tokens": _counted(chats),
        "/v1/responses": _turns(cast("Dialect", responses), chats),
    }

    async def models(request: Request) -> Response:
        name: str | None = request.path_params.get("name")
        if name == "":
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return JSONResponse(chat.models() if name is None else chat.model(name))

    return Starlette(
        routes=[
            *(Route(path, act, methods=["POST"]) for path, act in posts.items()),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", models, methods=["GET"]),
        ],
        exception_handlers={RequestError: _refused_by, HTTPException: _not_routed, ClientDisconnect: _gone},
    )


def _turns(dialect: Dialect, chats: Chats) -> Callable[[Request], Awaitable[Response]]:
    async def act(request: Request) -> Response:
        asked = await json_body(request)
        ask = dialect.read(asked, chats)
        answers = await unless_gone(request, chats.reply(ask))
        content = dialect.written(asked, ask, answers, chats)
        if isinstance(content, dict):
            return JSONResponse(content)
        # The turn is complete, so all events are sent at once.
        return Response("".join(content), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return act


def _counted(chats: Chats) -> Callable[[Request], Awaitable[Response]]:
    async def act(request: Request) -> Response:
        ask = messages.read_counted(await json_body(request), chats)
        return JSONResponse({"input_tokens": await unless_gone(request, chats.count(ask))})

    return act


def _refused(request: Request, error: RequestError) -> Response:
    """Return the response to a rejected request, in the form of its protocol."""
    theirs = "/messages" in request.url.path or "anthropic-version" in request.headers
    content = (messages if theirs else chat).error(error.status, str(error))
    return JSONResponse(content, error.status, error.headers)


def _refused_by(request: Request, error: Exception) -> Response:
    return _refused(request, cast("RequestError", error))


def _not_routed(request: Request, error: Exception) -> Response:
    path = request.url.path
    if cast("HTTPException", error).status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return _refused(
            request, RequestError(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} does not accept {request.method}")
        )
    there = "/v1/chat/completions, /v1/messages, /v1/responses and /v1/models"
    return _refused(request, RequestError(HTTPStatus.NOT_FOUND, f"{path} does not exist; available: {there}"))


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)  # the client has disconnected


# The maximum concurrent requests, more than one agent needs; further ones are rejected temporarily.
MOST_REQUESTS: Final = 128


class TokenGate:
    """Checks the headers of each request before its body is read.

    Args:
        app: answers accepted requests.
        token: the token of the run.
        refusal: returns the response to a rejected request.
    """

    def __init__(self, app: ASGIApp, token: str, refusal: Callable[[Request, RequestError], ASGIApp]) -> None:
        self._app = app
        self._token = token.encode()
        self._refusal = refusal
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        # Clients differ in whether the base URL includes the version.
        path: str = scope["path"]
        while path.startswith("/v1/"):
            path = path.removeprefix("/v1")
        scope = {**scope, "path": f"/v1{path}", "raw_path": f"/v1{path}".encode()}
        request = Request(scope)
        try:
            self._check(request)
        except RequestError as error:
            await self._refusal(request, error)(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def _check(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(presented.encode("latin-1", "replace"), self._token):
            raise RequestError(HTTPStatus.UNAUTHORIZED, "the token does not belong to this task")
        prove(request, "run")
        check_length(request)
        if self._running >= MOST_REQUESTS:
            message = f"{MOST_REQUESTS} requests are in progress: try again"
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, {"Retry-After": "1"})


@contextmanager
def token_variable(prefix: str, value: str) -> Generator[str]:
    """Set an environment variable of a unique name in this process temporarily, for libraries that read a run's token
    only there."""
    name = f"{prefix}{secrets.token_hex(8)}"
    os.environ[name] = value
    try:
        yield name
    finally:
        del os.environ[name]
