"""The way to each node: ssh where the file gives a host, a child process on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlinf_core.bootstrap.inventory import NodeTarget
from rlinf_core.bootstrap.ssh import DEFAULT_PARALLEL, SshTransport
from rlinf_core.bootstrap.transport import CommandOutcome, OnLine, Result, Transport, run_process

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class LocalTransport(Transport):
    """Runs commands as children of this process, with the exit codes that a shell gives what cannot be started."""

    async def run(
        self,
        node: NodeTarget,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        deadline: float,
        on_line: OnLine | None = None,
    ) -> Result:
        try:
            return await run_process(argv, stdin, deadline, on_line)
        except FileNotFoundError as error:
            return Result(_NOT_FOUND, b"", f"{argv[0]}: {error.strerror}".encode(), CommandOutcome.DONE)
        except OSError as error:
            return Result(_NOT_EXECUTABLE, b"", f"{argv[0]}: {error.strerror}".encode(), CommandOutcome.DONE)


class NodeRoutes(Transport):
    """Runs each command by the way that leads to its node.

    Args:
        parallel: how many nodes are talked to at a time.
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
    ) -> Result:
        way: Transport = self._local
        if node.host is not None:
            way = self._ssh = self._ssh or SshTransport()
        return await way.run(node, argv, stdin, deadline=deadline, on_line=on_line)
