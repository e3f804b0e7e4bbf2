"""The state of a `KeyedQueue`: that of each key, and every put and get that has not ended."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from rlinf_core.channel.effects import Item, OpId, OwnerId
from rlinf_core.channel.statistics import Tally

T = TypeVar("T")


class Queue(Generic[T]):
    """The state of one key.

    Attributes:
        key: which one.
        items: accepted and not reserved, in order.
        gets: what waits for items, first come; only the first one has items reserved.
        blocked: puts that wait for room, first come; empty while a get waits.
        delivering: how many deliveries have not been taken.
        sequence: the place that the next accepted item gets.
        tally: what has gone through.
    """

    __slots__ = ("blocked", "delivering", "gets", "items", "key", "sequence", "tally")

    def __init__(self, key: str) -> None:
        self.key = key
        self.items: deque[Item[T]] = deque()
        self.gets: OrderedDict[OpId, Get[T]] = OrderedDict()
        self.blocked: OrderedDict[OpId, Put[T]] = OrderedDict()
        self.delivering = 0
        self.sequence = 0
        self.tally = Tally()

    @property
    def idle(self) -> bool:
        """Whether nothing is here or under way."""
        return not (self.items or self.gets or self.blocked or self.delivering)


@dataclass(slots=True)
class Announced:
    """A put whose payload is still under way."""

    key: str
    producer: OwnerId


@dataclass(slots=True)
class Put(Generic[T]):
    """A put that waits for room."""

    queue: Queue[T]
    item: Item[T]
    since: float


@dataclass(slots=True)
class Get(Generic[T]):
    """A get that waits; `need` is the weight of a batch, or None for a single item."""

    queue: Queue[T]
    consumer: OwnerId
    need: float | None
    since: float
    reserved: list[Item[T]]
    weight: float = 0

    @property
    def satisfied(self) -> bool:
        """Whether it has all that it asked for."""
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
    items: list[Item[T]]


Entry: TypeAlias = Announced | Put[T] | Get[T] | Delivery[T]
