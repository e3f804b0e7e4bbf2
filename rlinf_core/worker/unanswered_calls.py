"""The calls on worker groups that this process has made, until their answers are read."""

from __future__ import annotations

import threading
from typing import Any

from rlinf_core.failures import followed, set_cause
from rlinf_core.worker.group_call import GroupCall


class UnansweredCalls:
    """The calls on worker groups of this process whose answers may be unread."""

    # The calls are pruned when this many have accumulated, or twice the number left by the last pruning.
    _FIRST_LIMIT = 64

    def __init__(self) -> None:
        # In the order in which they were made.
        self._calls: dict[GroupCall[Any], None] = {}
        self._limit = self._FIRST_LIMIT
        self._lock = threading.Lock()

    def add(self, call: GroupCall[Any]) -> None:
        """Keep a new call."""
        with self._lock:
            if len(self._calls) >= self._limit:
                self._calls = {call: None for call in self._calls if call.matters}
                self._limit = max(self._FIRST_LIMIT, 2 * len(self._calls))
            self._calls[call] = None

    def forget(self, call: GroupCall[Any]) -> None:
        """Forget a call whose results were read, so that they do not outlive its handle."""
        with self._lock:
            self._calls.pop(call, None)

    def in_flight(self) -> tuple[str, ...]:
        with self._lock:
            calls = list(self._calls)
        return tuple({str(address) for call in calls for address in call.pending()})

    def tell_cause(self, error: BaseException) -> None:
        """Set the cause of a consequential error, if the cause is a failed call whose result was never read."""
        if error.__cause__ is not None or not followed(error):
            return
        with self._lock:
            calls = [call for call in self._calls if not call.observed]
        for call in calls:
            failure = call.failure()
            if failure is not None and not followed(failure) and set_cause(error, failure):
                # The failure is reported with the error that it caused.
                call.observed = True
                return

    def take(self, group: str) -> list[GroupCall[Any]]:
        with self._lock:
            own = [call for call in self._calls if call.group == group]
            self._calls = {call: None for call in self._calls if call.group != group}
        return own


unanswered = UnansweredCalls()
