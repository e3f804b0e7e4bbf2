"""The gate of an endpoint: authentication and concurrency."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from recipes.language.listening.limits import check_length
from recipes.language.listening.request_error import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# More than one agent needs; requests beyond it are rejected temporarily.
MOST_REQUESTS: Final = 128


class TokenGate:
    """Looks at the head of each request before anything else of it is read.

    Args:
        app: answers requests that may pass.
        token: the token of the run.
        refusal: returns the answer to a request that may not.
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
        check_length(request)
        if self._running >= MOST_REQUESTS:
            message = f"{MOST_REQUESTS} requests are in progress: try again"
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, {"Retry-After": "1"})
