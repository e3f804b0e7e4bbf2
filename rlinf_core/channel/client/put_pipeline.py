"""The put pipeline: asynchronous puts of one process under one key, in order, batched, and bounded by a window.

The first goes at once; what is put before it is accepted waits here and goes together. So a put that comes alone costs
no delay, and a thousand of them cost few frames. What exceeds the window stays with its producer: a channel that is
full holds no more of it than that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_core.channel.operation import ChannelOperation
from rlinf_core.collective.messages.codec import Encoded

# One frame holds at most that many puts, and about that many bytes of them.
_FRAME_PUTS = 256
_FRAME_BYTES = 64 << 10
# Puts of one key, and their bytes, that are sent and not accepted.
_WINDOW_PUTS = 1024
_WINDOW_BYTES = 16 << 20


@dataclass(slots=True)
class QueuedPut:
    """A put that was issued; its item is packed, or as it is to be sent when it is large."""

    operation: ChannelOperation[Any]
    item: bytes | Encoded
    weight: float
    nbytes: int


class PutPipeline:
    """The puts of one key that are not accepted yet, as a pipeline.

    Args:
        send: sends some small puts in one frame, or one large one; it must not block.
        idle: called when nothing is left.
    """

    def __init__(self, send: Callable[[Sequence[QueuedPut]], None], idle: Callable[[], None]) -> None:
        self._send = send
        self._idle = idle
        self._lock = threading.Lock()
        self._waiting: deque[QueuedPut] = deque()
        self._sent: dict[int, int] = {}
        self._sent_bytes = 0
        self.closed = False

    def add(self, put: QueuedPut) -> bool:
        """Take a put; False when the pipeline has ended."""
        with self._lock:
            if self.closed:
                return False
            self._waiting.append(put)
            if not self._sent or len(self._waiting) >= _FRAME_PUTS or put.nbytes >= _FRAME_BYTES:
                self._send_within_window()
            return True

    def flush(self) -> None:
        """Send all buffered items now, before an operation that must follow them."""
        with self._lock:
            while self._waiting:
                self._send_some()

    def ended(self, op_ids: Sequence[int]) -> None:
        with self._lock:
            for op_id in op_ids:
                self._sent_bytes -= self._sent.pop(op_id, 0)
            self._send_within_window()
            if not self._sent and not self._waiting and not self.closed:
                self.closed = True
                self._idle()

    def drop(self) -> None:
        """Drop all puts: the channel is gone."""
        with self._lock:
            self._waiting.clear()
            self._sent.clear()
            if not self.closed:
                self.closed = True
                self._idle()

    def _send_within_window(self) -> None:
        while self._waiting and (
            not self._sent or (len(self._sent) < _WINDOW_PUTS and self._sent_bytes < _WINDOW_BYTES)
        ):
            self._send_some()

    def _send_some(self) -> None:
        waiting = self._waiting
        run: list[QueuedPut] = []
        size = 0
        while waiting and len(run) < _FRAME_PUTS and size < _FRAME_BYTES:
            large = isinstance(waiting[0].item, Encoded)
            if large and run:
                break
            put = waiting.popleft()
            if put.operation.settled:
                continue  # it was cancelled before it was sent
            run.append(put)
            size += put.nbytes
            self._sent[put.operation.op_id] = put.nbytes
            if large:
                break
        self._sent_bytes += size
        if run:
            self._send(run)
