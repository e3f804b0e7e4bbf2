"""A channel within one process: the same rules, and items are handed over as they are, without a copy."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from rlinf_core import env_vars
from rlinf_core.channel.backend import Backend
from rlinf_core.channel.deadlines import Deadlines
from rlinf_core.channel.effects import Accepted, Delivered, Effect, Refused
from rlinf_core.channel.handle import PutRequest, see_to_dropped
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.request import Here, Request, Shape
from rlinf_core.channel.wire import Question
from rlinf_core.collective.work import Board
from rlinf_core.waiting import OperationKind


class LocalBackend(Backend):
    """Queues in this process's memory, for its threads and tasks."""

    def __init__(self, name: str, maxsize: int = 0, board: Board | None = None) -> None:
        """`board`: where blocked operations are published."""
        super().__init__(name)
        self._queue: KeyedQueue[object] = KeyedQueue(maxsize)
        self._board = board
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._open: dict[int, Request[Any]] = {}
        self._deadlines = Deadlines(lambda: self._open)

    @property
    def maxsize(self) -> int:
        return self._queue.maxsize

    def connect(self, timeout: float | None = None) -> None:
        return

    def put(
        self, item: object, weight: float, key: str, *, wait: bool, timeout: float | None, detached: bool
    ) -> Request[None]:
        request = self._request(OperationKind.PUT, key, timeout, Shape.NOTHING, detached=detached)
        self._run(
            lambda: self._queue.put(request.ticket, item, weight=weight, key=key, now=time.monotonic(), wait=wait)
        )
        return request

    def get(
        self, key: str, batch_weight: float | None, *, wait: bool, timeout: float | None, detached: bool
    ) -> Request[Any]:
        now = time.monotonic()
        if batch_weight is None:
            request = self._request(OperationKind.GET, key, timeout, Shape.ONE, detached=detached)
            self._run(lambda: self._queue.get(request.ticket, key=key, now=now, wait=wait))
        else:
            request = self._request(OperationKind.GET_BATCH, key, timeout, Shape.LIST, detached=detached)
            self._run(lambda: self._queue.get_batch(request.ticket, batch_weight, key=key, now=now, wait=wait))
        return request

    def ask(self, question: Question, key: str, timeout: float | None = None) -> Any:
        with self._lock:
            match question:
                case Question.DEPTH:
                    return self._queue.depth(key)
                case Question.FULL:
                    return self._queue.full(key)
                case Question.PEEK:
                    return [item.payload for item in self._queue.peek_all(key)]
                case Question.STATISTICS:
                    return self._queue.statistics()
                case Question.LOSSES:
                    return []

    def close(self, timeout: float | None = None) -> None:
        self._run(lambda: self._queue.close(time.monotonic()))

    def _request(
        self, kind: OperationKind, key: str, timeout: float | None, shape: Shape, *, detached: bool
    ) -> Request[Any]:
        seconds = env_vars.TIMEOUT.get() if timeout is None else timeout
        make: type[Request[Any]] = Request
        if detached:
            see_to_dropped()
            make = PutRequest if kind is OperationKind.PUT else Request
        request: Request[Any] = make(
            next(self._tickets), kind, self.name, key, seconds, shape, self._withdraw, self._board, detached=detached
        )
        self._open[request.ticket] = request
        if detached:
            self._deadlines.watch()
        return request

    def _withdraw(self, request: Request[object]) -> bool:
        self._run(lambda: self._queue.cancel(request.ticket, time.monotonic()))
        return True

    def _run(self, command: Callable[[], Sequence[Effect[object]]]) -> None:
        """Carry out a command. Requests end outside of the lock, for that may call other code."""
        endings: list[Callable[[], object]] = []
        with self._lock:
            todo = list(command())
            while todo:
                effect = todo.pop(0)
                if isinstance(effect, Accepted):
                    request = self._open.pop(cast("int", effect.ticket))
                    endings.append(lambda request=request: request.finish(None))
                elif isinstance(effect, Delivered):
                    ticket = cast("int", effect.ticket)
                    request = self._open[ticket]
                    if not request.claim():
                        # Nobody wants it any more: the items go back, and it is refused.
                        todo += self._queue.cancel(ticket, time.monotonic())
                        continue
                    del self._open[ticket]
                    pieces = [Here(item.payload) for item in effect.items]
                    endings.append(lambda request=request, pieces=pieces: request.arrive(pieces))
                    todo += self._queue.taken(ticket, time.monotonic())
                elif isinstance(effect, Refused):
                    request = self._open.pop(cast("int", effect.ticket))
                    endings.append(lambda request=request, effect=effect: request.refuse(effect.reason, effect.why))
        for end in endings:
            end()
