"""The console script: `main`, with shortcuts for a fast start and exit."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import Any

_INTERRUPTED = 130  # `ExitCode.INTERRUPTED`, defined here: Ctrl-C must work before anything is imported
# Imports allocate many objects and no garbage, so the default threshold of 700 only costs time. Validation allocates
# 60,000 objects; a full collection over most of them takes a tenth of the validation's time.
_COLLECT_EVERY = 200_000


def launch() -> int:
    """Run the command line; return its exit code, or exit the process with it."""
    gc.set_threshold(_COLLECT_EVERY)
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end_at_once)
    _order_imports()
    _leave_out_plugins()
    from rlinf_cli.main import main

    code = main()
    # Interpreter shutdown takes longer than many commands. Only a running Ray needs an orderly exit.
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C during startup, where an exception could be lost in an import."""
    os._exit(_INTERRUPTED)


def _order_imports() -> None:
    """Move the working folder after rlinf and the standard library on `sys.path`."""
    from rlinf_core.process.import_path import manage

    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = None
    manage(folder)


def _leave_out_plugins() -> None:
    """Keep pydantic from looking for plugins in the metadata of every package, which takes time.

    Commands that start processes do not set the variable, because the user's code would inherit it.
    """
    if sys.argv[1:2] == ["validate"]:
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")


def _open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that the caller closed (`>&-`).

    Otherwise the next opened file would get the descriptor, and with it all printed text.
    """
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` uses the lowest free descriptor, the missing one. Reading from it fails, as if it were closed.
            os.open(os.devnull, os.O_WRONLY)
            if descriptor:
                setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
