"""Tools as an agent is given them: called by name, with a time limit; what goes wrong is an observation."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from recipes.agent.tools.tool import Tool, ToolError, ToolUnavailable

# Longest observation in characters; what is longer is cut.
_LONGEST: Final = 4000
RESULT: Final = "result"


class ToolCall(NamedTuple):
    """A call that a model wrote.

    Attributes:
        name: of the tool.
        argument: as text; JSON in a call whose arguments have names.
    """

    name: str
    argument: str


class Observation(NamedTuple):
    """The result of a call: its text, what went wrong, and the seconds it took."""

    text: str
    failure: Literal["", "error", "timeout"]
    seconds: float


class Toolbox:
    """The tools of one run of an agent.

    A model writes `<name>argument</name>` at the end of a turn, and is answered `<result>text</result>`; or it
    writes calls in the form that its chat template teaches.

    Args:
        tools: by the names that they have.
        timeout: seconds for one call.
        told: is given each call with its observation.
        native: whether calls are in the form of the chat template, where it teaches one.

    Attributes:
        figures: calls, errors and time-outs, and seconds by tool, as metrics by their full names.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        timeout: float,
        told: Callable[[ToolCall, Observation], None] = lambda call, seen: None,
        *,
        native: bool = False,
    ) -> None:
        self._tools = {each.name: each for each in tools}
        self._timeout = timeout
        self._told = told
        self._native = native
        self._call = re.compile(rf"<({'|'.join(map(re.escape, self._tools))})>((?:(?!<\1>).)*)</\1>\s*\Z", re.DOTALL)
        self.figures: defaultdict[str, float] = defaultdict(float)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(self._tools)

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn in which a tool is called."""
        return tuple(f"</{name}>" for name in self._tools)

    @property
    def instructions(self) -> str:
        """Directions for the use of the tools, for a system message; empty without tools."""
        if not self._tools:
            return ""
        lines = [f"<{each.name}>...</{each.name}> {each.description}" for each in self._tools.values()]
        return "\n".join(("You may use tools, and are answered with <result>...</result>:", *lines))

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """The tools as chat completions list functions; none where calls are plain."""
        described = (
            {"name": each.name, "description": each.description, "parameters": dict(each.parameters)}
            for each in (self._tools.values() if self._native else ())
        )
        return tuple({"type": "function", "function": each} for each in described)

    def find_call(self, text: str) -> ToolCall | None:
        """Return the call at the end of a turn; None where there is none."""
        found = self._call.search(text) if self._tools else None
        return None if found is None else ToolCall(found[1], found[2])

    def written(self, seen: Observation) -> str:
        """Return an observation as the model reads it."""
        return f"<{RESULT}>{seen.text}</{RESULT}>"

    async def call(self, name: str, argument: str | Mapping[str, Any]) -> Observation:
        """Return what a tool finds. Errors and time-outs are observations, too, and are counted.

        Args:
            name: of the tool.
            argument: a text, or arguments by their names.

        Raises:
            ToolUnavailable: the tool cannot be asked.
        """
        began = time.perf_counter()
        text, failure = await self._outcome(name, argument)
        cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
        seen = Observation(cut, failure, time.perf_counter() - began)
        self.figures["agent/tool_calls"] += 1
        self.figures["agent/tool_errors"] += failure == "error"
        self.figures["agent/tool_timeouts"] += failure == "timeout"
        if name in self._tools:
            self.figures[f"agent/tool_seconds/{name}"] += seen.seconds
        written = argument if isinstance(argument, str) else json.dumps(dict(argument), ensure_ascii=False)
        self._told(ToolCall(name, written), seen)
        return seen

    async def _outcome(
        self, name: str, argument: str | Mapping[str, Any]
    ) -> tuple[str, Literal["", "error", "timeout"]]:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}; there is {', '.join(self._tools) or 'none'}", "error"
        try:
            async with asyncio.timeout(self._timeout):
                return await tool.call(argument if isinstance(argument, str) else tool.argument(argument)), ""
        except TimeoutError:
            return f"error: no answer within {self._timeout:g} s", "timeout"
        except ToolUnavailable:
            raise
        except ToolError as error:
            return f"error: {error}", "error"
        except Exception as error:  # noqa: BLE001 - of the user's tool
            return f"error: {type(error).__name__}: {error}", "error"
