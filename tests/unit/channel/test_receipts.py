from __future__ import annotations

from rlinf_core.channel.receipts import NO_SLOT, SIZE, SLOTS, AckReader, AckWriter


def both_sides() -> tuple[AckWriter, AckReader]:
    shared = memoryview(bytearray(SIZE + 100))
    return AckWriter(shared), AckReader(shared)


def test_what_is_signed_for_is_told_once() -> None:
    page, receipts = both_sides()
    slots = {op_id: receipts.slot(op_id) for op_id in (11, 12, 13)}
    assert receipts.signed() == []
    page.sign(slots[13], 13)
    page.sign(slots[11], 11)
    assert receipts.signed() == [11, 13]
    assert receipts.signed() == []
    page.sign(slots[12], 12)
    assert receipts.signed() == [12]


def test_a_place_that_is_used_again_is_not_signed_yet() -> None:
    page, receipts = both_sides()
    page.sign(receipts.slot(1), 1)
    assert receipts.signed() == [1]
    again = receipts.slot(2)
    assert receipts.signed() == []
    page.sign(again, 2)
    assert receipts.signed() == [2]


def test_there_is_no_place_when_all_are_taken() -> None:
    page, receipts = both_sides()
    slots = [receipts.slot(op_id) for op_id in range(1, SLOTS + 1)]
    assert len(set(slots)) == SLOTS
    assert receipts.slot(1000) == NO_SLOT
    receipts.drop(7)
    assert receipts.slot(1001) == slots[6]
    page.sign(slots[6], 1001)
    assert receipts.signed() == [1001]
