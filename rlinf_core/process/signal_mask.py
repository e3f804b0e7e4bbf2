"""Deferral of SIGTERM while native code would handle it."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def sigterm_deferred() -> Generator[None, None, None]:
    """Within the block SIGTERM stays pending for this thread and for threads that are started in it.

    While Ray's native code handles SIGTERM no thread of the process may take it. Start no process within the block: it
    would have SIGTERM blocked.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
