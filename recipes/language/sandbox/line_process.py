"""A child process that answers in lines of JSON; if it hangs or exits, no other process is affected."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from typing import IO, Any, Final, cast

from rlinf_core.process.import_path import module_command

# The time of a process that has closed its output to end.
_EXIT_SECONDS: Final = 1.0


class LineProcess:
    """A module that runs as a child process, reads lines, and writes lines of JSON.

    Args:
        module: the module.
        arguments: its arguments.
        environment: environment variables to add to those of this process.
    """

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        command, variables = [*module_command(module), *arguments], {**os.environ, **environment}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, env=variables)
        self._pipes = cast("IO[bytes]", self.process.stdin), cast("IO[bytes]", self.process.stdout)
        os.set_blocking(self._pipes[0].fileno(), False)
        self._rest = b""

    def send(self, line: bytes, deadline: float) -> None:
        """Send a line.

        Raises:
            TimeoutError: the line is not read by `deadline`, on the monotonic clock.
            EOFError: the process has ended.
        """
        rest = memoryview(line + b"\n")
        while rest:
            writer = self._wait(0, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(writer, rest) :]
            except BrokenPipeError:
                raise EOFError from None

    def reply(self, deadline: float) -> Any:
        """Return the next line, parsed; errors are those of `send`."""
        while b"\n" not in self._rest:
            piece = os.read(self._wait(1, select.POLLIN, deadline), 1 << 16)
            if not piece:
                # A process that ends by itself closes its files first; killed now, its exit code would not be its own.
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(min(_EXIT_SECONDS, max(0.0, deadline - time.monotonic())))
                raise EOFError
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _wait(self, pipe: int, event: int, deadline: float) -> int:
        """Wait for a pipe, and return its descriptor."""
        poll, descriptor, left = select.poll(), self._pipes[pipe].fileno(), deadline - time.monotonic()
        poll.register(descriptor, event)
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        return descriptor

    def end(self) -> int:
        """Kill the process group, and return the exit code of the process."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()
        return self.process.wait()
