"""Promises of results, and the order of a model's requests. Both outlive the server by its journal."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from recipes.language.listening.request_error import RequestError
from recipes.serve.service.journal import Journal, JournalEntry

# A client numbers its requests one by one, and sends at most that many before an earlier one has arrived.
_FURTHEST: Final = 10_000
# Results are kept for clients whose answer was lost. Beyond these bounds those make room that were fetched a while ago,
# or never.
_KEPT: Final = 2000
_KEPT_BYTES: Final = 256 << 20
# Beyond that many times these bounds, the oldest of the tenant with the most make room in any case.
_FOR_NOW: Final = 4
_FETCHED_SECONDS: Final = 60.0
_UNFETCHED_SECONDS: Final = 600.0


class RequestResult(NamedTuple):
    """A result: a JSON object, or the bytes of a protobuf message."""

    content: dict[str, Any] | bytes

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return len(self.content) if isinstance(self.content, bytes) else 0


class RequestFailure(NamedTuple):
    """Why there is no result, and whose fault that is."""

    message: str
    category: Literal["user", "server"] = "user"


Outcome: TypeAlias = RequestResult | RequestFailure


class Promise:
    """The result of a request that is not answered at once.

    Attributes:
        request_id: the id by which the client asks for it.
        tenant: the tenant that owns it.
        session_id: the id of the session that asked.
        answer: what the client was answered at first.
        outcome: None as long as it does not exist.
        drop_after: when it may make room for others, by the monotonic clock.
        request_size: bytes of the request that are in memory until it is done.
    """

    def __init__(
        self,
        request_id: str,
        tenant: str,
        session_id: str,
        answer: dict[str, Any],
        on_settled: Callable[[Promise, bool], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.session_id = session_id
        self.answer = {"request_id": request_id, **answer}
        self.outcome: Outcome | None = None
        self.drop_after = math.inf
        self.request_size = 0
        self._on_settled = on_settled
        self._done = asyncio.Event()

    def settle(self, outcome: Outcome, *, written: bool = False) -> None:
        """Set the outcome; the first one stays.

        Args:
            outcome: the outcome of the request.
            written: whether it stands in the journal already.

        Raises:
            RunError: it cannot be written there.
        """
        if self.outcome is None:
            self.outcome, self.drop_after = outcome, time.monotonic() + _UNFETCHED_SECONDS
            self._done.set()
            if self._on_settled is not None:
                self._on_settled(self, written)

    async def wait(self, seconds: float) -> Outcome | None:
        """Return the outcome; None where it does not exist in time."""
        try:
            await asyncio.wait_for(self._done.wait(), seconds)
        except TimeoutError:
            return None
        self.drop_after = min(self.drop_after, time.monotonic() + _FETCHED_SECONDS)
        return self.outcome


class _Claim(NamedTuple):
    promise: Promise
    digest: bytes


class RequestRecord(NamedTuple):
    """The record of a request, so that a later start can serve it.

    Attributes:
        route: the route that it came by.
        fields: the fields of the request.
        body: what is not JSON.
    """

    route: str
    fields: Mapping[str, Any] = MappingProxyType({})
    body: bytes = b""


class Earlier(NamedTuple):
    """A request of an earlier start, which is taken again.

    Attributes:
        request_id, answer: the id and the answer that the client knows.
        outcome: None where there was none yet.
    """

    request_id: str
    answer: dict[str, Any]
    outcome: Outcome | None


class Ledger:
    """All promises by their ids, and by what names a request, so that one that is sent again is the same.

    Args:
        boot: the id of this start of the server; part of every id.
        journal: where requests and outcomes are written.

    Attributes:
        earlier_request: the request of an earlier start, while it is taken again: the next promise is for it.
    """

    def __init__(self, boot: str, journal: Journal) -> None:
        self._boot = boot
        self._journal = journal
        self.earlier_request: Earlier | None = None
        self._promises: dict[str, Promise] = {}
        self._claims: dict[Hashable, _Claim] = {}
        self._keys: dict[str, Hashable] = {}
        self._settled: deque[Promise] = deque()
        self._bytes = 0

    def earlier(self, tenant: str, key: Hashable, digest: bytes) -> Promise | None:
        """Return the promise of the same request, which is sent again; None: it is new.

        Args:
            tenant: who asks.
            key: names the request among those of the tenant.
            digest: the digest of its content.

        Raises:
            RequestError: another request had this name.
        """
        claim = self._claims.get((tenant, key))
        if claim is None:
            return None
        if claim.digest != digest:
            raise RequestError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"{key} names another request, which was sent before: number requests one by one",
            )
        return claim.promise

    def promise(
        self,
        tenant: str,
        session_id: str,
        key: Hashable,
        digest: bytes,
        record: RequestRecord,
        answer: dict[str, Any] | None = None,
    ) -> Promise:
        """Return a new promise, once its request is written down; or that of the request that is taken again.

        Args:
            tenant: who asks.
            session_id: the id of the session that it belongs to.
            key, digest: see `earlier`.
            record: the record of the request.
            answer: what the client is answered at first, besides the id.

        Raises:
            RunError: it cannot be written down.
        """
        taken, self.earlier_request = self.earlier_request, None
        if taken is not None:
            return self._again(tenant, session_id, key, digest, taken)
        request_id = f"{self._boot}-{secrets.token_hex(12)}"
        made = Promise(request_id, tenant, session_id, answer or {}, self._take)
        written = {
            "request_id": request_id,
            "key": key,
            "digest": digest.hex(),
            "answer": answer or {},
            "route": record.route,
            "fields": dict(record.fields),
        }
        made.request_size = self._journal.append(session_id, JournalEntry("request", written, record.body))
        self._claim(made, key, digest)
        return made

    def _again(self, tenant: str, session_id: str, key: Hashable, digest: bytes, taken: Earlier) -> Promise:
        made = Promise(taken.request_id, tenant, session_id, taken.answer, self._take)
        self._claim(made, key, digest)
        if taken.outcome is not None:
            made.settle(taken.outcome, written=True)
        return made

    def _claim(self, made: Promise, key: Hashable, digest: bytes) -> None:
        self._promises[made.request_id] = made
        self._claims[made.tenant, key] = _Claim(made, digest)
        self._keys[made.request_id] = (made.tenant, key)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    def find(self, tenant: str, request_id: str) -> Promise:
        """Return the promise with an id.

        Raises:
            RequestError: the tenant has none of that id, or none any more.
        """
        made = self._promises.get(request_id)
        # Another tenant's is answered as one that never was.
        if made is None or made.tenant != tenant:
            raise gone("there is no result of this request any more; send the request again")
        return made

    def pending(self, tenant: str) -> tuple[int, int]:
        """Return how many promises of a tenant are open, and the bytes of their requests."""
        sizes = [made.request_size for made in self._promises.values() if made.tenant == tenant and not made.outcome]
        return len(sizes), sum(sizes)

    def open_requests(self, session_id: str) -> set[str]:
        """Return the ids of the open promises of a session."""
        made = self._promises.values()
        return {one.request_id for one in made if one.session_id == session_id and one.outcome is None}

    def end_session(self, session_id: str, why: str) -> None:
        """Settle all open promises of a session as failed."""
        for made in self._promises.values():
            if made.session_id == session_id:
                made.settle(RequestFailure(why))

    def _take(self, settled: Promise, written: bool) -> None:
        """Write down and keep a promise that has been settled, and drop old ones."""
        outcome = settled.outcome
        if outcome is not None and not written:
            self._journal.append(settled.session_id, outcome_entry(settled.request_id, outcome))
        self._settled.append(settled)
        self._bytes += _size(settled)
        while self._is_beyond(1) and time.monotonic() >= self._settled[0].drop_after:
            self._drop(self._settled[0])
        while self._is_beyond(_FOR_NOW):
            counts, sizes = Counter[str](), Counter[str]()
            for kept in self._settled:
                counts[kept.tenant] += 1
                sizes[kept.tenant] += _size(kept)
            ((most, _),) = (sizes if self._bytes > _FOR_NOW * _KEPT_BYTES else counts).most_common(1)
            self._drop(next(kept for kept in self._settled if kept.tenant == most))

    def _is_beyond(self, times: int) -> bool:
        return len(self._settled) > times * _KEPT or self._bytes > times * _KEPT_BYTES

    def _drop(self, old: Promise) -> None:
        self._settled.remove(old)
        self._bytes -= _size(old)
        del self._promises[old.request_id], self._claims[self._keys.pop(old.request_id)]


def outcome_entry(request_id: str, outcome: Outcome) -> JournalEntry:
    """Return what is written down of an outcome."""
    fields: dict[str, Any] = {"request_id": request_id}
    if isinstance(outcome, RequestFailure):
        return JournalEntry("outcome", {**fields, "failure": [outcome.message, outcome.category]})
    if isinstance(outcome.content, bytes):
        return JournalEntry("outcome", fields, outcome.content)
    return JournalEntry("outcome", {**fields, "content": outcome.content})


def read_outcome(entry: JournalEntry) -> Outcome:
    """Return the outcome of `outcome_entry`."""
    if "failure" in entry.fields:
        return RequestFailure(*entry.fields["failure"])
    return RequestResult(entry.fields.get("content", entry.body))


def _size(promise: Promise) -> int:
    return promise.outcome.size if isinstance(promise.outcome, RequestResult) else 0


@dataclass(slots=True)
class Call:
    """A request to the workers that has its place in the order of a model's requests.

    Attributes:
        promise: the promise of its result.
        act: returns the result, once it is its turn.
        again: whether a model of this start lacks what it did in an earlier one, so that it is done again.
    """

    promise: Promise
    act: Callable[[], Any]
    again: bool = False


@dataclass(slots=True)
class RequestOrder:
    """The requests of a model, in the order of their numbers. A number that is missing holds up those after it.

    Attributes:
        next: number that is awaited.
        ready: requests whose turn may come.
    """

    next: int = 1
    ready: deque[Call] = field(default_factory=deque[Call])
    waiting: dict[int, Call] = field(default_factory=dict[int, Call])

    def check(self, seq_id: int) -> None:
        """Check the number of a new request.

        Raises:
            RequestError: it lies too far ahead, or was taken.
        """
        if seq_id > self.next + _FURTHEST:
            message = f"`seq_id` {seq_id} lies too far ahead: request {self.next} of this model has not arrived"
            raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, message)
        if seq_id < self.next:
            raise gone(f"request {seq_id} of this model was answered before, and its result was dropped")

    def put(self, seq_id: int, call: Call) -> None:
        """Take a request with a number of `check`."""
        self.waiting[seq_id] = call
        while self.next in self.waiting:
            self.ready.append(self.waiting.pop(self.next))
            self.next += 1


def gone(message: str) -> RequestError:
    """Return the error of something that was there and is no more."""
    return RequestError(HTTPStatus.GONE, message)
