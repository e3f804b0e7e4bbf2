"""The items of a channel's key, for a process that does something else while none has arrived."""

from __future__ import annotations

from typing import Any

from rlinf_core import Channel, CommunicationTimeoutError, Work


class Inbox:
    """The items of one key of a channel.

    The next item may be long in coming, as when a trainer takes hours for a step: a wait has no end but the sender's
    death.

    Args:
        channel: the channel that holds them.
        key: the key of the items.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel = channel
        self._key = key
        # The next item, where it was asked for.
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
        """Cancel the request for the next item: the run has failed, and will resume from a checkpoint."""
        if self._next is not None:
            # A handle that is never awaited logs a warning: its item would be lost.
            self._next.add_done_callback(lambda: None)
            self._next = None

    def _asked(self) -> Work[Any]:
        if self._next is None:
            self._next = self._channel.get(key=self._key, async_op=True)
        return self._next

    def _take(self) -> list[Any]:
        """Return the next item, waiting for it; none where its time is up."""
        work = self._asked()
        try:
            return [work.wait()]
        except CommunicationTimeoutError:
            return []
        finally:
            self._next = None
