from __future__ import annotations

import pytest

from rlinf_core.channel import keyed_queue
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.queue_state import Accepted, Acknowledged, Delivered, Effect, Lost, Reason, Refused


def summaries(effects: list[Effect[str]]) -> list[tuple[object, ...]]:
    """Effects as short tuples."""
    result: list[tuple[object, ...]] = []
    for effect in effects:
        match effect:
            case Accepted(op_id):
                result.append(("accepted", op_id))
            case Delivered(op_id, items):
                result.append(("delivered", op_id, "".join(item.payload for item in items)))
            case Acknowledged(op_id, items):
                result.append(("taken", op_id, "".join(item.payload for item in items)))
            case Refused(op_id, reason, dropped):
                result.append((reason.value, op_id, dropped))
            case Lost(op_id, key, producer, dropped):
                result.append(("lost", op_id, key, producer, dropped))
    return result


def filled(payloads: str, *, maxsize: int = 0, weight: float = 1) -> KeyedQueue[str]:
    queue: KeyedQueue[str] = KeyedQueue(maxsize)
    for payload in payloads:
        queue.put(f"put-{payload}", payload, weight=weight, producer="producer")
    return queue


def contents(queue: KeyedQueue[str], key: str = "default") -> str:
    return "".join(item.payload for item in queue.peek_all(key))


def test_items_leave_in_the_order_of_their_key() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    for payload, key in (("a", "x"), ("b", "y"), ("c", "x")):
        assert summaries(queue.put(payload, payload, key=key)) == [("accepted", payload)]
    assert summaries(queue.get(1, key="x")) == [("delivered", 1, "a")]
    assert summaries(queue.get(2, key="y")) == [("delivered", 2, "b")]
    assert summaries(queue.get(3, key="x")) == [("delivered", 3, "c")]


def test_waiting_gets_are_served_first_come() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    assert queue.get(1) == queue.get(2) == []
    assert summaries(queue.put("p", "a")) == [("accepted", "p"), ("delivered", 1, "a")]
    assert summaries(queue.put("q", "b")) == [("accepted", "q"), ("delivered", 2, "b")]


def test_a_full_queue_holds_that_put_back_and_nothing_else() -> None:
    queue = filled("ab", maxsize=2)
    assert queue.full()
    assert queue.put("third", "c") == []
    assert summaries(queue.put("other", "d", key="other")) == [("accepted", "other")]
    assert contents(queue) == "ab"
    assert summaries(queue.get(1)) == [("delivered", 1, "a"), ("accepted", "third")]
    assert contents(queue) == "bc"


def test_blocked_puts_come_in_as_they_came() -> None:
    queue = filled("a", maxsize=1)
    for payload in "bcd":
        queue.put(payload, payload)
    for op_id, payload in enumerate("abc"):
        assert ("delivered", op_id, payload) in summaries(queue.get(op_id))
    assert contents(queue) == "d"


def test_a_batch_takes_items_until_their_weights_reach_it() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    for payload, weight in (("a", 2), ("b", 2), ("c", 2), ("d", 2)):
        queue.put(payload, payload, weight=weight)
    assert summaries(queue.get(1, 5)) == [("delivered", 1, "abc")]
    assert queue.get(2, 2.5) == []
    assert summaries(queue.put("e", "e", weight=0.5)) == [("accepted", "e"), ("delivered", 2, "de")]


def test_batches_never_interleave() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.get(1, 2)
    queue.get(2, 2)
    delivered = [effect for payload in "abcd" for effect in summaries(queue.put(payload, payload, weight=1))]
    assert [effect for effect in delivered if effect[0] == "delivered"] == [
        ("delivered", 1, "ab"),
        ("delivered", 2, "cd"),
    ]


def test_reserved_items_do_not_count_against_maxsize() -> None:
    queue = filled("abcd", maxsize=4)
    assert queue.put("e", "e", weight=1) == []
    assert summaries(queue.get(1, 8)) == [("accepted", "e")]
    for payload in "fg":
        assert summaries(queue.put(payload, payload, weight=1)) == [("accepted", payload)]
    assert not queue.full()
    assert summaries(queue.put("h", "h", weight=1)) == [("accepted", "h"), ("delivered", 1, "abcdefgh")]


@pytest.mark.parametrize(("weight", "need", "count"), [(0.1, 1, 10), (1 / 3, 1, 3), (0.1, 0.3, 3), (0.7, 1.4, 2)])
def test_fractions_weigh_what_they_add_up_to(weight: float, need: float, count: int) -> None:
    queue = filled("x" * (count + 1), weight=weight)
    assert summaries(queue.get("g", need)) == [("delivered", "g", "x" * count)]


def test_the_wait_for_a_batch_tells_its_weights_exactly() -> None:
    queue = filled("a", weight=1_000_000)
    queue.get("g", 1_000_001)
    assert queue.waiting("g") == "a batch of weight 1000001 was asked for, 1 items of weight 1000000 were there"


def test_weightless_items_are_taken_along_and_the_wait_says_so() -> None:
    queue = filled("ab", weight=0)
    assert queue.get(1, 2) == []
    queue.put("c", "c", weight=1)
    words = "a batch of weight 2 was asked for, 3 items of weight 1 were there, 2 of them of weight 0"
    assert (queue.waiting(1) or "").startswith(words)
    [refused] = queue.cancel(1)
    assert isinstance(refused, Refused)
    assert refused.why == words + ", which adds nothing"
    assert contents(queue) == "abc"
    queue.put("d", "d", weight=1)
    queue.put("e", "e", weight=0)
    assert summaries(queue.get(2, 2)) == [("delivered", 2, "abcd")]


def test_without_waiting() -> None:
    queue: KeyedQueue[str] = KeyedQueue(1)
    assert summaries(queue.get(1, wait=False)) == [("empty", 1, None)]
    queue.put("a", "a", weight=1)
    assert summaries(queue.put("b", "b", wait=False)) == [("full", "b", "b")]
    assert summaries(queue.get(2, 5, wait=False)) == [("empty", 2, None)]
    assert contents(queue) == "a"
    assert summaries(queue.get(3, wait=False)) == [("delivered", 3, "a")]


def test_a_cancelled_batch_gives_back_in_order_to_the_next() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.get(1, 10)
    for payload in "abc":
        queue.put(payload, payload, weight=1)
    queue.get(2)
    queue.get(3, 2)
    assert summaries(queue.cancel(1)) == [("cancelled", 1, None), ("delivered", 2, "a"), ("delivered", 3, "bc")]


def test_a_cancelled_put_was_not_accepted() -> None:
    queue = filled("a", maxsize=1)
    queue.put("b", "b")
    assert summaries(queue.cancel("b")) == [("cancelled", "b", "b")]
    assert queue.cancel("b") == queue.cancel("put-a") == []
    queue.get(1)
    assert contents(queue) == ""


def test_a_dead_consumer_gives_back_what_it_had_not_taken() -> None:
    queue = filled("abc")
    queue.get(1, consumer="dead")
    queue.get(2, consumer="other")
    assert summaries(queue.remove("dead")) == []
    assert contents(queue) == "ac"
    assert summaries(queue.remove("other")) == []
    assert contents(queue) == "abc"


def test_what_was_taken_does_not_come_back() -> None:
    queue = filled("ab")
    queue.get(1, consumer="dead")
    assert summaries(queue.taken(1)) == [("taken", 1, "a")]
    assert queue.taken(1) == queue.remove("dead") == []
    assert contents(queue) == "b"


def test_the_dead_get_nothing_more() -> None:
    queue = filled("a")
    queue.get(1, consumer="dead")
    queue.get(2, consumer="dead")
    queue.get(3, consumer="alive")
    assert summaries(queue.remove("dead")) == [("delivered", 3, "a")]


def test_what_comes_back_stands_before_what_a_batch_had_reserved() -> None:
    queue = filled("a")
    queue.get(1, consumer="dead")
    queue.get(2, 3, consumer="alive")
    queue.put("b", "b", weight=1)
    assert queue.remove("dead") == []
    assert summaries(queue.put("c", "c", weight=1)) == [("accepted", "c"), ("delivered", 2, "abc")]


def test_a_dead_producer_loses_what_was_not_accepted_only() -> None:
    queue = filled("a", maxsize=1)
    queue.put("b", "b", producer="producer")
    queue.put("c", "c", producer="other")
    queue.announce("half", key="far", producer="producer")
    assert summaries(queue.remove("producer")) == [
        ("lost", "b", "default", "producer", "b"),
        ("lost", "half", "far", "producer", None),
    ]
    assert summaries(queue.get(1)) == [("delivered", 1, "a"), ("accepted", "c")]


def test_an_announced_put_arrives_like_any_other() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.announce("p", producer="producer")
    assert queue.depth() == 0
    assert summaries(queue.put("p", "a", producer="producer")) == [("accepted", "p")]
    assert queue.remove("producer") == []
    assert contents(queue) == "a"


def test_an_announced_put_can_be_cancelled() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.announce("p", producer="producer")
    assert summaries(queue.cancel("p")) == [("cancelled", "p", None)]
    assert queue.remove("producer") == []


def test_a_closed_channel_drains() -> None:
    queue = filled("ab", maxsize=2)
    queue.put("c", "c")
    assert summaries(queue.close()) == [("closed", "c", "c")]
    assert queue.close() == []
    assert summaries(queue.put("d", "d")) == [("closed", "d", "d")]
    assert summaries(queue.get(1, 5)) == [("delivered", 1, "ab")]
    queue.taken(1)
    assert queue.drained
    assert summaries(queue.get(2)) == [("closed", 2, None)]
    assert summaries(queue.get(3, 1, wait=False)) == [("closed", 3, None)]


def test_closing_gives_a_batch_its_remainder() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.get(1, 5, key="x")
    queue.put("a", "a", weight=1, key="x")
    queue.get(2, 5, key="y")
    queue.get(3, key="y")
    assert summaries(queue.close()) == [("delivered", 1, "a"), ("closed", 2, None), ("closed", 3, None)]


def test_the_last_gets_wait_for_deliveries_under_way() -> None:
    queue = filled("a")
    queue.get(1, consumer="slow")
    queue.close()
    assert not queue.drained
    assert queue.get(2, consumer="next") == []
    assert summaries(queue.get(9, wait=False)) == [("empty", 9, None)]
    assert summaries(queue.remove("slow")) == [("delivered", 2, "a")]
    queue.get(3, consumer="last")
    assert summaries(queue.taken(2)) == [("taken", 2, "a"), ("closed", 3, None)]
    assert queue.drained


def test_a_ticket_is_used_once_at_a_time() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.get(1)
    with pytest.raises(ValueError, match="in use"):
        queue.get(1)


def test_statistics_by_key() -> None:
    queue: KeyedQueue[str] = KeyedQueue(1)
    queue.put("a", "a", size=10, now=0, key="x")
    queue.put("b", "b", size=5, now=1, key="x")
    queue.get(1, now=4, key="x")
    queue.get(2, now=4, key="x")
    queue.get(3, now=5, key="x")
    queue.get(4, now=5, key="y")
    shown = queue.statistics()["x"]
    assert (shown.puts, shown.gets, shown.bytes, shown.depth) == (2, 2, 15, 0)
    assert (shown.waiting_puts, shown.waiting_gets, shown.put_wait, shown.get_wait) == (0, 1, 3, 0)
    queue.cancel(3, now=7)
    queue.cancel(2, now=7)
    shown = queue.statistics()["x"]
    assert (shown.gets, shown.depth, shown.waiting_gets, shown.get_wait) == (1, 1, 0, 2)
    assert queue.statistics()["y"].waiting_gets == 1


def test_only_the_latest_of_empty_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_queue, "_REMEMBERED_KEYS", 3)
    queue: KeyedQueue[str] = KeyedQueue()
    queue.get(1, key="kept", wait=False)
    for number in range(10):
        key = f"episode-{number}"
        queue.put("kept", "k", key="kept")
        queue.put("p", "a", size=2, key=key)
        queue.get("g", key=key)
        queue.taken("g")
    assert len(queue.statistics()) == 4
    assert set(queue.statistics()) == {"kept", "episode-7", "episode-8", "episode-9"}
    assert queue.depth("kept") == 10


def test_ten_thousand_keys_and_waiters_stay_quick() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    count = 10_000
    for number in range(count):
        queue.get(("poll", number))
        queue.get(("key", number), key=str(number))
    for number in range(count - 1):
        assert len(queue.cancel(("poll", number))) == 1
    assert summaries(queue.put("p", "a")) == [("accepted", "p"), ("delivered", ("poll", count - 1), "a")]
    assert summaries(queue.put("q", "a", key="777")) == [("accepted", "q"), ("delivered", ("key", 777), "a")]
    closed = queue.close()
    assert len(closed) == count - 1
    assert {effect.reason for effect in closed if isinstance(effect, Refused)} == {Reason.CLOSED}


def test_held_back_queues_take_only_what_somebody_waits_for() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.put(1, "before")
    assert queue.hold_back(True) == []
    assert queue.put(2, "waits") == []
    assert queue.full()
    (refused,) = queue.put(3, "now or never", wait=False)
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.FULL
    assert summaries(queue.get(4)) == [("delivered", 4, "before")]
    assert summaries(queue.get(5)) == [("accepted", 2), ("delivered", 5, "waits")]
    queue.get(6, key="hungry")
    assert Accepted(7) in queue.put(7, "asked for", key="hungry")


def test_what_was_held_back_goes_on_in_order() -> None:
    queue: KeyedQueue[str] = KeyedQueue(maxsize=2)
    queue.hold_back(True)
    for op_id in (1, 2, 3):
        queue.put(op_id, str(op_id))
    assert queue.hold_back(False) == [Accepted(1), Accepted(2)]
    assert [item.payload for item in queue.peek_all()] == ["1", "2"]
