"""Promises of results. Requests and outcomes are stored before a client is told."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from recipes.language.loopback_server import RequestError
from recipes.serve.service.state_file import DROPPED, StateFile

# Results are kept for clients that lost the response. Beyond these bounds, results are dropped a while after they were
# fetched, or after a longer while if they never were.
_KEPT: Final = 2000
_KEPT_BYTES: Final = 256 << 20
# Beyond this multiple of the bounds, the oldest results of the tenant with the most are dropped in any case.
_FOR_NOW: Final = 4
_FETCHED_SECONDS: Final = 60.0
_UNFETCHED_SECONDS: Final = 600.0


class RequestResult(NamedTuple):
    """A result: a JSON object, or the bytes of a protobuf message."""

    content: dict[str, Any] | bytes


class RequestFailure(NamedTuple):
    """The reason why there is no result, and whether user or server is at fault."""

    message: str
    category: Literal["user", "server"] = "user"


Outcome: TypeAlias = RequestResult | RequestFailure


class RequestKey(NamedTuple):
    """The name of a request.

    Attributes:
        kind: `model` creates a model, `request` is sent to a model, `sample` to a sampler.
        owner: the id of the model or sampler.
        number: the number among the owner's requests; 0 for the one that creates a model.
    """

    kind: Literal["model", "request", "sample"]
    owner: str
    number: int = 0


class Promise:
    """The result of a request that is answered later.

    Attributes:
        request_id: the id by which the client asks for the result.
        tenant: the tenant that owns the promise.
        session_id: the id of the session of the request.
        answer: the immediate response to the request.
        outcome: the outcome; None until it exists.
        size: the bytes of the request, in memory until it is done.
    """

    def __init__(
        self,
        request_id: str,
        tenant: str,
        session_id: str,
        answer: dict[str, Any],
        ledger: Ledger | None = None,
        outcome: Outcome | None = None,
        size: int = 0,
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.session_id = session_id
        self.answer = {"request_id": request_id, **answer}
        self.outcome = outcome
        self.size = size
        self._ledger = ledger
        self._done = asyncio.Event()

    def settle(self, outcome: Outcome) -> None:
        """Store and set the outcome; the first one stays.

        Raises:
            RunError: the state file cannot be written.
        """
        if self.outcome is None:
            if self._ledger is not None:
                self._ledger.keep(self, outcome)
            self.outcome = outcome
            self._done.set()

    async def wait(self, seconds: float) -> Outcome | None:
        """Wait for the outcome; return None if it does not exist in time."""
        if self.outcome is None:
            try:
                await asyncio.wait_for(self._done.wait(), seconds)
            except TimeoutError:
                return None
        if self._ledger is not None:
            self._ledger.fetched(self.request_id)
        return self.outcome


class StoredRequest(NamedTuple):
    """A request of an earlier start.

    Attributes:
        promise: the promise of the request, with the outcome if there is one.
        key: the name of the request.
        route: the route of the request.
        fields: the fields of the request.
        body: the part of the request that is not JSON.
    """

    promise: Promise
    key: RequestKey
    route: str
    fields: dict[str, Any]
    body: bytes


class Ledger:
    """All requests by id, and by name, so that a request that is sent again is recognized.

    Args:
        file: the file of the requests.
        boot: the id of this start of the server, a part of every id.

    Attributes:
        resumed: the promise of a request of an earlier start while it is repeated, which `promise` returns next.

    Raises:
        RunError: the file cannot be read.
    """

    def __init__(self, file: StateFile, boot: str) -> None:
        self.file = file
        self._boot = boot
        self.resumed: Promise | None = None
        self._open: dict[str, Promise] = {}
        self._fetched: dict[str, float] = {}
        # The numbers and bytes of results, by tenant.
        self._counts, self._bytes = Counter[str](), Counter[str]()
        self._count()

    def earlier(self, key: RequestKey, digest: bytes) -> Promise | None:
        """Return the promise of a request that was sent before; None: it is new.

        Args:
            key: the name of the request.
            digest: the digest of the request's content.

        Raises:
            RequestError: another request had this name, or the result was dropped.
        """
        query = "SELECT request, digest, state FROM requests WHERE kind = ? AND owner = ? AND number = ?"
        rows = self.file.rows(query, *key) if self.resumed is None else ()
        for request_id, before, state in rows:
            if before != digest:
                raise RequestError(
                    HTTPStatus.UNPROCESSABLE_ENTITY,
                    f"request {key.number} of `{key.owner}` is another one, which was sent before: number requests one"
                    " by one",
                )
            if state == DROPPED:
                raise gone(f"request {key.number} of `{key.owner}` was answered before, and its result was dropped")
            return self._open.get(request_id) or self._stored(request_id).promise
        return None

    def promise(
        self,
        tenant: str,
        session_id: str,
        key: RequestKey,
        digest: bytes,
        route: str,
        fields: Mapping[str, Any],
        body: bytes = b"",
        answer: dict[str, Any] | None = None,
    ) -> Promise:
        """Store a request and return its promise; return `resumed` if set.

        Args:
            tenant: the tenant of the request.
            session_id: the id of the request's session.
            key, digest: see `earlier`.
            route: the route of the request.
            fields: the fields of the request.
            body: the part of the request that is not JSON.
            answer: the immediate response, besides the id.

        Raises:
            RunError: the state file cannot be written.
        """
        resumed, self.resumed = self.resumed, None
        if resumed is not None:
            return resumed
        request_id, written = f"{self._boot}-{secrets.token_hex(12)}", json.dumps(dict(fields))
        values = (request_id, tenant, session_id, *key, digest, route, written, json.dumps(answer or {}))
        with self.file.writing() as database:
            database.execute(
                "INSERT INTO requests (request, tenant, session, kind, owner, number, digest, route, fields, answer)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            if body:
                database.execute("INSERT INTO bodies VALUES (?, ?)", (request_id, body))
        size = len(written) + len(body)
        made = self._open[request_id] = Promise(request_id, tenant, session_id, answer or {}, self, size=size)
        return made

    def requests(self, session_id: str) -> Iterator[StoredRequest]:
        """Yield the requests of a session of an earlier start, in order of arrival.

        Raises:
            RunError: the requests cannot be read.
            ValueError: a request is damaged.
        """
        query = "SELECT request FROM requests WHERE session = ? ORDER BY place"
        for (request_id,) in self.file.rows(query, session_id):
            stored = self._stored(request_id)
            if stored.promise.outcome is None:
                self._open[request_id] = stored.promise
            yield stored

    def _stored(self, request_id: str) -> StoredRequest:
        query = (
            "SELECT tenant, session, answer, state, outcome, kind, owner, number, route, fields, coalesce(body, x'')"
            " FROM requests LEFT JOIN bodies USING (request) WHERE request = ?"
        )
        tenant, session, answer, state, outcome, *key, route, fields, body = self.file.rows(query, request_id)[0]
        size = len(fields) + len(body)
        made = Promise(request_id, tenant, session, json.loads(answer), self, _outcome_of(state, outcome), size)
        return StoredRequest(made, RequestKey(*key), route, json.loads(fields), body)

    def find(self, tenant: str, request_id: str) -> Promise:
        """Return the promise with an id.

        Raises:
            RequestError: the tenant has no such promise, or its result was dropped.
        """
        made = self._open.get(request_id)
        if made is None and request_id.isascii():
            # Another tenant's request is treated as nonexistent.
            query = "SELECT request FROM requests WHERE request = ? AND tenant = ? AND drop_after IS NOT NULL"
            made = next((self._stored(name).promise for (name,) in self.file.rows(query, request_id, tenant)), None)
        if made is None or made.tenant != tenant:
            raise gone("there is no result of this request any more; send the request again")
        return made

    def end_session(self, session_id: str, why: str) -> None:
        """Settle all open promises of a session as failed."""
        for request_id in self.open_requests(session_id):
            self._open[request_id].settle(RequestFailure(why))

    def pending(self, tenant: str) -> tuple[int, int]:
        """Return the number of open promises of a tenant, and the bytes of their requests."""
        sizes = [made.size for made in self._open.values() if made.tenant == tenant]
        return len(sizes), sum(sizes)

    def open_requests(self, session_id: str) -> set[str]:
        """Return the ids of the open promises of a session."""
        return {made.request_id for made in self._open.values() if made.session_id == session_id}

    # Results

    def keep(self, promise: Promise, outcome: Outcome) -> None:
        """Store the outcome of an open promise, and drop old results.

        Raises:
            RunError: the outcome cannot be stored.
        """
        state, written = _written(outcome)
        drop_after, fetched = time.time() + _UNFETCHED_SECONDS, list(self._fetched.items())
        with self.file.writing() as database:
            database.execute(
                "UPDATE requests SET state = ?, outcome = ?, size = ?, drop_after = ? WHERE request = ?",
                (state, written, len(written), drop_after, promise.request_id),
            )
            database.executemany(
                "UPDATE requests SET drop_after = min(drop_after, ?2) WHERE request = ?1 AND drop_after IS NOT NULL",
                fetched,
            )
        self._fetched.clear()
        del self._open[promise.request_id]
        self._counts[promise.tenant] += 1
        self._bytes[promise.tenant] += len(written)
        self._make_room()

    def fetched(self, request_id: str) -> None:
        """Record that a client fetched a result; stored with the next outcome."""
        self._fetched.setdefault(request_id, time.time() + _FETCHED_SECONDS)

    def _make_room(self) -> None:
        while self._is_beyond(1) and self._drop_oldest("drop_after <= ?", time.time()):
            pass
        while self._is_beyond(_FOR_NOW):
            amounts = self._bytes if self._bytes.total() > _FOR_NOW * _KEPT_BYTES else self._counts
            if not self._drop_oldest("tenant = ?", amounts.most_common(1)[0][0]):
                # The file has fewer results than were counted.
                self._count()
                return

    def _count(self) -> None:
        """Count the results in the file."""
        self._counts.clear()
        self._bytes.clear()
        query = "SELECT tenant, count(*), sum(size) FROM requests WHERE drop_after IS NOT NULL GROUP BY tenant"
        for tenant, count, size in self.file.rows(query):
            self._counts[tenant], self._bytes[tenant] = count, size

    def _is_beyond(self, times: int) -> bool:
        return self._counts.total() > times * _KEPT or self._bytes.total() > times * _KEPT_BYTES

    def _drop_oldest(self, condition: str, value: Any) -> bool:
        """Drop the result that meets a condition and expires first; return whether there was one."""
        rows = self.file.rows(
            f"SELECT request, tenant, size FROM requests WHERE drop_after IS NOT NULL AND {condition}"
            " ORDER BY drop_after, place LIMIT 1",
            value,
        )
        for request_id, tenant, size in rows:
            with self.file.writing() as database:
                # Keep requests after a model's point, which a later start repeats.
                database.execute(
                    "DELETE FROM requests WHERE request = ? AND (kind = 'sample'"
                    " OR session NOT IN (SELECT session FROM sessions)"
                    " OR (kind = 'request' AND number <= (SELECT number FROM points WHERE model = owner)))",
                    (request_id,),
                )
                database.execute(
                    "UPDATE requests SET state = ?, drop_after = NULL, outcome = x'' WHERE request = ?",
                    (DROPPED, request_id),
                )
            self._counts[tenant] -= 1
            self._bytes[tenant] -= size
        return bool(rows)


def digest_of(fields: Mapping[str, Any]) -> bytes:
    """Return the digest of the fields of a request."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def gone(message: str) -> RequestError:
    """Return the error for something that no longer exists."""
    return RequestError(HTTPStatus.GONE, message)


def _written(outcome: Outcome) -> tuple[str, bytes]:
    """Return the state of a settled request, and its outcome as stored."""
    if isinstance(outcome, RequestFailure):
        return "failed", json.dumps(outcome).encode()
    if isinstance(outcome.content, bytes):
        return "bytes", outcome.content
    return "object", json.dumps(outcome.content).encode()


def _outcome_of(state: str, written: bytes) -> Outcome | None:
    """Return the outcome that `_written` encoded; None: there is none yet.

    Raises:
        ValueError: the outcome is damaged.
    """
    match state:
        case "open":
            return None
        case "failed":
            return RequestFailure(*json.loads(written))
        case "bytes":
            return RequestResult(written)
        case "object":
            return RequestResult(json.loads(written))
        case _:
            return RequestResult({})
