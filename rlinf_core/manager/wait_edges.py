"""Construction of the wait-for graph from published operations: which process could end which operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_core.manager.wait_graph import Process, Wait
from rlinf_core.waiting import RUNNING, Operation, OperationKind, Publication

_PUTS = frozenset({OperationKind.PUT})
_GETS = frozenset({OperationKind.GET, OperationKind.GET_BATCH})
_ANSWERED_BY_CHANNELS = frozenset({OperationKind.QUERY, OperationKind.CLOSE})


@dataclass(frozen=True, slots=True)
class ChannelView:
    """The known facts about a channel.

    Attributes:
        producers: the processes that have put into it, or wait to.
        consumers: the processes that have got from it, or wait to.
        maxsize: the bound of each key; 0 means none.
        depths: the number of free items by key.
    """

    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    maxsize: int = 0
    depths: Mapping[str, int] = field(default_factory=dict[str, int])

    def orphaned(self, key: str, dead: frozenset[str]) -> bool:
        """Return whether a get of `key` can only fail: it is empty, and all producers of the channel are dead."""
        return bool(self.producers) and not self.depths.get(key) and dead.issuperset(self.producers)

    def state(self, operation: Operation) -> str:
        """Return the state of the channel for an operation, in words."""
        depth = self.depths.get(operation.key or "default", 0)
        if operation.kind in _PUTS:
            return f"full ({depth} of {self.maxsize})" if 0 < self.maxsize <= depth else ""
        return "empty" if depth == 0 else f"with {depth} items"


@dataclass(frozen=True, slots=True)
class JobView:
    """Known facts about a job, beyond what its processes publish.

    Attributes:
        dead: the processes that died.
        unknown: names in lookups that no group or channel has.
    """

    channels: Mapping[str, ChannelView] = field(default_factory=dict[str, ChannelView])
    dead: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()

    def process(self, name: str, publication: Publication) -> Process:
        methods = [operation for operation in publication.operations if operation.operation.kind in RUNNING]
        waits = tuple(
            self._wait(operation.operation, operation.age)
            for operation in publication.operations
            if operation.operation.kind not in RUNNING
        )
        held_up = any(not wait.operation.detached for wait in waits)
        if not publication.running and not held_up:
            # No operation has this serial.
            idle = Operation(OperationKind.IDLE, publication.last_call, None, since=0, serial=-1)
            waits = (*waits, Wait(idle, publication.quiet, anyone=True))
        doing = methods[-1].operation.waits(methods[-1].age) if methods else "runs"
        return Process(name, waits, publication.progress, publication.running, doing)

    def _wait(self, operation: Operation, age: float) -> Wait:
        if operation.kind in _GETS or operation.kind in _PUTS:
            return self._wait_on_channel(operation, age)
        if operation.kind in (OperationKind.CALL, OperationKind.LAUNCH, OperationKind.BROADCAST):
            peers = operation.peers
            return Wait(operation, age, peers, every=bool(peers), anyone=not peers, failing=operation.bounded)
        if operation.kind is OperationKind.CONNECT and operation.target in self.unknown:
            # Any running process may still launch it.
            state = "which has not been launched"
            return Wait(operation, age, anyone=True, state=state)
        # A query of a channel is answered by its process alone.
        target = f"{operation.target}:0" if operation.kind in _ANSWERED_BY_CHANNELS else operation.target
        peers = operation.peers or (target,)
        wakes = frozenset(peers) if operation.detached else frozenset[str]()
        return Wait(operation, age, peers, wakes=wakes, failing=operation.bounded)

    def _wait_on_channel(self, operation: Operation, age: float) -> Wait:
        channel = self.channels.get(operation.target, ChannelView())
        getting = operation.kind in _GETS
        wakes = channel.consumers if not getting else ()
        return Wait(
            operation,
            age,
            channel.producers if getting else channel.consumers,
            # Any running process, such as the driver, may connect to a channel and wake its waiters.
            anyone=True,
            wakes=frozenset(wakes) if operation.detached else frozenset(),
            failing=operation.bounded or (getting and channel.orphaned(operation.key or "default", self.dead)),
            role="producer" if getting else "consumer",
            state=channel.state(operation),
        )
