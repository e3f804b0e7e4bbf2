"""The decisions of a queue: the actor around it carries these out, and decides nothing itself."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

# Names one put or get for as long as it lives; whoever sends commands chooses it.
OpId: TypeAlias = Hashable
# Names a producer or consumer, so that what it left behind can be found when it dies.
OwnerId: TypeAlias = Hashable


class Reason(StrEnum):
    """Why a put or get ends with nothing done."""

    CLOSED = "closed"
    FULL = "full"
    EMPTY = "empty"
    CANCELLED = "cancelled"


# The classes below are made for every message, so they are not frozen: that would triple the cost of making one.


@dataclass(slots=True)
class Item(Generic[T]):
    """One accepted item.

    Attributes:
        payload: what was put.
        weight: what it adds to a batch.
        size: its bytes, for the statistics.
        producer: who put it.
        sequence: its place among all items of its key, from 0 in the order of acceptance.
    """

    payload: T
    weight: float
    size: int
    producer: OwnerId
    sequence: int


@dataclass(slots=True)
class Accepted:
    """The put `op_id` is in the queue: its item survives its producer."""

    op_id: OpId


@dataclass(slots=True)
class Delivered(Generic[T]):
    """The get `op_id` has these items; they come back if its consumer dies before `taken`."""

    op_id: OpId
    items: list[Item[T]]


@dataclass(slots=True)
class Acknowledged(Generic[T]):
    """The consumer has these items; nothing here refers to them any more."""

    op_id: OpId
    items: list[Item[T]]


@dataclass(slots=True)
class Refused(Generic[T]):
    """The put or get `op_id` ends with nothing done.

    Attributes:
        op_id: which one.
        reason: why.
        dropped: the payload of a put, which is not in the queue; None for a get.
        why: what kept a get waiting, in words; empty where the reason says all.
    """

    op_id: OpId
    reason: Reason
    dropped: T | None = None
    why: str = ""


@dataclass(slots=True)
class Lost(Generic[T]):
    """The producer died before its put was accepted.

    Attributes:
        op_id: the put.
        key: the queue that it was for.
        producer: who died.
        dropped: the payload, or None when it had not arrived.
    """

    op_id: OpId
    key: str
    producer: OwnerId
    dropped: T | None


Effect: TypeAlias = Accepted | Delivered[T] | Acknowledged[T] | Refused[T] | Lost[T]
