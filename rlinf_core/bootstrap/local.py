"""This machine as a node: no ssh in between."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_core.bootstrap.inventory import NodeTarget
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
