"""Connections to the page before somebody has told the token, limited in number and in time."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from rlinf_core.foreign.strangers import Unproven, origin_of

_MOST: Final = 32
TOKEN_SECONDS: Final = 10.0  # within which a connection must tell the token, or is closed


class Entrance:
    """The connections of a server that have not told the token. Used by one thread."""

    def __init__(self) -> None:
        self._unproven: Unproven[asyncio.Transport] = Unproven(_MOST, seconds=TOKEN_SECONDS)

    def admit(self, transport: asyncio.Transport, now: float) -> None:
        """Admit a connection, and close the oldest one when there are too many."""
        for leaving in self._unproven.admit(transport, origin_of(transport.get_extra_info("peername")), now):
            leaving.abort()

    def prove(self, client: tuple[str, int] | None) -> None:
        """Keep the connection of a client that has told the token."""
        for transport in self._unproven.waiting():
            peer: Any = transport.get_extra_info("peername")
            if peer is not None and client is not None and tuple(peer[:2]) == tuple(client):
                self._unproven.remove(transport)

    def sweep(self, now: float) -> None:
        """Close the connections that have not told the token in time."""
        for transport in self._unproven.remove_overdue(now):
            transport.abort()

    def close(self) -> None:
        """Close all of them."""
        for transport in self._unproven.remove_all():
            transport.abort()


class Newcomer(H11Protocol):
    """A connection that counts as a newcomer from its first moment on."""

    def __init__(self, entrance: Entrance, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._entrance = entrance

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._entrance.admit(transport, self.loop.time())
