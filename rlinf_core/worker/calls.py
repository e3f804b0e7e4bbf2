"""Calls: the current one in a worker, the carriers of failures and results, and those of this process on groups."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlinf_core.address import WorkerAddress
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.errors import PayloadError
from rlinf_core.failures import PackedError, WorkerGroupError, followed, set_cause
from rlinf_core.supervision.client import current_client
from rlinf_core.supervision.deaths import ProcessGone, describe_death


@dataclass(slots=True)
class MethodCall:
    """A method call running in this process.

    Attributes:
        serial: its id in Ray.
        task_key: the ident of its thread, or its task.
        operation: the serial of the method among the pending operations.
        given_up: the error for its operations once its caller has cancelled it.
    """

    serial: str
    task_key: Hashable
    operation: int = 0
    given_up: Exception | None = None


current_call: ContextVar[MethodCall | None] = ContextVar("rlinf_call", default=None)
"""The call that runs in this context."""


def check_call() -> None:
    """Raise the error of the current call if it was cancelled, so that it does not begin another wait."""
    call = current_call.get()
    if call is not None and call.given_up is not None:
        raise call.given_up


class RemoteFailure(Exception):  # noqa: N818 - a vehicle, never seen by users
    """A wrapper that carries a worker's exception through Ray, which would change its type."""

    def __init__(self, error: PackedError) -> None:
        super().__init__(error.type_name, error.text)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFailure, (self.error,)


def unpicklable(what: str, error: Exception, where: str | None = None) -> PayloadError:
    """Return the error for an argument or a result that does not pickle."""
    # Ray wraps the error in a long report.
    cause = error.__cause__ or error
    return PayloadError(
        f"{what} cannot be sent",
        where=where,
        why=f"it cannot be pickled: {type(cause).__name__}: {cause}",
        help="send plain data, and let workers create files, locks and connections themselves",
    )


class _Whole:
    """A container that Ray pickles; by itself Ray sends a list or a dict as a tree, and a bytearray as bytes."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._value,)


def _itself(value: object) -> object:
    return value


def whole(value: object) -> object:
    """Return what Ray delivers as `value`, with its own type and with objects that it holds several times."""
    return _Whole(value) if type(value) in (list, dict, bytearray) else value


@dataclass(frozen=True, slots=True)
class Timed:
    """A result with the durations measured in the call: seconds by tag."""

    result: Any
    durations: dict[str, float]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A worker in the records of its group; its pid is set once it is constructed."""

    address: WorkerAddress
    actor: Any
    node: str
    incarnation: int
    pid: int | None = None

    @property
    def place(self) -> str:
        """The node and process in which it runs, for example `node 1 (10.0.0.2), pid 4711`."""
        return self.node if self.pid is None else f"{self.node}, pid {self.pid}"


class GroupCall(Generic[T]):
    """The results and failures of one method on some ranks of a group; `WorkerGroupHandle` waits for them.

    Attributes:
        group: the name of the group.
        method: the name of the method.
        observed: whether its outcome has been read.
    """

    def __init__(
        self, group: str, method: str, world_size: int, members: Sequence[GroupMember], references: list[Any]
    ) -> None:
        self.group = group
        self.method = method
        self._world_size = world_size
        self._members = members
        self._references = references
        self._results: list[T] | None = None
        self._durations: list[dict[str, float]] | None = None
        self._error: WorkerGroupError | None = None
        self.observed = False

    def __repr__(self) -> str:
        return f"<{self.group}.{self.method}() on {len(self._members)} workers>"

    @property
    def references(self) -> tuple[Any, ...]:
        return tuple(self._references)

    def done(self) -> bool:
        """Return whether every rank has answered or one has failed, so that `wait` would not block."""
        return self._settled or not self.pending() or bool(self._failures(0))

    @property
    def failed(self) -> bool:
        """Whether a failure of the call is already known."""
        return self._error is not None or (not self._settled and bool(self._failures(0)))

    @property
    def matters(self) -> bool:
        """Whether the call has pending or unread results."""
        return not self.done() or (not self.observed and self.failed)

    def pending(self) -> list[WorkerAddress]:
        """Return the workers that have not answered."""
        if self._settled:
            return []
        ray = ray_api()
        _, pending = ray.wait(self._references, num_returns=len(self._references), timeout=0, fetch_local=False)
        waiting = set(pending)
        return [m.address for m, ref in zip(self._members, self._references, strict=True) if ref in waiting]

    def failure(self, grace: float = 0) -> WorkerGroupError | None:
        """Return the call's failure so far, or within `grace` seconds, or None. Ray then does not print it."""
        if not self._settled:
            self._take(self._failures(grace))
        return self._error

    @property
    def _settled(self) -> bool:
        return self._results is not None or self._error is not None

    @property
    def _title(self) -> str:
        return f"{self.group}.{self.method}()"

    def _settle(self, answers: list[Any]) -> None:
        self._durations = [dict(answer.durations) if isinstance(answer, Timed) else {} for answer in answers]
        self._results = [answer.result if isinstance(answer, Timed) else answer for answer in answers]

    def _take(self, failures: dict[int, Exception]) -> None:
        if failures:
            error = WorkerGroupError(self.group, self.method, failures, self._world_size)
            error.places = {
                member.address.rank: member.place for member in self._members if member.address.rank in failures
            }
            self._error = error

    def _failures(self, grace: float) -> dict[int, Exception]:
        """Return the exception of each rank that has failed, or fails within `grace` seconds."""
        ray = ray_api()
        ready, _ = ray.wait(self._references, num_returns=len(self._references), timeout=grace, fetch_local=False)
        finished = set(ready)
        failures: dict[int, Exception] = {}
        for member, reference in zip(self._members, self._references, strict=True):
            if reference in finished:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    failures[member.address.rank] = self._translate(member, error)
        return {**self._vanished(), **failures}

    def _vanished(self) -> dict[int, Exception]:
        """Return the errors of ranks whose hosts are gone, which the manager detects much earlier than Ray."""
        client = current_client()
        if client is None or self._settled:
            return {}
        errors = {
            member.address.rank: client.deaths.vanished(str(member.address), member.incarnation)
            for member in self._members
        }
        return {rank: error for rank, error in errors.items() if error is not None}

    def _translate(self, member: GroupMember, error: Exception) -> Exception:
        ray = ray_api()
        cause = getattr(error, "cause", None)
        if isinstance(cause, RemoteFailure):
            return cause.error.unpack()
        if isinstance(error, ray.exceptions.RayActorError) or isinstance(cause, ProcessGone):
            client = current_client()
            deaths = client.deaths if client is not None else None
            return describe_death(deaths, cause or error, str(member.address), member.node, member.incarnation)
        in_worker = isinstance(cause, ray.exceptions.RaySystemError)
        not_rebuilt = getattr(cause if in_worker else error, "client_exc", None)
        if isinstance(not_rebuilt, Exception):
            return PayloadError(
                f"{'an argument' if in_worker else 'the result'} of `{self.method}` cannot be rebuilt",
                where=str(member.address) if in_worker else None,
                why=f"{type(not_rebuilt).__name__}: {not_rebuilt}",
            )
        if isinstance(cause, Exception):
            # Errors of the method arrive as `RemoteFailure`, so here Ray failed to pickle the result.
            return unpicklable(f"the result of `{self.method}`", cause, where=str(member.address))
        return error


class UnansweredCalls:
    """The calls on worker groups of this process whose answers may be unread."""

    # The calls are pruned when this many have accumulated, or twice the number left by the last pruning.
    _FIRST_LIMIT = 64

    def __init__(self) -> None:
        # In the order in which they were made.
        self._calls: dict[GroupCall[Any], None] = {}
        self._limit = self._FIRST_LIMIT
        self._lock = threading.Lock()

    def add(self, call: GroupCall[Any]) -> None:
        """Keep a new call."""
        with self._lock:
            if len(self._calls) >= self._limit:
                self._calls = {call: None for call in self._calls if call.matters}
                self._limit = max(self._FIRST_LIMIT, 2 * len(self._calls))
            self._calls[call] = None

    def forget(self, call: GroupCall[Any]) -> None:
        """Forget a call whose results were read, so that they do not outlive its handle."""
        with self._lock:
            self._calls.pop(call, None)

    def in_flight(self) -> tuple[str, ...]:
        with self._lock:
            calls = list(self._calls)
        return tuple({str(address) for call in calls for address in call.pending()})

    def tell_cause(self, error: BaseException) -> None:
        """Set the cause of a consequential error, if the cause is a failed call whose result was never read."""
        if error.__cause__ is not None or not followed(error):
            return
        with self._lock:
            calls = [call for call in self._calls if not call.observed]
        for call in calls:
            failure = call.failure()
            if failure is not None and not followed(failure) and set_cause(error, failure):
                # The failure is reported with the error that it caused.
                call.observed = True
                return

    def take(self, group: str) -> list[GroupCall[Any]]:
        with self._lock:
            own = [call for call in self._calls if call.group == group]
            self._calls = {call: None for call in self._calls if call.group != group}
        return own


unanswered = UnansweredCalls()
