"""Control messages over an endpoint: sent from any thread, handled in a dedicated one.

A handler may block, as it does not run in the reading thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.receiver import ServiceMessage
from rlinf_core.manager.manager_messages import CONTROL
from rlinf_core.waiting import OperationKind, stretched

_log = logging.getLogger(__name__)
M = TypeVar("M")
_SEND_SECONDS = 30.0


class ControlRpc:
    """A sender of control messages, with a thread that passes incoming ones to `handle`.

    Args:
        handle: called with a message and its stream (None for messages from `put`).
        tick: called after each message, and periodically, in the same thread.
        every: returns the maximum seconds between ticks.
        at_once: called with each message first, in the reading thread: it must not block, and returns whether it
        handled the message.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        handle: Callable[[PeerStream | None, object], None],
        tick: Callable[[], None],
        every: Callable[[], float],
        at_once: Callable[[object], bool] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._handle = handle
        self._tick = tick
        self._every = every
        self._at_once = at_once
        self._inbox: queue.SimpleQueue[tuple[PeerStream | None, object] | None] = queue.SimpleQueue()
        self._stopped = False
        endpoint.serve(CONTROL, self._deliver)
        self._thread = threading.Thread(target=self._run, name="rlinf-control", daemon=True)
        self._thread.start()

    def send(self, stream: PeerStream, message: object) -> None:
        """Send without waiting. The endpoint reports lost peers itself."""
        endpoint = self._endpoint
        work = endpoint.work(OperationKind.SEND, stream.peer, stretched(_SEND_SECONDS))
        endpoint.send_async(stream, endpoint.message(message, tag=CONTROL), work)

    def put(self, message: object) -> None:
        """Pass a local message to the handler."""
        self._inbox.put((None, message))

    def stop(self) -> None:
        self._stopped = True
        self._inbox.put(None)

    def _deliver(self, delivery: ServiceMessage) -> None:
        message = delivery.received.load()
        if self._at_once is None or not self._at_once(message):
            self._inbox.put((delivery.stream, message))

    def _run(self) -> None:
        while not self._stopped:
            self._guarded(self._next)
            self._guarded(self._tick)

    def _next(self) -> None:
        try:
            item = self._inbox.get(timeout=self._every())
        except queue.Empty:
            return
        if item is not None:
            self._handle(*item)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # noqa: BLE001 - one failing message must not stop the thread
            if not self._stopped:
                _log.exception("a control message failed")


def expect(value: object, kind: type[M]) -> M:
    """Return `value`, checked to be a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
