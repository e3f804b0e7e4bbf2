"""A tool that runs Python programs in a sandbox."""

from __future__ import annotations

from recipes.agent.tools.tool import Tool, ToolError, ToolUnavailable
from recipes.language.sandbox import sandbox


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
            raise ToolError(sandbox.reason_of(ran))
        return ran.output.rstrip("\n")
