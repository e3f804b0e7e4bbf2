"""The deadlines of operations that nobody waits for: they end although no thread or task looks at the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rlinf_core.channel.operation import ChannelOperation
from rlinf_core.errors import CommunicationTimeoutError

# How often it is looked whether the time of an operation is up.
_LOOK_EVERY = 0.25


class Deadlines:
    """Gives up what is too late.

    Args:
        going_on: tells the operations that go on, by op_id.
    """

    def __init__(self, going_on: Callable[[], dict[int, ChannelOperation[Any]]]) -> None:
        self._going_on = going_on
        self._watching = False
        self._lock = threading.Lock()

    def watch(self) -> None:
        """From now on there is a look at the clock, until nothing goes on any more."""
        if self._watching:
            return
        with self._lock:
            if self._watching:
                return
            self._watching = True
        threading.Thread(target=self._look_after, name="rlinf-channel-deadlines", daemon=True).start()

    def _look_after(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_LOOK_EVERY)
            now = time.monotonic()
            for operation in list(self._going_on().copy().values()):
                # Whoever waits for one ends it to the millisecond, and with a picture of who waits for whom.
                if now >= operation.deadline + _LOOK_EVERY:
                    operation.give_up(CommunicationTimeoutError(operation.title, operation.seconds))
            with self._lock:
                # Before it looks: whoever adds one after the look finds that nobody watches.
                self._watching = False
                if not self._going_on():
                    return
                self._watching = True
