"""How this process ends: with a status that tells the truth, which Ray's own handlers would change."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM
_failed = False
_terminated = False


def end_with_failure() -> None:
    """A failure came to light in an exit handler, in which nothing can be raised any more."""
    global _failed
    _failed = True


@contextmanager
def own_signals() -> Generator[None, None, None]:
    """Within the block Ray is started: what this process does at SIGTERM stays its own.

    Ray ends the process with a crash report and the status 15. Where nobody had another wish, it ends as after
    `sys.exit`: groups are shut down, and the status is 143.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Only the main thread may; in another one Ray leaves the signal alone, too.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, _end if before == signal.SIG_DFL else before)


def _end(number: int, frame: FrameType | None) -> None:
    global _terminated
    # What is raised within a call of Ray comes out of it as `SystemExit(1)`.
    _terminated = True
    # The next one is not for exit handlers that are under way.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(_TERMINATED)


def _tell_the_truth() -> None:
    """The last thing that this process does: where its status would be another one, it is set here."""
    status = _TERMINATED if _terminated else _INTERRUPTED if _is_interrupted() else int(_failed)
    if status:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # nobody reads it any more
        os._exit(status)


def _is_interrupted() -> bool:
    """Return whether Ctrl-C ended the program. Python forgets that when any exit handler runs code by `exec`, as
    Ray's do.
    """
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return not interactive and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)


# Handlers run in the reverse order of their registration, so those of the users' code come before this one.
atexit.register(_tell_the_truth)
