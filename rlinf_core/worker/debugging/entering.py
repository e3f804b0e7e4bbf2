"""The hook of `breakpoint()` in workers; imports the debugger when the first one is reached."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

_VARIABLE: Final = "PYTHONBREAKPOINT"
# What Ray sets in its workers: its own debugger, which must be installed and listens on the network.
_OF_RAY: Final = "ray."


def enter_breakpoints() -> None:
    """Have `breakpoint()` in this process wait for `rlinf ps --attach`, unless the environment says otherwise."""
    if os.environ.get(_VARIABLE, _OF_RAY).startswith(_OF_RAY):
        os.environ[_VARIABLE] = f"{__name__}.{wait_here.__name__}"


def wait_here(*_: Any, **__: Any) -> None:
    """Stop the caller until a debugger lets it continue.

    Raises:
        bdb.BdbQuit: the user quit the debugger.
        CancelledOperationError: the call was cancelled meanwhile.
    """
    from rlinf_core.worker.debugging.breakpoints import stop_at

    stop_at(sys._getframe(1))  # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
