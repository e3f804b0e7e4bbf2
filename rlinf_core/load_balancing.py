"""Load balancing: assigning items of different weight to data-parallel ranks, one at a time as they arrive.

    balancer = LeastLoaded(num_ranks=4)
    async for trajectory in channel:
        rank = balancer.assign(trajectory.length)

The balancers only do the bookkeeping: items and their delivery are up to the caller.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlinf_core.channel.channel import Channel
from rlinf_core.channel.operation import Key, checked_weight
from rlinf_core.channel.wire import DEFAULT_KEY
from rlinf_core.collective.work import Work
from rlinf_core.errors import ChannelClosed
from rlinf_core.suggest import as_index, short_repr

T = TypeVar("T")


class Balancer(ABC):
    """A policy that chooses the rank of the next item.

    Args:
        num_ranks: the number of ranks.

    Raises:
        ValueError: `num_ranks` is not positive.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = _checked_ranks(num_ranks)
        self._loads: list[float] = [0] * self.num_ranks
        self._counts = [0] * self.num_ranks

    @property
    def loads(self) -> tuple[float, ...]:
        """The total weight assigned to each rank."""
        return tuple(self._loads)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of items assigned to each rank."""
        return tuple(self._counts)

    def assign(self, weight: float = 1) -> int:
        """Assign an item of this weight; return its rank.

        Raises:
            ValueError: the weight is negative or not finite.
        """
        weight = checked_weight(weight)
        rank = self._choose()
        self._loads[rank] += weight
        self._counts[rank] += 1
        self._on_assigned(rank)
        return rank

    @abstractmethod
    def _choose(self) -> int:
        """Return the rank for the next item."""

    def _on_assigned(self, rank: int) -> None:
        """Record that `rank` got an item."""
        del rank


class RoundRobin(Balancer):
    """Assignment to each rank in turn.

    Rollouts finish in about the order of their length, so a queue holds ever longer ones: in turn, each rank gets as
    many short and long ones as the others.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._next = 0

    def _choose(self) -> int:
        rank = self._next
        self._next = (rank + 1) % self.num_ranks
        return rank


class LeastLoaded(Balancer):
    """Assignment to the rank with the least weight so far; ties go to the fewest items, then to the lowest rank.

    Greedy list scheduling: whatever the order of items, the heaviest load is at most the mean plus one item, thus at
    most `2 - 1/num_ranks` times the best possible (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._heap: list[tuple[float, int, int]] = [(0, 0, rank) for rank in range(self.num_ranks)]

    def _choose(self) -> int:
        return self._heap[0][2]

    def _on_assigned(self, rank: int) -> None:
        heapq.heapreplace(self._heap, (self._loads[rank], self._counts[rank], rank))


def _checked_ranks(num_ranks: int) -> int:
    return _whole(num_ranks, 1, "`num_ranks` is {}, expected an integer >= 1")


def _whole(value: object, least: int, message: str) -> int:
    """Return an argument as an int.

    Raises:
        ValueError: `value` is no integer or less than `least`; the value replaces `{}` in `message`.
    """
    number = as_index(value)
    if number is None or number < least:
        raise ValueError(message.format(short_repr(value)))
    return number


def partition(weights: Sequence[float], num_ranks: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Divide a known set of items, heaviest first (longest processing time).

    Args:
        weights: the weight of each item.
        num_ranks: the number of ranks.
        equal_counts: whether no rank may get over one item more than another, as data-parallel steps of a fixed
            number of samples need it; an item then goes to the lightest rank that still has room.

    Returns:
        For each rank the indices of its items, ascending. Without `equal_counts` the heaviest load is at most
        `4/3 - 1/(3 * num_ranks)` times the best possible (Graham, 1969).

    Raises:
        ValueError: there is no rank, or a weight is negative or not finite.
    """
    num_ranks = _checked_ranks(num_ranks)
    weights = [checked_weight(weight) for weight in weights]
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    # With equal counts each rank gets `least` items, and `extra` ranks get one more.
    least, extra = divmod(len(weights), num_ranks)
    open_ranks = [(0.0, 0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        # A rank that is full stays full, so it never comes back.
        while equal_counts and open_ranks[0][1] >= least + (extra > 0):
            heapq.heappop(open_ranks)
        load, count, rank = open_ranks[0]
        parts[rank].append(index)
        if count == least:
            extra -= 1
        heapq.heapreplace(open_ranks, (load + weights[index], count + 1, rank))
    return [sorted(part) for part in parts]


B = TypeVar("B", bound=Balancer)
# Unfinished puts at most: beyond that number, a rank whose queue is full delays the others.
_UNDER_WAY = 64


def rank_key(rank: int) -> str:
    """Return the key of the queue that holds a rank's items.

    Raises:
        ValueError: `rank` is not an integer from 0.
    """
    return f"rank-{_whole(rank, 0, '{} is not a rank: ranks are integers >= 0')}"


def distribute(
    source: Channel,
    target: Channel,
    balancer: B,
    *,
    weight: Callable[[Any], float] = lambda item: 1.0,
    key: Key = DEFAULT_KEY,
    count: int | None = None,
) -> B:
    """Take items of `source` until it is closed and drained, and put each into `target` under the key of its rank.

    Args:
        source: where the items come from.
        target: where the ranks get them, each under its `rank_key`, with their weight.
        balancer: the policy that chooses ranks: `RoundRobin`, or `LeastLoaded` to balance by weight.
        weight: the weight of an item, a finite number from 0; by default all weigh the same.
        key: the key of the queue in `source`.
        count: the maximum number of items to hand out; by default all.

    Returns:
        The balancer, with the loads and counts of all ranks.

    Raises:
        TypeError: an argument has the wrong type; nothing was taken.
        ValueError: `count` is not an integer from 0 (nothing was taken), or a weight is invalid.
        ChannelClosed: `target` was closed.
        Exception: any other error of a get, of a put or of `weight`. After an error, the last items that were taken, at
            most 64, may be in neither channel.
    """
    for what, channel in (("source", source), ("target", target)):
        if not isinstance(channel, Channel):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise TypeError(f"`{what}` is {short_repr(channel)}, expected a channel")
    if not isinstance(balancer, Balancer):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise TypeError(f"`balancer` is {short_repr(balancer)}, expected one such as `LeastLoaded(num_ranks=2)`")
    if not callable(weight):
        raise TypeError(f"`weight` is {short_repr(weight)}, expected a function of an item, as `len`")
    _whole(0 if count is None else count, 0, "`count` is {}, expected an integer >= 0, or None for all")
    under_way: list[Work[None]] = []
    handed_out = 0
    while count is None or handed_out < count:
        while under_way and (under_way[0].settled or len(under_way) >= _UNDER_WAY):
            under_way.pop(0).wait()
        try:
            item = source.get(key)
        except ChannelClosed:
            break
        heavy = weight(item)
        rank = balancer.assign(heavy)
        under_way.append(target.put(item, heavy, rank_key(rank), async_op=True))
        handed_out += 1
    for work in under_way:
        work.wait()
    return balancer
