"""Tenants and their keys, sessions, models and samplers."""

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

from recipes.language.loopback_server import RequestError
from recipes.serve.service.ledger import Promise, gone
from recipes.serve.values import AdapterSettings
from rlinf_core.errors import RunError
from rlinf_core.runners.storage.durable import write_whole

# The prefix of keys that the SDK requires.
KEY_PREFIX: Final = "tml-"
# A client numbers requests consecutively, and may send at most this many ahead of a missing one.
_FURTHEST: Final = 10_000


@dataclass(slots=True)
class Call:
    """A request to the workers, in the order of a model's requests.

    Attributes:
        promise: the promise of the result.
        act: does the request and returns the result.
        again: whether the request of an earlier start is repeated, as this start's model lacks its effect.
    """

    promise: Promise
    act: Callable[[], Any]
    again: bool = False


@dataclass(slots=True)
class RequestOrder:
    """The requests of a model in the order of their numbers; a missing number delays those after it.

    Attributes:
        next: the next expected number.
        ready: requests that may run.
    """

    next: int = 1
    ready: deque[Call] = field(default_factory=deque[Call])
    waiting: dict[int, Call] = field(default_factory=dict[int, Call])

    def check(self, seq_id: int) -> None:
        """Check the number of a new request.

        Raises:
            RequestError: the number is too far ahead, or was used.
        """
        if seq_id > self.next + _FURTHEST:
            message = f"`seq_id` {seq_id} lies too far ahead: request {self.next} of this model has not arrived"
            raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, message)
        if seq_id < self.next:
            raise gone(f"request {seq_id} of this model was answered before, and its result was dropped")

    def put(self, seq_id: int, call: Call) -> None:
        """Add a request whose number passed `check`."""
        self.waiting[seq_id] = call
        while self.next in self.waiting:
            self.ready.append(self.waiting.pop(self.next))
            self.next += 1


@dataclass(slots=True)
class ServedModel:
    """A model that is trained.

    Attributes:
        model_id: `SESSION:train:N`, also the name of the adapter at the workers.
        session: the session of the model.
        settings: the settings of the adapter; None until it is loaded.
        order: the requests of the model.
        failed: why a pass since the last step failed; "": none failed.
        reported: the number of the last request whose outcome an earlier start had stored.
        steps: the number of steps since the model's last point.
        done: the number of the last finished request; 0: none.
        saved: the number of the request at the model's last point; -1: no point.
        unstepped: the bytes of the passes since the last step, which a later start repeats.
        metadata: the client's metadata.
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
    """The source of a client's samples: a snapshot, or the base model.

    Attributes:
        sampler_id: `SESSION:sample:N`.
        session: the session of the sampler.
        path: the `tinker://` path of a named snapshot; else None.
        folder: the folder of the snapshot; None: the base model.
        used: the time of its creation or last use, by the monotonic clock, in seconds.
    """

    sampler_id: str
    session: ClientSession
    path: str | None
    folder: Path | None
    used: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class ClientSession:
    """A client's session; models and samplers created in it end with it.

    Attributes:
        session_id: the id of the session.
        tenant: the tenant that owns it.
        seen: the time of the client's last request, by the monotonic clock, in seconds.
    """

    session_id: str
    tenant: str
    seen: float
    models: dict[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    samplers: dict[str, Sampler] = field(default_factory=dict[str, Sampler])

    def last_seen(self) -> str:
        """Return the time of the client's last request, in ISO format."""
        return datetime.fromtimestamp(time.time() - (time.monotonic() - self.seen), UTC).isoformat()


class Keys:
    """The API keys of tenants, in files that only the user of this process can read.

    Args:
        folder: the folder of the files, one per tenant; existing keys are kept.
        tenants: the names of the tenants.

    Raises:
        RunError: a file cannot be read or written, has no key, or has the key of another tenant.
    """

    def __init__(self, folder: Path, tenants: Iterable[str]) -> None:
        self._digests: dict[str, bytes] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for tenant in tenants:
                file = folder / tenant
                if not file.exists():
                    write_whole(file, f"{KEY_PREFIX}{secrets.token_urlsafe(32)}\n", mode=0o600)
                self._add(tenant, file)
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"the keys in `{folder}` cannot be read or written", why=str(error)) from error

    def _add(self, tenant: str, file: Path) -> None:
        key = file.read_text(encoding="ascii").strip()
        why = ""
        if not key.startswith(KEY_PREFIX):
            # An empty file would admit requests without a key.
            why = f"a key begins with `{KEY_PREFIX}`"
        elif _digest(key) in self._digests.values():
            why = "it has the key of another tenant"
        if why:
            raise RunError(f"`{file}` has no key of `{tenant}`", why=why, help="remove the file: a new key is made")
        self._digests[tenant] = _digest(key)

    def tenant(self, key: str) -> str:
        """Return the tenant of a key.

        Raises:
            RequestError: the key is unknown.
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
    """All sessions, models and samplers; those of other tenants are treated as nonexistent.

    Args:
        boot: the id of this start of the server, a part of every id.
        timeout: seconds without a request after which a session ends.
        clock: the monotonic clock, in seconds.
    """

    def __init__(self, boot: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._boot = boot
        self._timeout = timeout
        self._clock = clock
        self._sessions: dict[str, ClientSession] = {}

    def begin(self, tenant: str, session_id: str = "") -> ClientSession:
        """Return a new session; `session_id` is the id of a session of an earlier start."""
        session = ClientSession(session_id or f"{self._boot}-{secrets.token_hex(8)}", tenant, self._clock())
        self._sessions[session.session_id] = session
        return session

    def session(self, tenant: str, session_id: Any) -> ClientSession:
        """Return a session, and record that its client is active.

        Raises:
            RequestError: the tenant has none of that id, or it has ended.
        """
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        # Another tenant's session is treated as nonexistent.
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
        """Return the models with requests that may run, by tenant."""
        busy: dict[str, list[ServedModel]] = {}
        for session in self._sessions.values():
            for model in session.models.values():
                if model.order.ready:
                    busy.setdefault(session.tenant, []).append(model)
        return busy

    def silent(self) -> list[ClientSession]:
        """Return the sessions whose clients sent no request for too long."""
        now = self._clock()
        return [session for session in self._sessions.values() if now - session.seen > self._timeout]

    def end(self, session: ClientSession) -> None:
        """Forget a session with its models and samplers."""
        self._sessions.pop(session.session_id, None)

    def _session_of(self, tenant: str, name: Any) -> ClientSession:
        return self.session(tenant, name.partition(":")[0] if isinstance(name, str) else None)


def _missing(what: str) -> RequestError:
    return RequestError(HTTPStatus.NOT_FOUND, f"there is no such {what}")
