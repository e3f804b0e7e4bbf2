"""How an address becomes a place: asked of whoever keeps the register, which the data plane does not know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.card import AddressCard
from rlinf_core.errors import PeerNotFoundError


class Connector(ABC):
    """Finds the endpoint at which a worker lives."""

    @abstractmethod
    def lookup(self, address: WorkerAddress, timeout: float) -> AddressCard:
        """Return the card of the endpoint of `address`, waiting at most `timeout` seconds for it to be published.

        Called again after a connection was lost, so it must answer with what holds now.

        Raises:
            UnknownGroupError: no such group will ever be.
            PeerNotFoundError: it was not published in time.
            WorkerDiedError: it is known to be dead.
        """


class FixedConnector(Connector):
    """Knows every endpoint from the start."""

    def __init__(self, cards: Mapping[WorkerAddress, AddressCard]) -> None:
        self.cards = dict(cards)

    def lookup(self, address: WorkerAddress, timeout: float) -> AddressCard:
        card = self.cards.get(address)
        if card is None:
            raise PeerNotFoundError(address.get_name(), f"`{address.get_name()}` has no known endpoint")
        return card
