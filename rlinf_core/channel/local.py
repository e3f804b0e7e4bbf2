"""The queues of a local channel, for the threads and tasks of one process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, cast

from rlinf_core import env_vars
from rlinf_core.channel.handle import REAPER, operation_class
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.operation import ChannelOperation, Decode
from rlinf_core.channel.queue_state import Accepted, Delivered, Effect, Refused
from rlinf_core.channel.wire import Query
from rlinf_core.waiting import OperationKind


class LocalBackend:
    """The queues of a local channel, with the operations of a `ChannelClient`; items are passed by reference."""

    def __init__(self, name: str, maxsize: int = 0) -> None:
        self.name = name
        self.maxsize = maxsize
        self._queue: KeyedQueue[object] = KeyedQueue(maxsize)
        self._lock = threading.Lock()
        self._op_ids = itertools.count(1)
        self._open: dict[int, ChannelOperation[Any]] = {}

    def put(
        self, item: object, weight: float, key: str, *, wait: bool, timeout: float | None, detached: bool
    ) -> ChannelOperation[None]:
        operation = self._begin(OperationKind.PUT, key, timeout, None, detached=detached)
        self._run(
            lambda: self._queue.put(operation.op_id, item, weight=weight, key=key, now=time.monotonic(), wait=wait)
        )
        return operation

    def get(
        self, key: str, batch_weight: float | None, *, wait: bool, timeout: float | None, detached: bool
    ) -> ChannelOperation[Any]:
        one = batch_weight is None
        kind, decode = (OperationKind.GET, itemgetter(0)) if one else (OperationKind.GET_BATCH, list)
        operation = self._begin(kind, key, timeout, decode, detached=detached)
        self._run(lambda: self._queue.get(operation.op_id, batch_weight, key=key, now=time.monotonic(), wait=wait))
        return operation

    def ask(self, question: Query, key: str, timeout: float | None = None) -> Any:
        with self._lock:
            match question:
                case Query.DEPTH:
                    return self._queue.depth(key)
                case Query.FULL:
                    return self._queue.full(key)
                case Query.PEEK:
                    return [item.payload for item in self._queue.peek_all(key)]
                case Query.STATISTICS:
                    return self._queue.statistics()
                case Query.LOSSES:
                    return []

    def close(self, timeout: float | None = None) -> None:
        self._run(lambda: self._queue.close(time.monotonic()))

    def _begin(
        self,
        kind: OperationKind,
        key: str,
        timeout: float | None,
        decode: Decode | None,
        *,
        detached: bool,
    ) -> ChannelOperation[Any]:
        seconds = env_vars.TIMEOUT.get() if timeout is None else timeout
        operation: ChannelOperation[Any] = operation_class(kind, detached=detached)(
            next(self._op_ids), kind, self.name, key, seconds, decode, self._withdraw, detached=detached
        )
        self._open[operation.op_id] = operation
        if detached:
            REAPER.watch(self._open)
        return operation

    def _withdraw(self, operation: ChannelOperation[Any]) -> bool:
        self._run(lambda: self._queue.cancel(operation.op_id, time.monotonic()))
        return True

    def _run(self, command: Callable[[], Sequence[Effect[object]]]) -> None:
        """Carry out a command. Operations are settled outside of the lock, since that may call other code."""
        endings: list[Callable[[], object]] = []
        with self._lock:
            todo = list(command())
            while todo:
                effect = todo.pop(0)
                if isinstance(effect, Accepted):
                    operation = self._open.pop(cast("int", effect.op_id))
                    endings.append(lambda operation=operation: operation.finish(None))
                elif isinstance(effect, Delivered):
                    op_id = cast("int", effect.op_id)
                    operation = self._open[op_id]
                    if not operation.claim():
                        # Its caller has given up: the items go back, and the operation is refused.
                        todo += self._queue.cancel(op_id, time.monotonic())
                        continue
                    del self._open[op_id]
                    pieces = [item.payload for item in effect.items]
                    endings.append(lambda operation=operation, pieces=pieces: operation.arrive(pieces))
                    todo += self._queue.taken(op_id, time.monotonic())
                elif isinstance(effect, Refused):
                    operation = self._open.pop(cast("int", effect.op_id))
                    endings.append(
                        lambda operation=operation, effect=effect: operation.refuse(effect.reason, effect.why)
                    )
        for end in endings:
            end()
