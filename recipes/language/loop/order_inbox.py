"""An inbox of a channel's key, for a process that works while nothing has arrived."""

from __future__ import annotations

from typing import Any

from rlinf_core import Channel, CommunicationTimeoutError, Work


class Inbox:
    """The items of one key of a channel.

    A wait ends only with an item or the sender's death, as a trainer may take hours for a step.

    Args:
        channel: the channel of the items.
        key: the key of the items.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel = channel
        self._key = key
        # The pending request for the next item.
        self._next: Work[Any] | None = None

    def poll(self) -> list[Any]:
        """Return the items that have arrived, without waiting."""
        orders: list[Any] = []
        while self._asked().done():
            orders += self._take()
        return orders

    def wait(self) -> Any:
        """Return the next item, without requesting another."""
        while True:
            for item in self._take():
                return item

    def abandon(self) -> None:
        """Cancel the request for the next item, after a failure that ends the run."""
        if self._next is not None:
            # The callback avoids the warning of a handle that is never awaited.
            self._next.add_done_callback(lambda: None)
            self._next = None

    def _asked(self) -> Work[Any]:
        if self._next is None:
            self._next = self._channel.get(key=self._key, async_op=True)
        return self._next

    def _take(self) -> list[Any]:
        """Wait for the next item, and return it in a list; an empty list at a timeout."""
        work = self._asked()
        try:
            return [work.wait()]
        except CommunicationTimeoutError:
            return []
        finally:
            self._next = None
