from __future__ import annotations

import pytest

from rlinf_core.channel.boxes import ID_STEP, LARGEST, SIZE, AnswerSlots, AnswerWriter, box_of


def both_sides() -> tuple[AnswerSlots, AnswerWriter]:
    shared = memoryview(bytearray(SIZE + 100))
    return AnswerSlots(shared, ordered=True), AnswerWriter(shared)


def end(boxes: AnswerSlots, op_id: int) -> None:
    boxes.ended(op_id)
    boxes.left(op_id)


def test_an_answer_is_found_by_its_ticket_alone() -> None:
    boxes, office = both_sides()
    first, second = boxes.take(3 * ID_STEP), boxes.take(4 * ID_STEP)
    assert box_of(first) != box_of(second)
    assert not boxes.answered(first)
    assert not office.answer(first), "nobody asked for a message"
    assert boxes.answered(first)
    assert not boxes.answered(second)
    end(boxes, first)
    again = boxes.take(5 * ID_STEP)
    assert box_of(again) == box_of(first)
    assert not boxes.answered(again)


def test_the_largest_items_of_all_boxes_do_not_overlap() -> None:
    boxes, office = both_sides()
    op_ids = [boxes.take(number * ID_STEP) for number in range(1, ID_STEP)]
    items = [bytes([number]) * LARGEST for number in range(1, ID_STEP)]
    for slot, (op_id, item) in enumerate(zip(op_ids, items, strict=True)):
        office.deliver(op_id, slot, item)
    assert [boxes.mail(op_id) for op_id in op_ids] == list(enumerate(items))
    assert all(boxes.answered(op_id) for op_id in op_ids)


def test_a_note_asks_for_a_message_for_one_ticket() -> None:
    boxes, office = both_sides()
    op_id = boxes.take(ID_STEP)
    boxes.leave_note(op_id)
    assert office.deliver(op_id, 0, b"")
    end(boxes, op_id)
    later = boxes.take(2 * ID_STEP)
    assert box_of(later) == box_of(op_id)
    assert not office.deliver(later, 0, b"")


def test_a_ticket_without_a_box_stays_as_it_is() -> None:
    boxes, _ = both_sides()
    taken = [boxes.take(number * ID_STEP) for number in range(1, ID_STEP)]
    assert sorted(map(box_of, taken)) == list(range(1, ID_STEP))
    assert boxes.take(99 * ID_STEP) == 99 * ID_STEP
    end(boxes, 99 * ID_STEP)
    end(boxes, taken[0])
    end(boxes, taken[0])
    assert box_of(boxes.take(100 * ID_STEP)) == box_of(taken[0])
    assert boxes.take(101 * ID_STEP) == 101 * ID_STEP, "a box given back twice is one box"


@pytest.mark.parametrize("first", ["ended", "left"])
def test_a_box_is_free_when_both_sides_are_done_with_it(first: str) -> None:
    boxes, _ = both_sides()
    op_id, *_ = [boxes.take(number * ID_STEP) for number in range(1, ID_STEP)]
    for _ in range(2):
        getattr(boxes, first)(op_id)
        assert not box_of(boxes.take(50 * ID_STEP))
    end(boxes, op_id)
    assert box_of(boxes.take(51 * ID_STEP)) == box_of(op_id)


def test_no_box_is_used_where_stores_are_seen_out_of_order() -> None:
    assert AnswerSlots(memoryview(bytearray(SIZE)), ordered=False).take(ID_STEP) == ID_STEP
