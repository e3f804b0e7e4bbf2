"""The state of a `KeyedQueue`, the effects of its commands, and its statistics."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

DEFAULT_KEY = "default"
# A sum of at least this share of a batch's weight may fall short of it by rounding alone.
_NEARLY = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """The metrics of one key of a channel.

    Attributes:
        puts: items that were accepted.
        gets: items that were delivered and not returned.
        bytes: bytes of the accepted items.
        depth: items neither taken nor reserved.
        waiting_puts: puts that wait for room now.
        waiting_gets: gets that wait for items now.
        put_wait: seconds that producers waited, summed over finished puts.
        get_wait: seconds that consumers waited, summed over finished gets.
    """

    puts: int
    gets: int
    bytes: int
    depth: int
    waiting_puts: int
    waiting_gets: int
    put_wait: float
    get_wait: float


T = TypeVar("T")

# The id of one put or get; the caller chooses it.
OpId: TypeAlias = Hashable
# The id of a producer or consumer, used to find its operations when it dies.
OwnerId: TypeAlias = Hashable


class Reason(StrEnum):
    """The reason why a put or get ends without effect."""

    CLOSED = "closed"
    FULL = "full"
    EMPTY = "empty"
    CANCELLED = "cancelled"


# Instances of these classes are made for every message, and frozen ones would cost three times as much to make.


@dataclass(slots=True)
class QueuedItem(Generic[T]):
    """One accepted item.

    Attributes:
        weight: the weight that it adds to a batch.
        size: its size in bytes, for the statistics.
        sequence: its number among all items of its key, from 0 in the order of acceptance.
    """

    payload: T
    weight: float
    size: int
    producer: OwnerId
    sequence: int


@dataclass(slots=True)
class Accepted:
    """The effect that a put is in the queue; its item survives its producer."""

    op_id: OpId


@dataclass(slots=True)
class Delivered(Generic[T]):
    """The effect that items go to a get; they come back if its consumer dies before it acknowledges them."""

    op_id: OpId
    items: list[QueuedItem[T]]


@dataclass(slots=True)
class Acknowledged(Generic[T]):
    """The effect that the consumer has the items; the queue has dropped them."""

    op_id: OpId
    items: list[QueuedItem[T]]


@dataclass(slots=True)
class Refused(Generic[T]):
    """The effect that a put or get ends without success; a put's payload is dropped.

    Attributes:
        why: details on why a get waited; empty if the reason suffices.
    """

    op_id: OpId
    reason: Reason
    dropped: T | None = None
    why: str = ""


@dataclass(slots=True)
class Lost(Generic[T]):
    """The effect that a producer died before its put was accepted; `dropped` is None if the item had not arrived."""

    op_id: OpId
    key: str
    producer: OwnerId
    dropped: T | None


Effect: TypeAlias = Accepted | Delivered[T] | Acknowledged[T] | Refused[T] | Lost[T]


@dataclass(slots=True, eq=False)
class Queue(Generic[T]):
    """The state of one key.

    Attributes:
        items: the items that are accepted and not reserved, in order.
        gets: the waiting gets, first come, first served; only the first has items reserved.
        blocked: the puts that wait for room, first come, first served; empty while a get waits.
        delivering: the number of deliveries not yet acknowledged.
        sequence: the sequence number of the next accepted item, which is also the number of items accepted so far.
        delivered: the number of items that were delivered and not returned.
    """

    key: str
    items: deque[QueuedItem[T]] = field(default_factory=deque["QueuedItem[T]"])
    gets: OrderedDict[OpId, Get[T]] = field(default_factory=OrderedDict["OpId", "Get[T]"])
    blocked: OrderedDict[OpId, Put[T]] = field(default_factory=OrderedDict["OpId", "Put[T]"])
    delivering: int = 0
    sequence: int = 0
    bytes: int = 0
    delivered: int = 0
    put_wait: float = 0.0
    get_wait: float = 0.0

    @property
    def idle(self) -> bool:
        return not (self.items or self.gets or self.blocked or self.delivering)

    def statistics(self) -> KeyStatistics:
        return KeyStatistics(
            self.sequence,
            self.delivered,
            self.bytes,
            len(self.items),
            len(self.blocked),
            len(self.gets),
            self.put_wait,
            self.get_wait,
        )


@dataclass(slots=True)
class Announced:
    """A put whose payload is still in transit."""

    key: str
    producer: OwnerId


@dataclass(slots=True)
class Put(Generic[T]):
    """A put that waits for room."""

    queue: Queue[T]
    item: QueuedItem[T]
    since: float


@dataclass(slots=True)
class Get(Generic[T]):
    """A get that waits; `need` is the weight of a batch, or None for a single item."""

    queue: Queue[T]
    consumer: OwnerId
    need: float | None
    since: float
    reserved: list[QueuedItem[T]]
    weight: float = 0

    @property
    def satisfied(self) -> bool:
        if self.need is None:
            return bool(self.reserved)
        if self.weight >= self.need or self.weight < self.need * _NEARLY:
            return self.weight >= self.need
        # Ten items of weight 0.1 weigh 1, although their sum with a rounding after each addition is less.
        return math.fsum(item.weight for item in self.reserved) >= self.need

    def shortfall(self) -> str:
        """Return how much weight a batch asked for and how much it has reserved, as text; empty for a single item."""
        if self.need is None:
            return ""
        count = len(self.reserved)
        there = f"{count} items of weight {self.weight:.15g} were there"
        text = f"a batch of weight {self.need:.15g} was asked for, {there}"
        idle = sum(1 for item in self.reserved if item.weight == 0)
        return f"{text}, {idle} of them of weight 0, which adds nothing" if idle else text


@dataclass(slots=True)
class Delivery(Generic[T]):
    """A delivery to a consumer that has not acknowledged it yet."""

    queue: Queue[T]
    consumer: OwnerId
    items: list[QueuedItem[T]]


Entry: TypeAlias = Announced | Put[T] | Get[T] | Delivery[T]
