"""A tool that runs shell commands in a task's box."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from recipes.agent.boxes.box import BoxEnded, BoxError, LiveBox
from recipes.agent.tools.tool import Tool, ToolError, ToolUnavailable

_SHOWN: Final = 3500


class Bash(Tool):
    """Runs a command; the result is its output, and its exit status if not 0.

    Args:
        box: the box of the run.
        timeout: the time limit of one command in seconds.
        user: the user in the box; "": root.

    Attributes:
        seconds: the total time of all commands.
    """

    name = "bash"
    description = "runs a command of the shell and gives what it prints"
    parameters: Mapping[str, Any] = MappingProxyType(
        {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    )
    computes = True

    def __init__(self, box: LiveBox, timeout: float, user: str = "") -> None:
        self._box, self._timeout, self._user = box, timeout, user
        self.seconds = 0.0

    def argument(self, values: Mapping[str, Any]) -> str:
        command = values.get("command")
        if set(values) != {"command"} or not isinstance(command, str):
            raise ToolError('the arguments of bash are {"command": TEXT}')
        return command

    async def call(self, argument: str) -> str:
        began = time.perf_counter()
        try:
            done = await self._box.run(["bash", "-c", argument], user=self._user, timeout=self._timeout)
        except BoxEnded as error:
            raise ToolError(str(error)) from None
        except BoxError as error:
            raise ToolUnavailable(f"the box of the task: {error}") from None
        finally:
            self.seconds += time.perf_counter() - began
        text = _middle_out((done.output + done.errors).decode(errors="replace").rstrip("\n"))
        if done.timed_out:
            raise ToolError(f"the command was ended after {self._timeout:g} s; it had printed: {text}")
        if done.status == 0:
            return text
        ended = f"signal {-done.status}" if done.status < 0 else f"exit status {done.status}"
        return f"{text}\n[{ended}]".lstrip("\n")


def _middle_out(text: str) -> str:
    """Return a text, without its middle if it is long: errors are often at the end."""
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
