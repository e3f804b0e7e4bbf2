from __future__ import annotations

import pytest

from rlinf_core.channel.boxes import LARGEST, SIZE, TICKETS, Boxes, PostOffice, box_of


def both_sides() -> tuple[Boxes, PostOffice]:
    shared = memoryview(bytearray(SIZE + 100))
    return Boxes(shared, ordered=True), PostOffice(shared)


def end(boxes: Boxes, ticket: int) -> None:
    boxes.ended(ticket)
    boxes.left(ticket)


def test_an_answer_is_found_by_its_ticket_alone() -> None:
    boxes, office = both_sides()
    first, second = boxes.take(3 * TICKETS), boxes.take(4 * TICKETS)
    assert box_of(first) != box_of(second)
    assert not boxes.answered(first)
    assert not office.answer(first), "nobody asked for a message"
    assert boxes.answered(first)
    assert not boxes.answered(second)
    end(boxes, first)
    again = boxes.take(5 * TICKETS)
    assert box_of(again) == box_of(first)
    assert not boxes.answered(again)


def test_the_largest_items_of_all_boxes_do_not_overlap() -> None:
    boxes, office = both_sides()
    tickets = [boxes.take(number * TICKETS) for number in range(1, TICKETS)]
    items = [bytes([number]) * LARGEST for number in range(1, TICKETS)]
    for slot, (ticket, item) in enumerate(zip(tickets, items, strict=True)):
        office.deliver(ticket, slot, item)
    assert [boxes.mail(ticket) for ticket in tickets] == list(enumerate(items))
    assert all(boxes.answered(ticket) for ticket in tickets)


def test_a_note_asks_for_a_message_for_one_ticket() -> None:
    boxes, office = both_sides()
    ticket = boxes.take(TICKETS)
    boxes.leave_note(ticket)
    assert office.deliver(ticket, 0, b"")
    end(boxes, ticket)
    later = boxes.take(2 * TICKETS)
    assert box_of(later) == box_of(ticket)
    assert not office.deliver(later, 0, b"")


def test_a_ticket_without_a_box_stays_as_it_is() -> None:
    boxes, _ = both_sides()
    taken = [boxes.take(number * TICKETS) for number in range(1, TICKETS)]
    assert sorted(map(box_of, taken)) == list(range(1, TICKETS))
    assert boxes.take(99 * TICKETS) == 99 * TICKETS
    end(boxes, 99 * TICKETS)
    end(boxes, taken[0])
    end(boxes, taken[0])
    assert box_of(boxes.take(100 * TICKETS)) == box_of(taken[0])
    assert boxes.take(101 * TICKETS) == 101 * TICKETS, "a box given back twice is one box"


@pytest.mark.parametrize("first", ["ended", "left"])
def test_a_box_is_free_when_both_sides_are_done_with_it(first: str) -> None:
    boxes, _ = both_sides()
    ticket, *_ = [boxes.take(number * TICKETS) for number in range(1, TICKETS)]
    for _ in range(2):
        getattr(boxes, first)(ticket)
        assert not box_of(boxes.take(50 * TICKETS))
    end(boxes, ticket)
    assert box_of(boxes.take(51 * TICKETS)) == box_of(ticket)


def test_no_box_is_used_where_stores_are_seen_out_of_order() -> None:
    assert Boxes(memoryview(bytearray(SIZE)), ordered=False).take(TICKETS) == TICKETS
