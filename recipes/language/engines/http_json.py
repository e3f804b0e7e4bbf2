"""Requests to an HTTP server that speaks JSON: with limits, retries, and errors that keep secrets."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from typing import Any, Final
from urllib.parse import urlsplit

from rlinf_core import RLinfError

# Answers of a server that is starting, overloaded or restarted.
_AGAIN: Final = frozenset((408, 425, 429, 500, 502, 503, 504))
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_MOST_BYTES: Final = 1 << 28
_SHOWN: Final = 300


class ServerError(RLinfError):
    """A server that does not answer, or refuses."""


class CancelledError(Exception):
    """The request was given up by `Call.cancel`."""


class Call:
    """One request, which another thread may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Close the connection, which tells the server to stop."""
        self._cancelled.set()
        with self._lock:
            connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def use(self, connection: http.client.HTTPConnection) -> None:
        """Note the connection that is used, or raise where the request was given up."""
        with self._lock:
            self._connection = connection
        self.check()

    def release(self) -> None:
        """Forget the connection, which is about to be closed."""
        with self._lock:
            self._connection = None

    def check(self) -> None:
        """Raise where the request was given up."""
        if self._cancelled.is_set():
            raise CancelledError

    def pause(self, seconds: float) -> None:
        """Wait, or raise where the request was given up."""
        self._cancelled.wait(seconds)
        self.check()


class JsonServer:
    """A server by its address.

    Args:
        url: `http://host:port` or `https://host`, with a path or without.
        token: sent as `Authorization: Bearer`; none where it is empty.
        token_env: the environment variable that it came from, for errors.
        timeout: seconds that one request may take.
        retries: how often a request is tried again that could not be sent, or was answered by an error that passes.
    """

    def __init__(self, url: str, *, token: str = "", token_env: str = "", timeout: float, retries: int) -> None:
        self._url = url
        self._parts = urlsplit(url)
        self._token, self._token_env = token, token_env
        self._timeout, self._retries = timeout, retries

    def get(self, path: str) -> Any:
        """Return the answer to a GET request."""
        return self._request("GET", path, None, Call())

    def post(self, path: str, body: Any, call: Call | None = None) -> Any:
        """Return the answer to a POST request; None where it has no content.

        Raises:
            ServerError: the server does not answer in time, refuses, or answers with something that is not JSON.
            CancelledError: the call was cancelled.
        """
        return self._request("POST", path, json.dumps(body).encode(), call or Call())

    def _request(self, method: str, path: str, body: bytes | None, call: Call) -> Any:
        pause, deadline = _FIRST_PAUSE, time.monotonic() + self._timeout
        for attempt in range(self._retries + 1):
            try:
                status, text, wait = self._once(method, path, body, call, deadline)
            except (OSError, http.client.HTTPException) as error:
                call.check()
                timed_out = time.monotonic() >= deadline
                if attempt == self._retries or timed_out:
                    raise self._silent(path, error, attempt + 1, timed_out) from None
                wait = 0.0
            else:
                if status not in _AGAIN or attempt == self._retries:
                    return self._answer(path, status, text)
            call.pause(max(0.0, min(max(pause, wait), _LONGEST_PAUSE, deadline - time.monotonic())))
            pause *= 2
        raise AssertionError("unreachable")

    def _once(
        self, method: str, path: str, body: bytes | None, call: Call, deadline: float
    ) -> tuple[int, bytes, float]:
        """Return status, content, and the seconds that the server asks to wait."""
        parts, left = self._parts, max(0.1, deadline - time.monotonic())
        host, port = parts.hostname or "", parts.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=left, context=ssl.create_default_context())
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=left)
        )
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            call.check()
            connection.connect()
            call.use(connection)
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES + 1)
            # A server may still answer what was given up, and vLLM's does, with nothing.
            call.check()
            if answer.length and len(text) <= _MOST_BYTES:
                raise http.client.IncompleteRead(text, answer.length)
            after = answer.getheader("Retry-After") or ""
            return answer.status, text, float(after) if after.isdigit() else 0.0
        finally:
            call.release()
            connection.close()

    def _answer(self, path: str, status: int, text: bytes) -> Any:
        where = f"{self._url}{path}"
        if status in (401, 403):
            named = f"that of `{self._token_env}`" if self._token else "none was sent"
            raise ServerError(
                "the server refuses the token",
                where=where,
                why=f"status {status}; the token is {named}" if self._token else f"status {status}; {named}",
                help="name the environment variable that holds it in `rollout.server.token_env`",
            )
        if len(text) > _MOST_BYTES:
            raise ServerError(f"the server's answer is longer than {_MOST_BYTES} bytes", where=where)
        if status >= 300:
            raise ServerError(f"the server answers with status {status}", where=where, why=self._shown(text))
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except ValueError:
            raise ServerError("the server's answer is not JSON", where=where, why=self._shown(text)) from None

    def _shown(self, text: bytes) -> str:
        """Return the start of what a server says, without the token, should it repeat that."""
        said = " ".join(text[: 4 * _SHOWN].decode("utf-8", "replace").split())
        if self._token:
            said = said.replace(self._token, "***")
        return said[:_SHOWN]

    def _silent(self, path: str, error: Exception, attempts: int, timed_out: bool) -> ServerError:
        why = str(error) or type(error).__name__
        if timed_out or isinstance(error, TimeoutError):
            return ServerError(
                f"the server did not answer within {self._timeout:g} s",
                where=f"{self._url}{path}",
                why=why,
                help="`rollout.server.timeout` is the time of one request",
            )
        tries = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        return ServerError(f"the server cannot be reached, after {tries}", where=f"{self._url}{path}", why=why)
