"""The way to nodes: the system's ssh, or a child process on this machine; and the event loop for it."""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import sys
import warnings
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.transports import ssh
from rlinf_cli.cluster.transports.commands import CommandOutcome, CommandResult, OnLine, run_process
from rlinf_cli.console.interrupts import command_signals

T = TypeVar("T")
# Each run of ssh is a local process with three pipes; a shared jump host refuses more than its `MaxStartups`.
DEFAULT_PARALLEL: Final = 128
# Each takes a few descriptors; the usual soft limit is 1024.
_DESCRIPTORS: Final = 8192
# As a shell ends where a program cannot be started.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


class Transport:
    """The way to run commands on nodes: by `ssh`, or as a child process where the node is this machine.

    Runs on the same node share one connection, kept for half a minute.

    Args:
        parallel: the maximum number of nodes contacted at the same time.
    """

    turns: asyncio.Semaphore | None = None

    def __init__(self, *, parallel: int = DEFAULT_PARALLEL) -> None:
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
        """Run `argv` on `node` and return the result; no failure of a node or its connection raises.

        Args:
            node: the node.
            argv: the command, always quoted for shells.
            stdin: its standard input; tokens and scripts are passed here, never in `argv`.
            deadline: seconds after which it is killed.
            on_line: called with each line of its standard output as it comes.

        Raises:
            ClusterError: there is no private folder for the sockets of ssh.
        """
        if node.host is not None:
            command = ["ssh", *ssh.arguments(node), shlex.join(argv)]
            try:
                result = await run_process(command, stdin, deadline, on_line, ssh.environment())
            except OSError as error:
                hint = "install OpenSSH's client, and have `ssh` on PATH"
                return CommandResult(-1, b"", str(error.strerror).encode(), CommandOutcome.NO_CLIENT, hint)
            kind = ssh.classify(result)
            return CommandResult(result.rc, result.stdout, result.stderr, kind, ssh.remedy(kind, node))
        try:
            return await run_process(argv, stdin, deadline, on_line)
        except OSError as error:
            rc = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
            return CommandResult(rc, b"", f"{argv[0]}: {error.strerror}".encode())


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
