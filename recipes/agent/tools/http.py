"""An HTTP tool restricted to listed hosts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Final, NamedTuple
from urllib.parse import urljoin

import httpx

from recipes.agent.config.allow_list import AllowList, UrlParts, parse_url
from recipes.agent.tools.tool import CallLost, Tool, ToolError, ToolUnavailable

_MOST_REDIRECTS: Final = 5
_KEEPS_METHOD: Final = (307, 308)
# Types of contents that are texts, besides `text/...`.
_TEXTS: Final = ("json", "xml", "javascript", "x-www-form-urlencoded", "yaml", "x-ndjson")
# Nobody is there; a server, or the way to it, breaks, which what it was asked may cause; and statuses that say so.
_NOBODY: Final = (httpx.ConnectError, httpx.ConnectTimeout)
_BREAKS: Final = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
_AWAY: Final = (429, 502, 503, 504)
_UNSEEN: Final = ("script", "style", "template", "noscript")


class HttpRequest(NamedTuple):
    """A request as a model writes it."""

    method: str
    url: str
    body: bytes | None


class Http(Tool):
    """Pages of listed hosts: GET and POST, as texts.

    Args:
        allow: the hosts, as in `agent.http.allow`.
        seconds: the time limit for one connection, and one read of it; time for the whole call is the caller's to
            limit.
        max_bytes: the maximum bytes of an answer; what comes after them is not read.
    """

    name = "http"

    def __init__(self, allow: Sequence[str], seconds: float, max_bytes: int) -> None:
        self.description = (
            "asks a server: GET and an URL, or POST and an URL with the body on the lines below; servers: "
            + ", ".join(allow)
        )
        self._allow = AllowList(allow)
        self._seconds = seconds
        self._max_bytes = max_bytes
        # The certificates that the system trusts, and not a list of the library's.
        self._tls = ssl.create_default_context()

    async def call(self, argument: str) -> str:
        """See `Tool`. Cancelled, it leaves no connection."""
        request = parse_request(argument)
        # No proxy and no cookies; a redirect is looked at before it is followed.
        session = httpx.AsyncClient(verify=self._tls, timeout=self._seconds, trust_env=False, follow_redirects=False)
        async with session as client:
            for _ in range(_MOST_REDIRECTS + 1):
                try:
                    answer = await self._answer(client, request)
                except _NOBODY as error:
                    raise ToolUnavailable(f"{request.url} does not answer: {_words(error)}") from None
                except _BREAKS as error:
                    raise CallLost(f"{request.url} does not answer: {_words(error)}") from None
                except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                    raise ToolError(_words(error)) from None
                if isinstance(answer, str):
                    return answer
                request = answer
        raise ToolError(f"more than {_MOST_REDIRECTS} redirects")

    async def _answer(self, client: httpx.AsyncClient, request: HttpRequest) -> str | HttpRequest:
        """Return the text of an answer, or the request that it redirects to."""
        try:
            url = parse_url(request.url)
        except ValueError as error:
            raise ToolError(str(error)) from None
        if not self._allow.allows(url):
            raise ToolError(f"{url.scheme}://{url.host}:{url.port} is not an allowed server")
        *others, last = await self._addresses(url)
        for address in others:
            try:
                return await self._asked(client, request, url, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._asked(client, request, url, last)

    async def _addresses(self, url: UrlParts) -> list[str]:
        """Return the addresses of a host that may be reached, at least one."""
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                raise ToolUnavailable(f"cannot resolve the host {url.host} now: {error}") from None
            raise ToolError(f"cannot resolve the host {url.host}: {error}") from None
        addresses = [str(info[4][0]) for info in infos]
        reachable = [address for address in addresses if self._allow.reachable(address)]
        if not reachable:
            raise ToolError(f"{url.host} resolves to {addresses[0]}, a private address that is not listed")
        return reachable

    async def _asked(
        self, client: httpx.AsyncClient, request: HttpRequest, url: UrlParts, address: str
    ) -> str | HttpRequest:
        """Ask a host at an address that was checked, and not by its name, which may lead elsewhere a moment later."""
        where = f"[{address}]" if ":" in address else address
        async with client.stream(
            request.method,
            f"{url.scheme}://{where}:{url.port}{url.path}",
            content=request.body,
            headers=_headers(request, url),
            # TLS is held against the name.
            extensions={"sni_hostname": url.host},
        ) as response:
            target = response.headers.get("location")
            if response.has_redirect_location and target:
                return _redirected(request, response.status_code, urljoin(request.url, target))
            return await self._text(response)

    async def _text(self, response: httpx.Response) -> str:
        kind = response.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ToolError("the response is compressed, which was not requested")
        if not (kind.startswith("text/") or any(mark in kind for mark in _TEXTS)):
            raise ToolError(f"the response is {kind}, not text")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) >= self._max_bytes:
                break
        try:
            text = body[: self._max_bytes].decode(response.charset_encoding or "utf-8", "replace")
        except LookupError:
            text = body[: self._max_bytes].decode("utf-8", "replace")
        if kind == "text/html":
            text = page_text(text)
        if response.status_code in _AWAY:
            raise CallLost(f"{response.url} answers {response.status_code} {response.reason_phrase}".strip())
        if response.is_error:
            raise ToolError(f"{response.status_code} {response.reason_phrase}: {text}".strip(": \n"))
        return text


def _words(error: Exception) -> str:
    """Return the text of an error, preferring the operating system's message to the library's."""
    causes = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}" if causes is None or str(error) else f"{type(error).__name__}: {causes}"


def _headers(request: HttpRequest, url: UrlParts) -> dict[str, str]:
    host = f"[{url.host}]" if ":" in url.host else url.host
    headers = {
        "Host": f"{host}:{url.port}",
        "Accept-Encoding": "identity",
        "User-Agent": "rlinf",
        "Connection": "close",
    }
    if request.body is not None:
        headers["Content-Type"] = "application/json" if request.body[:1] in (b"{", b"[") else "text/plain"
    return headers


def _redirected(request: HttpRequest, status: int, url: str) -> HttpRequest:
    """Return the request that a redirect asks for."""
    return request._replace(url=url) if status in _KEEPS_METHOD else HttpRequest("GET", url, None)


def parse_request(text: str) -> HttpRequest:
    """Return the request that a model wrote; an URL alone is a GET.

    Raises:
        ToolError: it is not text.
    """
    line, _, body = text.strip().partition("\n")
    words = line.split()
    method, url = ("GET", *words) if len(words) == 1 else words if len(words) == 2 else ("", "")
    if method not in ("GET", "POST"):
        raise ToolError("write GET and a URL, or POST and a URL with the body on the lines below")
    return HttpRequest(method, url, body.strip("\n").encode() if method == "POST" else None)


class _PageText(HTMLParser):
    """Collects the visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in _UNSEEN

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in _UNSEEN and self._unseen > 0

    def handle_data(self, data: str) -> None:
        if not self._unseen and data.strip():
            self.texts.append(" ".join(data.split()))


def page_text(html: str) -> str:
    """Return the text of a page without its tags, a line for each piece."""
    parser = _PageText()
    parser.feed(html)
    parser.close()
    return "\n".join(parser.texts)
