"""The memory that a client and a channel on the same host share: where it signs for items, and its boxes."""

from __future__ import annotations

from rlinf_core.channel import boxes, receipts
from rlinf_core.channel.boxes import Boxes, PostOffice
from rlinf_core.channel.receipts import ReceiptPage, Receipts
from rlinf_core.collective.parcel import Parcel

SIZE = receipts.SIZE + boxes.SIZE


class ClientPage:
    """The client's side.

    Attributes:
        receipts: where it signs.
        boxes: where it finds answers.
        small: whether the last item fitted a box, so that the next one may.
    """

    def __init__(self, memory: memoryview) -> None:
        self.receipts = ReceiptPage(memory[: receipts.SIZE])
        self.boxes = Boxes(memory[receipts.SIZE : SIZE])
        self.small = True


class ChannelPage:
    """The channel's side.

    Attributes:
        receipts: which deliveries were signed for.
        post_office: where it leaves answers.
    """

    def __init__(self, parcel: Parcel, since: int) -> None:
        """`parcel` holds the memory, and keeps it; it came with the ticket `since`."""
        self._parcel = parcel
        memory = parcel.body()
        self.receipts = Receipts(memory[: receipts.SIZE])
        self.post_office = PostOffice(memory[receipts.SIZE : SIZE], since)
