"""Running what talks to many nodes at once."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import warnings
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Each run of ssh holds a few descriptors; the usual soft limit is 1024.
_DESCRIPTORS = 8192


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. Ctrl-C cancels it, which ends the processes that it started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        # Python 3.11 would wait for each process in a thread of its own.
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())  # pyright: ignore[reportDeprecated] - not from 3.12 on
    with warnings.catch_warnings():
        # Said where Ctrl-C comes while processes are waited for; they are ended all the same.
        warnings.filterwarnings("ignore", message="A loop is being detached", category=RuntimeWarning)
        return asyncio.run(work)
