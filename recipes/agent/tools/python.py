"""A tool that runs Python programs in a sandbox."""

from __future__ import annotations

import signal
from typing import Final

from recipes.agent.tools import sandbox
from recipes.agent.tools.tool import Tool, ToolError, ToolUnavailable

_ENDED_BY: Final = 128


class Python(Tool):
    """The Python interpreter with its standard library; returns what the program printed.

    Raises:
        ConfigError: this machine has no sandbox.
    """

    name = "python"
    description = "runs a Python program and gives what it prints"
    computes = True

    def __init__(self, limits: sandbox.SandboxLimits) -> None:
        sandbox.check()
        self._limits = limits

    async def call(self, argument: str) -> str:
        """See `Tool`."""
        try:
            ran = await sandbox.run(argument, self._limits)
        except sandbox.SandboxError as error:
            raise ToolUnavailable(f"the sandbox could not be made: {error}") from None
        if ran.flooded:
            raise ToolError(f"the program wrote more than {sandbox.OUTPUT_BYTES} bytes")
        if ran.status != 0:
            raise ToolError(_reason(ran))
        return ran.output.rstrip("\n")


def _reason(ran: sandbox.ProgramResult) -> str:
    """Return the reason of a failure: the last line of the traceback, or the signal that ended the program."""
    number = -ran.status if ran.status < 0 else ran.status - _ENDED_BY
    if number > 0:
        return f"the program was ended by {signal.Signals(number).name}"
    lines = ran.errors.strip().splitlines()
    return lines[-1] if lines else f"the program ended with status {ran.status}"
