"""The exit status of this process, protected from Ray's own handlers."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlinf_core.cluster.ray_private import ray_module
from rlinf_core.process.signal_mask import sigterm_deferred

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM
_KEEP_SECONDS = 0.001
_failed = False
_terminated = False


def end_with_failure() -> None:
    """Exit with a failure detected in an exit handler, where raising has no effect."""
    global _failed
    _failed = True


@contextmanager
def own_signals() -> Generator[None, None, None]:
    """Keep this process's SIGTERM behaviour while Ray is started within the block.

    Ray would end the process with a crash report and status 15. By default it ends as after `sys.exit`: groups are shut
    down, and the status is 143.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; in other threads Ray does not touch the signal either.
        yield
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    utils: Any = ray_module("ray._private.utils")
    worker: Any = ray_module("ray._private.worker")
    set_handler, connect = utils.set_sigterm_handler, worker.connect
    try:
        with kept_handler() as set_again:

            def connect_undisturbed(*args: Any, **keywords: Any) -> Any:
                # It holds the GIL for up to seconds after setting Ray's handler, so no thread can restore ours.
                with sigterm_deferred():
                    try:
                        return connect(*args, **keywords)
                    finally:
                        set_again()

            utils.set_sigterm_handler, worker.connect = _leave_handler, connect_undisturbed
            yield
    finally:
        utils.set_sigterm_handler, worker.connect = set_handler, connect


@contextmanager
def kept_handler() -> Generator[Callable[[], None], None, None]:
    """Keep the SIGTERM handler within the block; yield a function that restores it.

    Ray's C++ code sets its own handler while it connects, and the default one when it disconnects. Until Python's is
    restored, a SIGTERM would kill the process, so a thread restores it every millisecond: a bug of Ray.
    """
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    # Larger than any platform's `struct sigaction`, whose fields are not used.
    kept = ctypes.create_string_buffer(1024)
    sigaction(signal.SIGTERM, None, kept)
    ended = threading.Event()

    def set_again() -> None:
        sigaction(signal.SIGTERM, kept, None)

    def keep() -> None:
        while not ended.wait(_KEEP_SECONDS):
            set_again()

    keeper = threading.Thread(target=keep, name="rlinf-signals", daemon=True)
    with sigterm_deferred():
        keeper.start()
    try:
        yield set_again
    finally:
        ended.set()
        keeper.join()
        set_again()


def _leave_handler(handler: object) -> None:
    """Replace Ray's function that sets a SIGTERM handler in Python, and do nothing."""


def _end(number: int, frame: FrameType | None) -> None:
    global _terminated
    # An exception raised within a call of Ray leaves it as `SystemExit(1)`.
    _terminated = True
    # A second signal must not interrupt running exit handlers.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(_TERMINATED)


def _restore_exit_code() -> None:
    """Correct the exit status, as the last action of this process."""
    status = _TERMINATED if _terminated else _INTERRUPTED if _is_interrupted() else int(_failed)
    if status:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # its reader is gone
        os._exit(status)


def _is_interrupted() -> bool:
    """Return whether Ctrl-C ended the program. Python forgets that if an exit handler uses `exec`, as Ray's do."""
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return not interactive and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)


# Handlers run in the reverse order of their registration, so those of the users' code come before this one.
atexit.register(_restore_exit_code)
