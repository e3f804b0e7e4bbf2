"""The clients of a channel, as its broker knows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from rlinf_core.channel.page import BrokerMailbox
from rlinf_core.collective.peer_stream import PeerStream

# How many losses, names of the dead and cancelled operations are remembered one by one.
REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class LostItem:
    """An item that was on its way into a channel when its producer died.

    Attributes:
        producer: who died.
        key: the queue that it was for.
    """

    producer: str
    key: str


class BrokerClient:
    """One life of a process that uses the channel."""

    __slots__ = ("cancelled", "consumes", "incarnation", "name", "page", "produces", "stream")

    def __init__(self, stream: PeerStream) -> None:
        self.name = stream.peer
        self.incarnation = stream.incarnation
        self.stream = stream
        self.produces = False
        self.consumes = False
        self.cancelled: deque[int] = deque(maxlen=REMEMBERED)
        self.page: BrokerMailbox | None = None


# Clients count their op_ids each for itself.
ClientOpId: TypeAlias = tuple[BrokerClient, int]
