from __future__ import annotations

import random
from typing import Any

import numpy
import pytest

from rlinf_core import Channel, ChannelClosed, LeastLoaded, RoundRobin, distribute, rank_key
from rlinf_core.load_balancing import Balancer

RANKS = 4


def skewed(count: int) -> list[int]:
    """Lengths as rollouts have them: most are short, a few very long; the short ones finish first."""
    dice = random.Random(3)
    return sorted(int(dice.paretovariate(1.2) * 100) for _ in range(count))


def shares(lengths: list[int], balancer: Balancer) -> tuple[list[list[int]], Balancer]:
    source, target = Channel.create("from", local=True), Channel.create("to", local=True)
    for length in lengths:
        source.put(length)
    source.close()
    done = distribute(source, target, balancer, weight=float)
    return [target.peek_all(rank_key(rank)) for rank in range(RANKS)], done


def test_round_robin_deals_in_turn_and_keeps_the_order() -> None:
    lengths = list(range(10))
    result, balancer = shares(lengths, RoundRobin(RANKS))
    assert result == [lengths[rank::RANKS] for rank in range(RANKS)]
    assert balancer.counts == (3, 3, 2, 2)


def test_by_weight_the_loads_are_closer_than_in_turn() -> None:
    lengths = skewed(400)
    in_turn, _ = shares(lengths, RoundRobin(RANKS))
    by_weight, balancer = shares(lengths, LeastLoaded(RANKS))
    mean = sum(lengths) / RANKS
    worst = max(map(sum, by_weight))
    assert sorted(length for share in by_weight for length in share) == lengths
    assert worst <= max(map(sum, in_turn))
    assert worst <= mean + max(lengths)
    assert balancer.loads == tuple(map(sum, by_weight))


def test_items_carry_their_weight_to_the_ranks() -> None:
    source, target = Channel.create("from", local=True), Channel.create("to", local=True)
    for length in (3, 5):
        source.put(length)
    distribute(source, target, RoundRobin(1), weight=float, count=2)
    assert target.get_batch(8, key=rank_key(0)) == [3, 5]


def test_no_more_is_taken_than_asked_for() -> None:
    source, target = Channel.create("from", local=True), Channel.create("to", local=True)
    for index in range(5):
        source.put(index)
    distribute(source, target, RoundRobin(2), count=3)
    assert source.qsize() == 2


def test_a_closed_target_is_told() -> None:
    source, target = Channel.create("from", local=True), Channel.create("to", local=True)
    for number in range(3):
        source.put(number)
    target.close()
    with pytest.raises(ChannelClosed):
        distribute(source, target, RoundRobin(1), count=3)
    assert source.peek_all() == [1, 2], "nothing is taken once a put has failed"


def test_round_robin_gives_every_rank_about_the_same() -> None:
    rollout_output_queue, to_train = Channel.create("rollout_output_queue", local=True), Channel.create("t", local=True)
    lengths = skewed(400)
    # The generators put what is finished, so the lengths grow; the four longest of 400 are beyond comparison.
    for length in lengths[:-RANKS]:
        rollout_output_queue.put([0] * length, weight=length)
    rollout_output_queue.close()
    balancer = distribute(rollout_output_queue, to_train, RoundRobin(RANKS), weight=len)
    trained = [sum(map(len, to_train.get_batch(balancer.loads[rank], key=rank_key(rank)))) for rank in range(RANKS)]
    assert tuple(trained) == balancer.loads
    assert max(balancer.loads) * RANKS / sum(balancer.loads) < 1.1
    # What a split into consecutive parts would have given, as by a sampler that knows nothing of lengths.
    quarter = (len(lengths) - RANKS) // RANKS
    parts = [sum(lengths[rank * quarter : (rank + 1) * quarter]) for rank in range(RANKS)]
    assert max(parts) * RANKS / sum(parts) > 2


def test_an_item_that_cannot_be_weighed_is_nobodys() -> None:
    source, target = Channel.create("from", local=True), Channel.create("to", local=True)
    source.put(1)
    with pytest.raises(ValueError, match="`weight` is -1"):
        distribute(source, target, RoundRobin(1), weight=lambda item: -1)
    assert target.empty(rank_key(0))


def test_what_makes_no_sense_is_refused_before_anything_is_taken() -> None:
    source, target = Channel.create("from", local=True), Channel.create("to", local=True)
    source.put(1)
    hand: Any = distribute
    for call, said in (
        (lambda: hand(3, target, RoundRobin(2)), "`source` is 3, expected a channel"),
        (lambda: hand(source, "to", RoundRobin(2)), "`target` is 'to', expected a channel"),
        (lambda: hand(source, target, RoundRobin), "`balancer` is .*, expected one such as"),
        (lambda: hand(source, target, RoundRobin(2), weight=3), "`weight` is 3, expected a function"),
        (lambda: hand(source, target, RoundRobin(2), key=[3]), "a key is text, a number"),
    ):
        with pytest.raises(TypeError, match=said):
            call()
    for count in (-1, 1.5, "3", float("nan")):
        with pytest.raises(ValueError, match=r"`count` is .*, expected an integer >= 0, or None"):
            hand(source, target, RoundRobin(2), count=count)
    assert source.qsize() == 1


@pytest.mark.parametrize("rank", [-1, "2", 2.0, None, True])
def test_what_is_no_rank_has_no_key(rank: Any) -> None:
    with pytest.raises(ValueError, match="is not a rank: ranks are integers >= 0"):
        rank_key(rank)
    assert rank_key(numpy.int64(2)) == "rank-2"  # pyright: ignore[reportArgumentType]
