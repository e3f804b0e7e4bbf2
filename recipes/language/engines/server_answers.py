"""A client of an HTTP server that speaks JSON, with limits, retries and errors that mask secrets, and the validation of
the answers that it gives, before training.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Final, cast

import httpx

from recipes.language.answers.sequences import FinishReason, Sequence
from recipes.language.engines.engine import Answer, EngineAnswerError, StopTexts
from rlinf_core import RLinfError
from rlinf_core.foreign.budget import Budget, OverBudgetError, json_size
from rlinf_core.foreign.strict_json import load_json

# Status codes of a server that is starting, overloaded or restarting.
_AGAIN: Final = frozenset((408, 425, 429, 500, 502, 503, 504))
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_MOST_BYTES: Final = 1 << 28
_SHOWN: Final = 300


class ServerError(RLinfError):
    """A server's refusal, or its failure to answer."""


class ServerUnavailableError(ServerError):
    """A failure of a server that is down, overloaded or unreachable; the request is not at fault."""


class _TooLong(Exception):  # noqa: N818 - never leaves this module
    """A response beyond the size limit."""


class JsonServer:
    """An HTTP client for JSON requests, run in a separate thread until `close`.

    Args:
        url: `http://host:port` or `https://host`, optionally with a path.
        token: the token, sent as `Authorization: Bearer`; "": none.
        token_env: the environment variable of the token, for errors.
        timeout: the time limit of a request with its retries, in seconds.
        retries: the number of retries of a request that could not be sent, or got a temporary error.
        most: the maximum number of concurrent requests; time spent waiting does not count.
    """

    def __init__(
        self, url: str, *, token: str = "", token_env: str = "", timeout: float, retries: int, most: int = 1
    ) -> None:
        self._url = url.rstrip("/")
        self._token, self._token_env = token, token_env
        self._timeout, self._retries = timeout, retries
        # A few compressed bytes could expand to gigabytes.
        plain = {"Accept-Encoding": "identity"}
        headers = {"Accept": "application/json", "Content-Type": "application/json", **plain}
        self._client = httpx.AsyncClient(
            headers=headers | ({"Authorization": f"Bearer {token}"} if token else {}),
            # Trust the system's certificates, not the library's list.
            verify=ssl.create_default_context(),
            timeout=None,
            trust_env=False,
            # A server may close a kept connection just when the next request begins.
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._slots = asyncio.Semaphore(most)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlinf-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel all requests, and end the thread."""
        if self._thread.is_alive():
            self._run(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def get(self, path: str) -> Any:
        """Return the response to a GET request; see `post`."""
        return self._run(self._request("GET", path, None)).result()

    def post(self, path: str, body: Any) -> Any:
        """Return the response to a POST request; None if it is empty.

        Raises:
            ServerError: the server does not answer in time, refuses, or answers with anything but JSON.
        """
        return self.submit(path, body).result()

    def submit(self, path: str, body: Any) -> Future[Any]:
        """Start a POST request; cancelling it closes the connection, at which the server stops working on it."""
        return self._run(self._request("POST", path, json.dumps(body).encode()))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: bytes | None) -> Any:
        async with self._slots:
            attempts = 0
            try:
                async with asyncio.timeout(self._timeout):
                    pause = _FIRST_PAUSE
                    for attempts in range(1, self._retries + 2):
                        last = attempts > self._retries
                        wait = 0.0
                        try:
                            status, text, wait = await self._once(method, path, body)
                        except httpx.TransportError as error:
                            if last:
                                raise self._unreachable(path, error, attempts) from None
                        else:
                            if status not in _AGAIN or last:
                                return self._answer(path, status, text, attempts)
                        await asyncio.sleep(min(max(pause, wait), _LONGEST_PAUSE))
                        pause *= 2
            except TimeoutError:
                raise ServerUnavailableError(
                    f"the server did not respond within {self._timeout:g} s",
                    where=f"{self._url}{path}",
                    why=f"this was attempt {max(attempts, 1)}",
                    help="`rollout.engine_options.timeout` is the time limit of one request",
                ) from None
            except _TooLong:
                message = f"the server's response exceeds {_MOST_BYTES} bytes"
                raise ServerError(message, where=f"{self._url}{path}") from None
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes, float]:
        """Return status, content, and the retry delay requested by the server, in seconds."""
        async with self._client.stream(method, self._url + path, content=body) as answer:
            if answer.headers.get("content-encoding", "identity").lower() != "identity":
                message = "the server's response is compressed, which was not requested"
                raise ServerError(message, where=f"{self._url}{path}", help="have what is between leave it as it is")
            text = bytearray()
            async for part in answer.aiter_raw():
                text += part
                if len(text) > _MOST_BYTES:
                    raise _TooLong
            after = answer.headers.get("retry-after", "")
            return answer.status_code, bytes(text), float(after) if after.isdigit() else 0.0

    def _answer(self, path: str, status: int, text: bytes, attempts: int) -> Any:
        where = f"{self._url}{path}"
        if status in (401, 403):
            named = f"that of `{self._token_env}`" if self._token else "none was sent"
            raise ServerError(
                "the server rejects the token",
                where=where,
                why=f"status {status}; the token is {named}" if self._token else f"status {status}; {named}",
                help="name the environment variable that holds it in `rollout.engine_options.token_env`",
            )
        if status in _AGAIN:
            message = f"the server answers with status {status}, after {attempts} attempts"
            raise ServerUnavailableError(message, where=where, why=self._shown(text))
        if status >= 300:
            raise ServerError(f"the server responds with status {status}", where=where, why=self._shown(text))
        if not text.strip():
            return None
        try:
            Budget(4 * _MOST_BYTES, "a response").take(json_size(text))
            return load_json(text, non_finite=True)
        except OverBudgetError as error:
            raise ServerError(f"the server's response {error}", where=where) from None
        except ValueError:
            raise ServerUnavailableError(
                "the server's response is not JSON", where=where, why=self._shown(text)
            ) from None

    def _shown(self, text: bytes) -> str:
        """Return the start of a server's response, with the token masked."""
        said = " ".join(text[: 4 * _SHOWN].decode("utf-8", "replace").split())
        if self._token:
            said = said.replace(self._token, "***")
        return said[:_SHOWN]

    def _unreachable(self, path: str, error: Exception, attempts: int) -> ServerUnavailableError:
        tries = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        why = str(error) or type(error).__name__
        return ServerUnavailableError(
            f"the server cannot be reached, after {tries}", where=f"{self._url}{path}", why=why
        )


# A log-probability up to this much above 0 is rounding.
_ROUNDING: Final = 1e-3
_SHOWN_REASON: Final = 40
_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    # vLLM's reasons for requests that it gave up.
    "abort": "aborted",
    "error": "aborted",
}


def checked_together(
    checks: Iterable[tuple[Answer, Callable[[], Sequence]]], *, worked: bool = False
) -> list[Sequence]:
    """Return answers that arrived together; an invalid answer fails without affecting the others.

    Args:
        checks: the requested answers, each with a function that validates it.
        worked: whether the engine has given valid answers before.

    Raises:
        EngineAnswerError: a setting is wrong, or no answer was ever valid.
    """
    sequences: list[Sequence] = []
    wrong: EngineAnswerError | None = None
    for answer, check in checks:
        try:
            sequences.append(check())
        except EngineAnswerError as error:
            if error.help:
                raise
            wrong = error
            sequences.append(answer.sequence(failure=f"{error.message}: {error.why}"))
    if wrong is not None and not worked and all(sequence.failed for sequence in sequences):
        raise wrong
    return sequences


def checked_sequence(
    answer: Answer,
    tokens: Any,
    logprobs: Any,
    reason: Any,
    version: int,
    stop_texts: StopTexts | None,
    engine: str,
    vocabulary: int,
) -> Sequence:
    """Validate an external engine's answer and convert it; tokens after a stop text are cut off.

    Args:
        answer: the requested answer.
        tokens, logprobs: the engine's tokens and log-probabilities.
        reason: the engine's finish reason, `stop`, `length`, `abort` or `error`.
        version: the version of the engine's weights.
        stop_texts: a finder of stop texts.
        engine: the engine's name in errors.
        vocabulary: the size of the model's vocabulary; 0: unknown.

    Raises:
        EngineAnswerError: there are too few or too many tokens, or values are not token ids or log-probabilities.
    """
    request, params = answer.request, answer.request.params

    def wrong(why: str, help: str = "") -> EngineAnswerError:
        return EngineAnswerError(
            f"{engine} returned an unusable answer to request `{request.request_id}`",
            why=why,
            help=help,
        )

    if not isinstance(tokens, list) or not all(
        type(token) is int and token >= 0 for token in cast("list[Any]", tokens)
    ):
        raise wrong("its tokens are not a list of integers", "the engine must return token ids")
    tokens = cast("list[int]", tokens)
    if vocabulary and tokens and max(tokens) >= vocabulary:
        raise wrong(
            f"it has the token {max(tokens)}; the model's tokens are 0 to {vocabulary - 1}",
            "the engine must serve the model of `actor.model.model_path`",
        )
    if not isinstance(logprobs, list) or len(cast("list[Any]", logprobs)) != len(tokens):
        count = len(cast("list[Any]", logprobs)) if isinstance(logprobs, list) else "no"
        raise wrong(f"{len(tokens)} tokens have {count} log-probabilities")
    logprobs = cast("list[Any]", logprobs)
    if not all(type(logprob) in (int, float) and -math.inf < logprob <= _ROUNDING for logprob in logprobs):
        raise wrong("a log-probability is missing, above 0, or not a finite number")
    if not isinstance(reason, str) or reason not in _REASONS:
        raise wrong(f"its finish reason is {repr(reason)[:_SHOWN_REASON]}, not stop or length")
    if len(tokens) > params.max_new_tokens:
        raise wrong(f"it has {len(tokens)} tokens; at most {params.max_new_tokens} were requested")
    finish = _REASONS[reason]
    if params.stop and stop_texts is not None:
        for count in range(max(1, params.min_new_tokens), len(tokens) + 1):
            if stop_texts.ended(tokens[:count], params.stop):
                tokens, logprobs, finish = tokens[:count], logprobs[:count], "stop"
                break
    least = {"stop": max(1, params.min_new_tokens), "length": params.max_new_tokens, "aborted": 0}[finish]
    if len(tokens) < least:
        raise wrong(
            f"it ended ({finish}) after {len(tokens)} tokens; at least {least} were requested",
            "the engine's own sequence limit may be lower than `runner.seq_length`" if finish == "length" else "",
        )
    failure = f"{engine} ended it for the reason {reason!r}" if finish == "aborted" else ""
    return answer.sequence(tuple(tokens), tuple(map(float, logprobs)), (version,) * len(tokens), finish, failure)
