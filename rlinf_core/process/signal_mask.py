"""Signals that processes started from here must not take."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

# Schedulers send these to all processes of a job some time before it ends (Slurm's `--signal`, LSF, Grid Engine). Only
# a driver acts on them; by default they end a process.
SCHEDULER_WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})


@contextmanager
def warnings_blocked() -> Generator[None, None, None]:
    """Start the processes of the block with schedulers' warning signals blocked; this one handles them afterwards."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_WARNINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def ignore_warnings() -> None:
    """Ignore schedulers' warning signals, in this process and its children."""
    for number in SCHEDULER_WARNINGS:
        signal.signal(number, signal.SIG_IGN)


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
