"""The channel: a named queue between any processes of a job, or with `local` between the threads and tasks of one."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast, overload

from rlinf_core import env_vars
from rlinf_core.address import check_name
from rlinf_core.channel.handle import REAPER, GetHandle, operation_class
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.operation import (
    ChannelOperation,
    Decode,
    Key,
    checked_batch_weight,
    checked_bound,
    checked_key,
    checked_timeout,
    checked_weight,
    key_of,
)
from rlinf_core.channel.queue_state import Accepted, Delivered, Effect, KeyStatistics, Refused
from rlinf_core.channel.wire import DEFAULT_KEY, Query
from rlinf_core.collective.work import Work
from rlinf_core.errors import ChannelClosed, ChannelError, PeerNotFoundError, UnknownGroupError
from rlinf_core.suggest import quoted
from rlinf_core.waiting import OperationKind

if TYPE_CHECKING:
    from rlinf_core.channel.client import ChannelClient


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


# The queues of a channel: in its own process, or in this one.
ChannelBackend: TypeAlias = "ChannelClient | LocalBackend"


class Channel:
    """A queue of weighted items between many producers and many consumers.

    Made by `Channel.create` or `Channel.connect`, in the driver or in a worker. It may be passed to workers as an
    argument of a call, and used by several threads and tasks at once.

    Each `key` has its own queue: items leave in the order of acceptance, and waiting consumers are served first come,
    first served. Puts of one process under one key are accepted in the order of its calls.

    Every operation that may wait takes a `timeout` in seconds, by default `RLINF_TIMEOUT` (a first contact may take
    another second), and raises

    * `CommunicationTimeoutError` when it passes, with the channel's state and the waits; the operation is undone,
    * `ChannelClosed` once the channel is closed: a put was not accepted, or nothing is left to get,
    * `DeadlockError` as soon as no process can ever wake it,
    * `WorkerDiedError` when the channel's process is gone, or, for a get, all of its producers,
    * `PayloadError` when an item does not pickle, or cannot be rebuilt where it is got.

    With `async_op=True` an operation returns at once a handle with `wait()`, `async_wait()`, `done()` and `then(f)`;
    the item must not change before the handle's `wait`. A get whose handle is dropped is cancelled. A put is not; its
    failure is logged if it was never read.

    Attributes:
        name: the name of the channel; its process has the address `name:0`.
    """

    def __init__(self, name: str, backend: ChannelBackend | None = None) -> None:
        """Wrap a backend; users call `create` or `connect`. Without `backend` it is looked up on first use."""
        self.name = name
        self._found = backend

    @classmethod
    def create(cls, name: str, maxsize: int = 0, node_rank: int = 0, local: bool = False) -> Channel:
        """Return a new channel. It lives until the job ends or it is closed and drained, even if its creator ends.

        Args:
            name: the name to connect to; not the name of a running group or an earlier channel.
            maxsize: the capacity of each key, beyond which puts wait; 0 means unlimited.
            node_rank: the rank of the node where its process runs, to which each item is sent.
            local: whether it is only for threads and tasks of this process; items are then passed by reference, and
                `connect` cannot find it.

        Raises:
            InvalidNameError: the name is invalid or taken.
            ClusterError: there is no such node, or its process does not start.
            ValueError: `maxsize` is not an integer >= 0, `node_rank` is not a valid rank, or it is given with `local`.
        """
        check_name(name, "channel")
        maxsize = checked_bound(maxsize)
        if local:
            if node_rank != 0:
                raise ValueError("a local channel lives in this process: give `node_rank` or `local`, not both")
            return cls(name, LocalBackend(name, maxsize))
        from rlinf_core.channel import launch

        return cls(name, launch.create(name, maxsize, node_rank))

    @classmethod
    def connect(cls, name: str, timeout: float | None = None) -> Channel:
        """Return the channel of this name, waiting while it may still be created.

        Args:
            name: the name of the channel.
            timeout: seconds; by default `RLINF_CONNECT_TIMEOUT`.

        Raises:
            InvalidNameError: no channel can have this name.
            UnknownGroupError: the job declared its groups and channels, and this is not one of them.
            PeerNotFoundError: it was not created in time.
            ChannelError: a worker group has this name.
        """
        from rlinf_core.channel import launch

        check_name(name, "channel")
        timeout = checked_timeout(timeout)
        backend = launch.clients().client(name)
        try:
            backend.connect(timeout)
        except (UnknownGroupError, PeerNotFoundError) as error:
            raise launch.no_channel(name, error) from None
        return cls(name, backend)

    # Putting

    @overload
    def put(
        self,
        item: object,
        weight: float = 0,
        key: Key = DEFAULT_KEY,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> None: ...
    @overload
    def put(
        self,
        item: object,
        weight: float = 0,
        key: Key = DEFAULT_KEY,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[None]: ...
    @overload
    def put(
        self,
        item: object,
        weight: float = 0,
        key: Key = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work[None] | None: ...
    def put(
        self,
        item: object,
        weight: float = 0,
        key: Key = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work[None] | None:
        """Put any picklable object; return when it is accepted, after which it survives this process.

        A full queue blocks the caller. The handle of an asynchronous put finishes when the item is accepted.

        Args:
            item: the object; pickle does not copy the tensors and arrays in it, at any depth.
            weight: its weight in a batch: a finite number >= 0.
            key: the queue.
            async_op: whether to return a handle at once.
            timeout: seconds.
        """
        weight, key, timeout = checked_weight(weight), checked_key(key), checked_timeout(timeout)
        work = self._backend.put(item, weight, key, wait=True, timeout=timeout, detached=async_op)
        return work if async_op else work.wait()

    def put_nowait(self, item: object, weight: float = 0, key: Key = DEFAULT_KEY) -> None:
        """Put an object as `put` does, but never wait for room.

        Raises:
            ChannelFull: there is no room.
        """
        weight, key = checked_weight(weight), checked_key(key)
        self._backend.put(item, weight, key, wait=False, timeout=None, detached=False).wait()

    # Getting

    @overload
    def get(self, key: Key = DEFAULT_KEY, *, async_op: Literal[True], timeout: float | None = None) -> Work[Any]: ...
    @overload
    def get(self, key: Key = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None) -> Any: ...
    def get(self, key: Key = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return the next item of a key, waiting for one."""
        key, timeout = checked_key(key), checked_timeout(timeout)
        work = self._backend.get(key, None, wait=True, timeout=timeout, detached=async_op)
        return GetHandle(work) if async_op else work.wait()

    def get_nowait(self, key: Key = DEFAULT_KEY) -> Any:
        """Return the next item of a key, without waiting for one.

        Raises:
            ChannelEmpty: there is none.
        """
        return self._backend.get(checked_key(key), None, wait=False, timeout=None, detached=False).wait()

    @overload
    def get_batch(
        self,
        batch_weight: float,
        key: Key = DEFAULT_KEY,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[Any]: ...
    @overload
    def get_batch(
        self, batch_weight: float, key: Key = DEFAULT_KEY, *, async_op: Literal[True], timeout: float | None = None
    ) -> Work[list[Any]]: ...
    @overload
    def get_batch(
        self, batch_weight: float, key: Key = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None
    ) -> Any: ...
    def get_batch(
        self,
        batch_weight: float = 0,
        key: Key = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
        **unknown: object,
    ) -> Any:
        """Return the next items of a key until their weights reach or exceed `batch_weight`, as a list.

        The items are consecutive: no other consumer gets one in between. Items of weight 0 are included and add
        nothing. Once the channel is closed, the remaining items are a batch even if they weigh less.

        Raises:
            TypeError: there is an unknown argument, such as RLinf's `target_weight`.
            ValueError: `batch_weight` is not a finite number above 0.
        """
        if unknown:
            raise TypeError(f"get_batch() has no argument {quoted(unknown)}: the weight of a batch is `batch_weight`")
        weight, key, timeout = checked_batch_weight(batch_weight), checked_key(key), checked_timeout(timeout)
        work = self._backend.get(key, weight, wait=True, timeout=timeout, detached=async_op)
        return GetHandle(work) if async_op else work.wait()

    def __iter__(self) -> Iterator[Any]:
        """Return the items of the default key until the channel is closed and drained."""
        while True:
            try:
                item = self.get()
            except ChannelClosed:
                return
            yield item

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Return the items of the default key as iterating does, without blocking the event loop."""
        while True:
            try:
                item = await self.get(async_op=True).async_wait()
            except ChannelClosed:
                return
            yield item

    # Inspecting

    @property
    def maxsize(self) -> int:
        """The number of items that each key may hold; 0 means any number."""
        return self._backend.maxsize

    def qsize(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> int:
        """Return the number of items of a key that are neither taken nor reserved."""
        return self._backend.ask(Query.DEPTH, checked_key(key), checked_timeout(timeout))

    def empty(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> bool:
        """Return whether `qsize` is 0."""
        return self.qsize(key, timeout) == 0

    def full(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> bool:
        """Return whether a put would wait."""
        return self._backend.ask(Query.FULL, checked_key(key), checked_timeout(timeout))

    def peek_all(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> list[Any]:
        """Return the items of a key that are neither taken nor reserved, in order; copies, unless it is local."""
        return self._backend.ask(Query.PEEK, checked_key(key), checked_timeout(timeout))

    def statistics(self, timeout: float | None = None) -> dict[Key, KeyStatistics]:
        """Return statistics by key; of idle keys, of the 10,000 used last."""
        by_key: dict[str, KeyStatistics] = self._backend.ask(Query.STATISTICS, DEFAULT_KEY, checked_timeout(timeout))
        return {key_of(text): statistics for text, statistics in by_key.items()}

    def losses(self, timeout: float | None = None) -> list[Any]:
        """Return the last thousand items in transit to the channel when their producer died, as `LostItem`."""
        return self._backend.ask(Query.LOSSES, DEFAULT_KEY, checked_timeout(timeout))

    # The end

    def close(self, timeout: float | None = None) -> None:
        """Accept no more items; remaining ones can still be got, then gets raise `ChannelClosed`. Idempotent."""
        self._backend.close(checked_timeout(timeout))

    @property
    def _backend(self) -> ChannelBackend:
        if self._found is None:
            from rlinf_core.channel import launch

            self._found = launch.clients().client(self.name)
        return self._found

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        if isinstance(self._found, LocalBackend):
            raise ChannelError(
                self.name,
                f"channel `{self.name}` is local and cannot leave its process",
                help="create it without `local=True`",
            )
        return type(self), (self.name,)

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"
