"""The console script: `main`, and what makes a process of its own start and end quickly."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import Any

_INTERRUPTED = 130  # `ExitCode.INTERRUPTED`, before anything is imported that Ctrl-C could cut short
# Importing makes many objects and no garbage: looking through them, by default every 700, only costs. A check of a file
# makes 60,000, and a single look through most of these takes a tenth of its time.
_COLLECT_EVERY = 200_000


def launch() -> int:
    """Run the command line; return its exit code, or end the process with it."""
    gc.set_threshold(_COLLECT_EVERY)
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end_at_once)
    _order_imports()
    from rlinf_cli.main import main

    code = main()
    # Taking the interpreter apart takes longer than many a command. What needs an orderly end is Ray's, while it is on.
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C while nothing is done yet; an exception might be lost in an import."""
    os._exit(_INTERRUPTED)


def _order_imports() -> None:
    """Find the modules of the working folder, but never in the place of rlinf's or the standard library's."""
    from rlinf_core.process.import_path import manage

    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = None
    manage(folder)


def _open_closed_streams() -> None:
    """Lead standard output and error that the caller closed (`>&-`) nowhere.

    Otherwise the next file that is opened would get their descriptors, and whatever is printed.
    """
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is the one that is missing. Reading from it fails, as from a closed one.
            os.open(os.devnull, os.O_WRONLY)
            if descriptor:
                setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
