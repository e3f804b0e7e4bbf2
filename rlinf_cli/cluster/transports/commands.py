"""Commands and how they ended, and running one as a local process, bounded in time and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rlinf_core.suggest import clipped

# The output limit per node, so that a thousand nodes cannot fill this machine's memory.
MAX_OUTPUT_BYTES: Final = 1 << 20
_CHUNK: Final = 1 << 16
_GRACE_SECONDS: Final = 2.0


class CommandOutcome(StrEnum):
    """The outcome of running a command on a node."""

    DONE = "done"
    """The command ran on the node; its exit code is its own."""
    UNKNOWN_HOST_KEY = "unknown host key"
    HOST_KEY_CHANGED = "host key changed"
    KEY_REFUSED = "key refused"
    UNRESOLVED = "unknown host name"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    DROPPED = "connection lost"
    """The connection broke before the command had ended."""
    NO_CLIENT = "no ssh client"
    FAILED = "ssh failed"
    """Ssh failed for another reason, given in its output."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        rc: its exit code; ssh's own if the command did not run; -1 if it was killed at its deadline.
        stdout, stderr: its output, each truncated to 1 MiB.
        kind: how it ended.
        help: the remedy for a `kind` other than done, or None.
    """

    rc: int
    stdout: bytes
    stderr: bytes
    kind: CommandOutcome = CommandOutcome.DONE
    help: str | None = None

    def last_lines(self, count: int = 5) -> str:
        """Return the end of its standard error, or else of its standard output."""
        text = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        return clipped("\n".join(text.splitlines()[-count:]))


OnLine = Callable[[bytes], None]


async def run_process(
    argv: Sequence[str],
    stdin: bytes,
    deadline: float,
    on_line: OnLine | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a local program in its own session, bounded in time and in output.

    Raises:
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=None if env is None else dict(env),
        # Ctrl-C is handled by rlinf, which ends the whole session.
        start_new_session=True,
    )
    out, err = _Sink(on_line), _Sink()
    io = asyncio.gather(_feed(process.stdin, stdin), out.take(process.stdout), err.take(process.stderr))
    try:
        async with asyncio.timeout(deadline):
            await io
            rc = await process.wait()
    except TimeoutError:
        await _end(process)
        return CommandResult(-1, out.bytes, err.bytes, CommandOutcome.TIMEOUT)
    except asyncio.CancelledError:
        await _end(process)
        raise
    return CommandResult(rc, out.bytes, err.bytes)


async def _feed(pipe: asyncio.StreamWriter | None, data: bytes) -> None:
    if pipe is None:
        return
    # A program may end, or close its standard input, before reading all of it; its exit code says why.
    with contextlib.suppress(ConnectionError):
        pipe.write(data)
        await pipe.drain()
        # The rest is still written, without waiting for it: asyncio cannot cancel such a wait cleanly.
        pipe.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), _GRACE_SECONDS)
            return


class _Sink:
    """The output of a stream, up to a limit; lines are passed on as they arrive."""

    def __init__(self, on_line: OnLine | None = None) -> None:
        self.bytes = b""
        self._on_line = on_line
        self._rest = b""

    async def take(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (chunk := await stream.read(_CHUNK)):
            self.bytes += chunk[: MAX_OUTPUT_BYTES - len(self.bytes)]
            if self._on_line is not None:
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                # A line without an end is not ours, and is also truncated at the limit.
                self._rest = self._rest[-MAX_OUTPUT_BYTES:]
                for line in lines:
                    self._on_line(line)
