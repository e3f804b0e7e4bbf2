"""The exit status of this process: one that tells the truth, which Ray's own handlers would change."""

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
    """End with a failure that came to light in an exit handler, in which nothing can be raised any more."""
    global _failed
    _failed = True


@contextmanager
def own_signals() -> Generator[None, None, None]:
    """Within the block Ray is started: what this process does at SIGTERM stays its own, at any moment.

    Ray ends the process with a crash report and the status 15. Where nobody had another wish, it ends as after
    `sys.exit`: groups are shut down, and the status is 143.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; in another one Ray leaves the signal alone, too.
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
                # It holds Python's lock for up to seconds after Ray's handler is set: no thread can set ours again.
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
    """Within the block SIGTERM stays handled as it is; give the function that sets that handler again.

    Ray's C++ code sets a handler of its own some time while it connects, and the default one when it disconnects. Until
    Python's is set again a SIGTERM would end the process unheard, so a thread does that each millisecond.
    """
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    # Larger than any platform's `struct sigaction`, whose fields are of no interest here.
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
    """Stand for Ray's function that sets a SIGTERM handler in Python, and set none."""


def _end(number: int, frame: FrameType | None) -> None:
    global _terminated
    # What is raised within a call of Ray comes out of it as `SystemExit(1)`.
    _terminated = True
    # The next one is not for exit handlers that are under way.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(_TERMINATED)


def _tell_the_truth() -> None:
    """Set the exit status where it would be another one, as the last thing that this process does."""
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
