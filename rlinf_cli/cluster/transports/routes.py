"""Selection of the transport for each node, and the event loop for requests."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import warnings
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.transports.ssh import DEFAULT_PARALLEL, SshTransport
from rlinf_cli.cluster.transports.transport import CommandOutcome, CommandResult, OnLine, Transport, run_process
from rlinf_cli.console.interrupts import command_signals

T = TypeVar("T")
# Each run of ssh takes a few descriptors; the usual soft limit is 1024.
_DESCRIPTORS = 8192

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class LocalTransport(Transport):
    """A transport that runs commands as child processes, with a shell's exit codes for failed starts."""

    async def run(
        self,
        node: NodeTarget,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        deadline: float,
        on_line: OnLine | None = None,
    ) -> CommandResult:
        try:
            return await run_process(argv, stdin, deadline, on_line)
        except FileNotFoundError as error:
            return CommandResult(_NOT_FOUND, b"", f"{argv[0]}: {error.strerror}".encode(), CommandOutcome.DONE)
        except OSError as error:
            return CommandResult(_NOT_EXECUTABLE, b"", f"{argv[0]}: {error.strerror}".encode(), CommandOutcome.DONE)


class NodeRoutes(Transport):
    """A transport that selects the transport of each node.

    Args:
        parallel: the maximum number of nodes contacted at the same time.
    """

    def __init__(self, *, parallel: int = DEFAULT_PARALLEL) -> None:
        self._local = LocalTransport()
        self._ssh: SshTransport | None = None
        self.turns = asyncio.Semaphore(parallel)

    async def run(
        self,
        node: NodeTarget,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        deadline: float,
        on_line: OnLine | None = None,
    ) -> CommandResult:
        way: Transport = self._local
        if node.host is not None:
            way = self._ssh = self._ssh or SshTransport()
        return await way.run(node, argv, stdin, deadline=deadline, on_line=on_line)


async def _ended_by_signals(work: Coroutine[Any, Any, T]) -> T:
    with command_signals.cancelling_task():
        return await work


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. A terminating signal cancels it, which ends the processes that it started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    watches = sys.version_info < (3, 12) and hasattr(os, "pidfd_open")
    if watches:
        # Python 3.11 would use a thread per process.
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())  # pyright: ignore[reportDeprecated] - not from 3.12 on
    try:
        with warnings.catch_warnings():
            # A warning on Ctrl-C while processes are awaited; they are ended anyway.
            warnings.filterwarnings("ignore", message="A loop is being detached", category=RuntimeWarning)
            return asyncio.run(_ended_by_signals(work))
    except asyncio.CancelledError:
        # By the signal that has to end the command.
        command_signals.check()
        raise
    finally:
        if watches:
            # It serves only this loop; a loop in another thread could not start processes.
            asyncio.set_child_watcher(None)  # pyright: ignore[reportDeprecated, reportArgumentType]
