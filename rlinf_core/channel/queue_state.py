"""The state of a `KeyedQueue`, the effects of its commands, and its statistics."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

DEFAULT_KEY = "default"


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """The metrics of one key of a channel.

    Attributes:
        puts: items that were accepted.
        gets: items that were delivered and did not come back.
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
# The id of a producer or consumer, by which its operations are found when it dies.
OwnerId: TypeAlias = Hashable


class Reason(StrEnum):
    """Why a put or get ends with nothing done."""

    CLOSED = "closed"
    FULL = "full"
    EMPTY = "empty"
    CANCELLED = "cancelled"


# These classes are made for every message: freezing them would triple the cost of making one.


@dataclass(slots=True)
class QueuedItem(Generic[T]):
    """One accepted item.

    Attributes:
        weight: what it adds to a batch.
        size: its bytes, for the statistics.
        sequence: its place among all items of its key, from 0 in the order of acceptance.
    """

    payload: T
    weight: float
    size: int
    producer: OwnerId
    sequence: int


@dataclass(slots=True)
class Accepted:
    """Effect: the put is in the queue; its item survives its producer."""

    op_id: OpId


@dataclass(slots=True)
class Delivered(Generic[T]):
    """Effect: these items go to the get; they come back if its consumer dies before it acknowledges them."""

    op_id: OpId
    items: list[QueuedItem[T]]


@dataclass(slots=True)
class Acknowledged(Generic[T]):
    """Effect: the consumer has these items; the queue has dropped them."""

    op_id: OpId
    items: list[QueuedItem[T]]


@dataclass(slots=True)
class Refused(Generic[T]):
    """Effect: the put or get ends with nothing done; a put's payload is dropped.

    Attributes:
        why: details on why a get waited; empty if the reason suffices.
    """

    op_id: OpId
    reason: Reason
    dropped: T | None = None
    why: str = ""


@dataclass(slots=True)
class Lost(Generic[T]):
    """Effect: the producer died before its put was accepted; the payload is None when it had not arrived."""

    op_id: OpId
    key: str
    producer: OwnerId
    dropped: T | None


Effect: TypeAlias = Accepted | Delivered[T] | Acknowledged[T] | Refused[T] | Lost[T]


@dataclass(slots=True, eq=False)
class Queue(Generic[T]):
    """The state of one key.

    Attributes:
        items: accepted and not reserved, in order.
        gets: waiting gets, first come first served; only the first has items reserved.
        blocked: puts that wait for room, first come; empty while a get waits.
        delivering: the number of deliveries not yet taken.
        sequence: the place that the next accepted item gets, and so the number of those before it.
        delivered: items that were delivered and did not come back.
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
    """A put whose payload is still under way."""

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
        return bool(self.reserved) if self.need is None else self.weight >= self.need

    def shortfall(self) -> str:
        """Return what a batch that is not full lacks, in words."""
        if self.need is None:
            return ""
        count = len(self.reserved)
        text = f"a batch of weight {self.need:g} was asked for, {count} items of weight {self.weight:g} were there"
        idle = sum(1 for item in self.reserved if item.weight == 0)
        return f"{text}, {idle} of them of weight 0, which adds nothing" if idle else text


@dataclass(slots=True)
class Delivery(Generic[T]):
    """Items on their way to a consumer."""

    queue: Queue[T]
    consumer: OwnerId
    items: list[QueuedItem[T]]


Entry: TypeAlias = Announced | Put[T] | Get[T] | Delivery[T]
