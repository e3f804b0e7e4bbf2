"""The mailbox: answers are found by their operation alone, and acknowledgements are read once."""

from __future__ import annotations

import pytest

from rlinf_core.channel.wire import (
    ACK_SLOTS,
    ID_STEP,
    LARGEST,
    NO_ACK_SLOT,
    SIZE,
    BrokerMailbox,
    ClientMailbox,
    slot_of,
)


def both_sides() -> tuple[ClientMailbox, BrokerMailbox]:
    shared = memoryview(bytearray(SIZE + 100))
    return ClientMailbox(shared, ordered=True), BrokerMailbox(shared)


def end(slots: ClientMailbox, op_id: int) -> None:
    slots.channel_done(op_id)
    slots.client_done(op_id)


def test_an_answer_is_found_by_its_operation_alone() -> None:
    slots, answers = both_sides()
    first, second = slots.reserve(3 * ID_STEP), slots.reserve(4 * ID_STEP)
    assert slot_of(first) != slot_of(second)
    assert not slots.answered(first)
    assert not answers.write_answer(first), "nobody asked for a message"
    assert slots.answered(first)
    assert not slots.answered(second)
    end(slots, first)
    again = slots.reserve(5 * ID_STEP)
    assert slot_of(again) == slot_of(first)
    assert not slots.answered(again)


def test_the_largest_items_of_all_slots_do_not_overlap() -> None:
    slots, answers = both_sides()
    op_ids = [slots.reserve(number * ID_STEP) for number in range(1, ID_STEP)]
    items = [bytes([number]) * LARGEST for number in range(1, ID_STEP)]
    for ack_slot, (op_id, item) in enumerate(zip(op_ids, items, strict=True)):
        answers.write_item(op_id, ack_slot, item)
    assert [slots.read_item(op_id) for op_id in op_ids] == list(enumerate(items))
    assert all(slots.answered(op_id) for op_id in op_ids)


def test_a_wakeup_is_requested_for_one_operation() -> None:
    slots, answers = both_sides()
    op_id = slots.reserve(ID_STEP)
    slots.request_wakeup(op_id)
    assert answers.write_item(op_id, 0, b"")
    end(slots, op_id)
    later = slots.reserve(2 * ID_STEP)
    assert slot_of(later) == slot_of(op_id)
    assert not answers.write_item(later, 0, b"")


def test_an_operation_without_a_slot_keeps_its_id() -> None:
    slots, _ = both_sides()
    taken = [slots.reserve(number * ID_STEP) for number in range(1, ID_STEP)]
    assert sorted(map(slot_of, taken)) == list(range(1, ID_STEP))
    assert slots.reserve(99 * ID_STEP) == 99 * ID_STEP
    end(slots, 99 * ID_STEP)
    end(slots, taken[0])
    end(slots, taken[0])
    assert slot_of(slots.reserve(100 * ID_STEP)) == slot_of(taken[0])
    assert slots.reserve(101 * ID_STEP) == 101 * ID_STEP, "a slot released twice is one slot"


@pytest.mark.parametrize("first", ["channel_done", "client_done"])
def test_a_slot_is_free_when_both_sides_are_done_with_it(first: str) -> None:
    slots, _ = both_sides()
    op_id, *_ = [slots.reserve(number * ID_STEP) for number in range(1, ID_STEP)]
    for _ in range(2):
        getattr(slots, first)(op_id)
        assert not slot_of(slots.reserve(50 * ID_STEP))
    end(slots, op_id)
    assert slot_of(slots.reserve(51 * ID_STEP)) == slot_of(op_id)


def test_no_slot_is_used_where_stores_are_seen_out_of_order() -> None:
    assert ClientMailbox(memoryview(bytearray(SIZE)), ordered=False).reserve(ID_STEP) == ID_STEP


def test_an_acknowledgement_is_collected_once() -> None:
    writer, reader = both_sides()
    ack_slots = {op_id: reader.reserve_ack(op_id) for op_id in (11, 12, 13)}
    assert reader.collect_acks() == []
    writer.acknowledge(ack_slots[13], 13)
    writer.acknowledge(ack_slots[11], 11)
    assert reader.collect_acks() == [11, 13]
    assert reader.collect_acks() == []
    writer.acknowledge(ack_slots[12], 12)
    assert reader.collect_acks() == [12]


def test_an_ack_slot_that_is_used_again_is_not_acknowledged_yet() -> None:
    writer, reader = both_sides()
    writer.acknowledge(reader.reserve_ack(1), 1)
    assert reader.collect_acks() == [1]
    again = reader.reserve_ack(2)
    assert reader.collect_acks() == []
    writer.acknowledge(again, 2)
    assert reader.collect_acks() == [2]


def test_there_is_no_ack_slot_when_all_are_taken() -> None:
    writer, reader = both_sides()
    ack_slots = [reader.reserve_ack(op_id) for op_id in range(1, ACK_SLOTS + 1)]
    assert len(set(ack_slots)) == ACK_SLOTS
    assert reader.reserve_ack(1000) == NO_ACK_SLOT
    reader.drop_ack(7)
    assert reader.reserve_ack(1001) == ack_slots[6]
    writer.acknowledge(ack_slots[6], 1001)
    assert reader.collect_acks() == [1001]
