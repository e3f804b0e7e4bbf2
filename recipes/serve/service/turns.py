"""Scheduling of the workers: one call of the actor at a time, in fair order, and requests to all samplers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from recipes.language.loopback_server import RequestError, in_thread
from recipes.serve.service.ledger import Promise, RequestFailure, RequestResult
from recipes.serve.service.tenants import Call, Tenants
from recipes.serve.values import Drawing, SampleOutcome
from rlinf_core import RLinfError, WorkerGroupError
from rlinf_core.runners.recovery import death

LOGGER: Final = logging.getLogger("rlinf")
# The maximum seconds between two checks for new sampling requests.
_SECONDS: Final = 0.2
# An idle rank waits for further requests while one comes within this many seconds, at most this many times.
_GATHERING_SECONDS: Final = 0.01
_GATHERINGS: Final = 10


class ActorTurns:
    """Serialized calls of the actor: round robin over tenants, and over the models of each tenant.

    Args:
        tenants: the tenants whose models have requests.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._wake = asyncio.Event()
        self._chores: deque[Callable[[], Awaitable[Any]]] = deque()
        self._last_tenant = self._last_model = ""

    def wake(self) -> None:
        """Check for requests."""
        self._wake.set()

    def add_chore(self, chore: Callable[[], Awaitable[Any]]) -> None:
        """Add work to do before the next request, such as removing a model."""
        self._chores.append(chore)
        self._wake.set()

    async def run(self) -> None:
        """Run calls forever.

        Raises:
            WorkerGroupError: a worker died; requests stay open for the next start.
            RunError: outcomes cannot be stored.
        """
        while True:
            while self._chores:
                await self._guarded(self._chores.popleft())
            call = self._next()
            if call is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            if call.promise.outcome is None or call.again:
                call.promise.settle(await self._guarded(call.act))

    def _next(self) -> Call | None:
        busy = self._tenants.busy()
        if not busy:
            return None
        self._last_tenant = _after(self._last_tenant, sorted(busy))
        models = {model.model_id: model for model in busy[self._last_tenant]}
        self._last_model = _after(self._last_model, sorted(models))
        return models[self._last_model].order.ready.popleft()

    async def _guarded(self, act: Callable[[], Awaitable[Any]]) -> RequestResult | RequestFailure:
        try:
            content = await act()
        except RequestError as error:
            return RequestFailure(str(error))
        except WorkerGroupError as error:
            if death(error) is not None:
                raise
            return _failure_of(error)
        except OSError as error:
            LOGGER.warning("a request failed: %s", error)
            return RequestFailure(f"the server cannot write or read its files: {error.strerror}", "server")
        except RLinfError:
            raise
        except Exception as error:  # noqa: BLE001 - any error belongs to this request
            return _mistake(error)
        return RequestResult(content)


def _failure_of(error: WorkerGroupError) -> RequestFailure:
    """Return the failure of a call that a worker refused, or in which it raised an unexpected error."""
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, RLinfError):
        parts = (first.message, first.why, first.help)
        return RequestFailure("; ".join(part for part in parts if part))
    return _mistake(first)


def _mistake(error: BaseException) -> RequestFailure:
    """Return the failure of a request with an unexpected error in the server."""
    LOGGER.warning("a request failed", exc_info=error)
    return RequestFailure(
        f"the server failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}", "server"
    )


def _after(last: str, names: list[str]) -> str:
    """Return the name after `last` in a circle of sorted names."""
    return next((name for name in names if name > last), names[0])


class _Open(NamedTuple):
    """An open sampling request: its promise and its snapshot."""

    promise: Promise
    snapshot: str | None


class SamplerTurns:
    """The scheduler of sampling requests, spread over the ranks and batched by each.

    Args:
        groups: a view of each rank.
        encode: encodes an outcome as a message.
    """

    def __init__(self, groups: list[Any], encode: Callable[[SampleOutcome], bytes]) -> None:
        self._groups = groups
        self._encode = encode
        self._new: list[list[Drawing]] = [[] for _ in groups]
        self._cancelled: list[list[str]] = [[] for _ in groups]
        self._open: list[dict[str, _Open]] = [{} for _ in groups]
        self._wakes = [asyncio.Event() for _ in groups]
        self._ranks = itertools.cycle(range(len(groups)))

    def submit(self, drawing: Drawing, promise: Promise) -> None:
        """Send a request to the rank with the fewest requests."""
        start = next(self._ranks)
        order = [(start + offset) % len(self._groups) for offset in range(len(self._groups))]
        rank = min(order, key=lambda place: len(self._open[place]))
        self._new[rank].append(drawing)
        self._open[rank][promise.request_id] = _Open(promise, drawing.snapshot)
        self._wakes[rank].set()

    def cancel(self, request_ids: set[str], why: str = "the request was cancelled") -> None:
        """Cancel requests, and fail their promises."""
        for rank, promises in enumerate(self._open):
            for request_id in request_ids & promises.keys():
                promises.pop(request_id).promise.settle(RequestFailure(why))
                self._new[rank] = [drawing for drawing in self._new[rank] if drawing.request_id != request_id]
                self._cancelled[rank].append(request_id)
                self._wakes[rank].set()

    def draws_from(self, snapshot: str) -> bool:
        """Return whether a request to a snapshot is open."""
        return any(opened.snapshot == snapshot for promises in self._open for opened in promises.values())

    async def run(self) -> None:
        """Sample forever.

        Raises:
            WorkerGroupError, RunError: see `ActorTurns.run`.
        """
        await asyncio.gather(*(self._run(rank) for rank in range(len(self._groups))))

    async def _run(self, rank: int) -> None:
        while True:
            if not self._open[rank] and not self._cancelled[rank]:
                self._wakes[rank].clear()
                await self._wakes[rank].wait()
                await self._gather(rank)
            new, self._new[rank] = self._new[rank], []
            cancelled, self._cancelled[rank] = self._cancelled[rank], []
            (done,) = await self._groups[rank].advance(new, cancelled, _SECONDS)
            settled = await in_thread(self._encoded, done) if done else {}
            for request_id, result in settled.items():
                opened = self._open[rank].pop(request_id, None)
                if opened is not None:
                    opened.promise.settle(result)

    def _encoded(self, done: Mapping[str, SampleOutcome]) -> dict[str, RequestResult | RequestFailure]:
        """Return the results of outcomes; called in a thread, as a result may have many MiB."""
        results: dict[str, RequestResult | RequestFailure] = {}
        for request_id, outcome in done.items():
            try:
                failed = RequestFailure(outcome.failure) if outcome.failure else None
                results[request_id] = failed or RequestResult(self._encode(outcome))
            except Exception as error:  # noqa: BLE001 - an encoding error belongs to one request
                results[request_id] = _mistake(error)
        return results

    async def _gather(self, rank: int) -> None:
        """Wait briefly so that requests start together: a pass over many costs hardly more than one over few."""
        for _ in range(_GATHERINGS):
            count = len(self._new[rank])
            await asyncio.sleep(_GATHERING_SECONDS)
            if len(self._new[rank]) == count:
                return
