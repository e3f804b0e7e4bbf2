"""Handing the items of a channel to data-parallel ranks.

Rollouts differ in length, so whoever trains on them in parallel would wait for the rank that got the long ones. Here
one process takes what comes, and puts each item where its rank will get it:

    balancer = distribute(rollouts, to_train, LeastLoaded(num_ranks=4), weight=lambda rollout: rollout.length)

and rank 2 gets its share by `to_train.get_batch(..., key=rank_key(2))`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlinf_core.arguments import as_index, short_repr
from rlinf_core.channel.arguments import Key
from rlinf_core.channel.channel import Channel
from rlinf_core.channel.load_balancing import Balancer, check_balancer
from rlinf_core.channel.wire import DEFAULT_KEY
from rlinf_core.collective.work import Work
from rlinf_core.errors import ChannelClosed

B = TypeVar("B", bound=Balancer)
# Puts that may be under way: a rank whose queue is full holds the others back only after so many.
_UNDER_WAY = 64


def rank_key(rank: int) -> str:
    """Return the key under which a rank finds its items.

    Raises:
        ValueError: there is no such rank.
    """
    number = as_index(rank)
    if number is None or number < 0:
        raise ValueError(f"{short_repr(rank)} is not a rank: ranks are whole numbers from 0")
    return f"rank-{number}"


def distribute(
    source: Channel,
    target: Channel,
    balancer: B,
    *,
    weight: Callable[[Any], float] = lambda item: 1.0,
    key: Key = DEFAULT_KEY,
    count: int | None = None,
) -> B:
    """Take items of `source` until it is closed and drained, and puts each into `target` under the key of its rank.

    Args:
        source: where the items come from.
        target: where the ranks get them, each under its `rank_key`, with their weight.
        balancer: chooses the ranks: `RoundRobin`, or `LeastLoaded` to balance by weight.
        weight: of an item, a finite number from 0; by default all weigh the same.
        key: of the queue in `source`.
        count: how many items to hand out at most; by default all.

    Returns:
        The balancer, which knows what each rank was given.

    Raises:
        TypeError: something given is of another kind; nothing was taken. So for ValueError where `count` is.
        ChannelClosed: `target` was closed: the last item that was taken is not in it.
        Exception: whatever else a get or a put raises.
    """
    for what, channel in (("source", source), ("target", target)):
        if not isinstance(channel, Channel):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise TypeError(f"`{what}` is {short_repr(channel)}, expected a channel")
    check_balancer(balancer)
    if not callable(weight):
        raise TypeError(f"`weight` is {short_repr(weight)}, expected a function of an item, as `len`")
    _check_count(count)
    under_way: list[Work[None]] = []
    handed_out = 0
    while count is None or handed_out < count:
        try:
            item = source.get(key)
        except ChannelClosed:
            break
        heavy = weight(item)
        rank = balancer.assign(heavy)
        under_way.append(target.put(item, heavy, rank_key(rank), async_op=True))
        handed_out += 1
        if len(under_way) >= _UNDER_WAY:
            under_way.pop(0).wait()
    for work in under_way:
        work.wait()
    return balancer


def _check_count(count: int | None) -> None:
    number = 0 if count is None else as_index(count)
    if number is None or number < 0:
        raise ValueError(f"`count` is {short_repr(count)}, expected a whole number from 0, or None for all")
