"""The memory that a client and a channel on the same host share: where it signs for items, and its boxes."""

from __future__ import annotations

from rlinf_core.channel import boxes, receipts
from rlinf_core.channel.boxes import AnswerSlots, AnswerWriter
from rlinf_core.channel.receipts import AckReader, AckWriter
from rlinf_core.collective.received_message import ReceivedMessage

SIZE = receipts.SIZE + boxes.SIZE


class ClientMailbox:
    """The client's side.

    Attributes:
        receipts: where it signs.
        boxes: where it finds answers.
        small: whether the last item fitted a box, so that the next one may.
    """

    def __init__(self, memory: memoryview) -> None:
        self.receipts = AckWriter(memory[: receipts.SIZE])
        self.boxes = AnswerSlots(memory[receipts.SIZE : SIZE])
        self.small = True


class BrokerMailbox:
    """The channel's side.

    Attributes:
        receipts: which deliveries were signed for.
        post_office: where it leaves answers.
    """

    def __init__(self, received: ReceivedMessage, since: int) -> None:
        """`received` holds the memory, and keeps it; it came with the op_id `since`."""
        self._received = received
        memory = received.body()
        self.receipts = AckReader(memory[: receipts.SIZE])
        self.post_office = AnswerWriter(memory[receipts.SIZE : SIZE], since)
