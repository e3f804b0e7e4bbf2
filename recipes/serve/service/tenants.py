"""Tenants and their keys, sessions, models and samplers: what exists for whom."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from recipes.language.listening.request_error import RequestError
from recipes.serve.service.ledger import Promise, gone
from recipes.serve.values import AdapterSettings
from rlinf_core.errors import RunError
from rlinf_core.runners.storage.durable import write_whole

# The SDK takes keys of this form only.
KEY_PREFIX: Final = "tml-"
# A client numbers its requests one by one, and sends at most that many before an earlier one has arrived.
_FURTHEST: Final = 10_000


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


@dataclass(slots=True)
class ServedModel:
    """A model that is trained.

    Attributes:
        model_id: `SESSION:train:N`, also the name of its adapter at the workers.
        session: the session that it was created in.
        settings: the settings of its adapter; None until it is loaded.
        order: its requests.
        failed: why the last pass since the last step failed; empty: none did.
        reported: number of the last request whose outcome an earlier start of the server knew.
        steps: since the model was saved for later starts.
        done: number of the last request that was done; 0: none was.
        saved: number of the request after which the model was saved last; -1: it was not.
        unstepped: bytes of the passes since the last step, which a later start computes again.
        metadata: what the client wrote down.
    """

    model_id: str
    session: ClientSession
    settings: AdapterSettings | None
    order: RequestOrder = field(default_factory=RequestOrder)
    failed: str = ""
    reported: int = 0
    steps: int = 0
    done: int = 0
    saved: int = -1
    unstepped: int = 0
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Sampler:
    """The source of a client's samples: a snapshot, or the model as it is.

    Attributes:
        sampler_id: `SESSION:sample:N`.
        session: the session that it was created in.
        path: `tinker://` path of the snapshot, where it has a name.
        folder: the folder of the snapshot; None: the model as it is.
        used: when it was made or sampled from last, by the monotonic clock.
    """

    sampler_id: str
    session: ClientSession
    path: str | None
    folder: Path | None
    used: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class ClientSession:
    """A client's session; what was created in it ends with it.

    Attributes:
        session_id: the id of the session.
        tenant: the tenant that owns it.
        seen: when the client was heard of last, by the monotonic clock.
    """

    session_id: str
    tenant: str
    seen: float
    models: dict[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    samplers: dict[str, Sampler] = field(default_factory=dict[str, Sampler])

    def last_seen(self) -> str:
        """Return when the client was heard of last, in ISO format."""
        return datetime.fromtimestamp(time.time() - (time.monotonic() - self.seen), UTC).isoformat()


class Keys:
    """The keys of tenants, in files that only their owner can read.

    Args:
        folder: the folder of the files, one for each tenant; keys that exist are kept.
        tenants: names.

    Raises:
        RunError: a file cannot be read or written.
    """

    def __init__(self, folder: Path, tenants: Iterable[str]) -> None:
        self._digests: dict[str, bytes] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for tenant in tenants:
                file = folder / tenant
                if not file.exists():
                    write_whole(file, f"{KEY_PREFIX}{secrets.token_urlsafe(32)}\n", mode=0o600)
                self._digests[tenant] = _digest(file.read_text().strip())
        except OSError as error:
            raise RunError(f"the keys in `{folder}` cannot be read or written", why=str(error)) from error

    def tenant(self, key: str) -> str:
        """Return whose key it is.

        Raises:
            RequestError: nobody's.
        """
        shown = _digest(key)
        names = [name for name, digest in self._digests.items() if hmac.compare_digest(digest, shown)]
        if not names:
            raise RequestError(
                HTTPStatus.UNAUTHORIZED, "this server has no such API key: set TINKER_API_KEY as it printed"
            )
        return names[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


class Tenants:
    """All sessions, models and samplers. What belongs to another tenant does not exist.

    Args:
        boot: the id of this start of the server; part of every id.
        timeout: seconds without a sign of life after which a session ends.
        clock: the monotonic clock.
    """

    def __init__(self, boot: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._boot = boot
        self._timeout = timeout
        self._clock = clock
        self._sessions: dict[str, ClientSession] = {}

    def begin(self, tenant: str, session_id: str = "") -> ClientSession:
        """Return a new session, or that of an earlier start of the server, with its id."""
        session = ClientSession(session_id or f"{self._boot}-{secrets.token_hex(8)}", tenant, self._clock())
        self._sessions[session.session_id] = session
        return session

    def session(self, tenant: str, session_id: Any) -> ClientSession:
        """Return a session, of which the client is heard now.

        Raises:
            RequestError: the tenant has none of that id, or it has ended.
        """
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        # Another tenant's is answered as one that never was.
        if session is None or session.tenant != tenant:
            raise gone("there is no such session, or it has ended: create a new ServiceClient")
        session.seen = self._clock()
        return session

    def model(self, tenant: str, model_id: Any) -> ServedModel:
        """Return a model.

        Raises:
            RequestError: the tenant has none of that id, or it has ended.
        """
        session = self._session_of(tenant, model_id)
        if model_id not in session.models:
            raise _missing("model")
        return session.models[model_id]

    def sampler(self, tenant: str, sampler_id: Any) -> Sampler:
        """Return a sampler.

        Raises:
            RequestError: the tenant has none of that id, or it has ended.
        """
        session = self._session_of(tenant, sampler_id)
        if sampler_id not in session.samplers:
            raise _missing(
                "sampler, or newer snapshots took its place (`server.max_snapshots`): save under a name what is"
                " sampled from later"
            )
        return session.samplers[sampler_id]

    def sessions(self, tenant: str) -> int:
        """Return how many sessions a tenant has."""
        return sum(session.tenant == tenant for session in self._sessions.values())

    def all_sessions(self) -> list[ClientSession]:
        """Return the sessions of all tenants."""
        return list(self._sessions.values())

    def models(self, tenant: str) -> list[ServedModel]:
        """Return the models of a tenant."""
        sessions = (session for session in self._sessions.values() if session.tenant == tenant)
        return [model for session in sessions for model in session.models.values()]

    def busy(self) -> dict[str, list[ServedModel]]:
        """Return the models that have something to do, by tenant."""
        busy: dict[str, list[ServedModel]] = {}
        for session in self._sessions.values():
            for model in session.models.values():
                if model.order.ready:
                    busy.setdefault(session.tenant, []).append(model)
        return busy

    def silent(self) -> list[ClientSession]:
        """Return the sessions whose clients have not been heard of for too long."""
        now = self._clock()
        return [session for session in self._sessions.values() if now - session.seen > self._timeout]

    def end(self, session: ClientSession) -> None:
        """Forget a session and all in it."""
        self._sessions.pop(session.session_id, None)

    def _session_of(self, tenant: str, name: Any) -> ClientSession:
        return self.session(tenant, name.partition(":")[0] if isinstance(name, str) else None)


def _missing(what: str) -> RequestError:
    return RequestError(HTTPStatus.NOT_FOUND, f"there is no such {what}")
