"""Who uses a channel, as its broker knows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from rlinf_core.channel.page import ChannelPage
from rlinf_core.collective.link import Link

# How many losses, names of the dead and cancelled operations are remembered one by one.
REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Loss:
    """An item that was on its way into a channel when its producer died.

    Attributes:
        producer: who died.
        key: the queue that it was for.
    """

    producer: str
    key: str


class Client:
    """One life of a process that uses the channel."""

    __slots__ = ("cancelled", "consumes", "incarnation", "link", "name", "page", "produces")

    def __init__(self, link: Link) -> None:
        self.name = link.peer
        self.incarnation = link.incarnation
        self.link = link
        self.produces = False
        self.consumes = False
        self.cancelled: deque[int] = deque(maxlen=REMEMBERED)
        self.page: ChannelPage | None = None


# Clients count their tickets each for itself.
Ticket: TypeAlias = tuple[Client, int]
