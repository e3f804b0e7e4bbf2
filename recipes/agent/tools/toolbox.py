"""Named tools of an agent with a time limit per call; errors become observations."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from recipes.agent.tools.tool import CallLost, Tool, ToolError, ToolUnavailable
from recipes.language.data.text_tokens import Spoken, mended
from rlinf_core.failures import text_of

# The maximum characters of an observation; longer ones are truncated.
_LONGEST: Final = 4000
RESULT: Final = "result"
# Errors of an absent server; they are the argument's fault only if the tool has answered other calls.
_NOBODY: Final = (ConnectionRefusedError, socket.gaierror)
# Counts texts with unpaired surrogates, which no tokenizer accepts.
TEXTS_MENDED: Final = "agent/texts_mended"


class ToolCall(NamedTuple):
    """A call that a model wrote.

    Attributes:
        name: the name of the tool.
        argument: the argument as text; JSON if the arguments have names.
    """

    name: str
    argument: str


class Observation(NamedTuple):
    """The result of a call: its text, the error, and the duration in seconds."""

    text: str
    failure: Literal["", "error", "timeout"]
    seconds: float


class Toolbox:
    """The tools of one run of an agent.

    A model writes `<name>argument</name>` at the end of a turn, and gets `<result>text</result>`; or it writes calls in
    the form of its chat template.

    Args:
        tools: the tools, whose names differ.
        timeout: the time limit of one call in seconds.
        on_call: called with every call and its observation.
        native: whether calls are in the form of the chat template, if it has one.

    Attributes:
        figures: the metrics of calls, errors, timeouts and seconds per tool, by full name.
        failure: why a tool was unavailable; "": none was.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        timeout: float,
        on_call: Callable[[ToolCall, Observation], None] = lambda call, seen: None,
        *,
        native: bool = False,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._timeout = timeout
        self._on_call = on_call
        self._native = native
        self._call = re.compile(rf"<({'|'.join(map(re.escape, self._tools))})>((?:(?!<\1>).)*)</\1>\s*\Z", re.DOTALL)
        self.figures: defaultdict[str, float] = defaultdict(float)
        self.failure = ""

    def with_tools(self, tools: Sequence[Tool], timeout: float) -> Toolbox:
        """Return a toolbox of other tools that shares the metrics and samples of this one."""
        other = Toolbox(tools, timeout, self._on_call, native=self._native)
        other.figures = self.figures
        return other

    def note(self, call: ToolCall, seen: Observation) -> None:
        """Show an action in a run that the model did not call."""
        self._on_call(call, seen)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tools."""
        return tuple(self._tools)

    @property
    def stop(self) -> tuple[str, ...]:
        """The texts that end a turn with a call."""
        return tuple(f"</{name}>" for name in self._tools)

    @property
    def instructions(self) -> str:
        """The directions for using the tools, for a system message; empty without tools."""
        if not self._tools:
            return ""
        lines = [f"<{tool.name}>...</{tool.name}> {tool.description}" for tool in self._tools.values()]
        return "\n".join(("You may use tools, and are answered with <result>...</result>:", *lines))

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """The tools as functions of chat completions; none if calls are plain text."""
        described = (
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in (self._tools.values() if self._native else ())
        )
        return tuple({"type": "function", "function": function} for function in described)

    def find_call(self, text: str, *, thinking: bool = False) -> ToolCall | None:
        """Return the call at the end of a turn; None if there is none, or it is part of a thought.

        Args:
            text: the text of the turn.
            thinking: whether the turn begins within a thought.
        """
        match = self._call.search(text) if self._tools else None
        if match is None or not Spoken(text, thinking=thinking).has(match.start(), match.end()):
            return None
        return ToolCall(match[1], match[2])

    def written(self, seen: Observation) -> str:
        """Return an observation in the form for the model."""
        return f"<{RESULT}>{seen.text}</{RESULT}>"

    async def call(self, name: str, argument: str | Mapping[str, Any]) -> Observation:
        """Return the result of a call. Errors and timeouts also become observations, and are counted.

        A call without an answer is retried once. If that has none either, this becomes an observation, as the argument
        may be the reason. A tool that answers no calls is unavailable.

        Args:
            name: the name of the tool.
            argument: a text, or arguments by their names.

        Raises:
            ToolUnavailable: the tool cannot be called.
        """
        began = time.perf_counter()
        text, failure = await self._outcome(name, argument)
        cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
        whole = mended(cut)
        self.figures[TEXTS_MENDED] += whole != cut
        seen = Observation(whole, failure, time.perf_counter() - began)
        self.figures["agent/tool_calls"] += 1
        self.figures["agent/tool_errors"] += failure == "error"
        self.figures["agent/tool_timeouts"] += failure == "timeout"
        if name in self._tools:
            self.figures[f"agent/tool_seconds/{name}"] += seen.seconds
        written = argument if isinstance(argument, str) else json.dumps(dict(argument), ensure_ascii=False)
        self._on_call(ToolCall(name, written), seen)
        return seen

    def _unavailable(self, name: str, why: str) -> ToolUnavailable:
        """Return the error of an unavailable tool; the run has failed, even if the agent handles the error."""
        self.failure = f"the tool `{name}`: {why}"
        return ToolUnavailable(self.failure)

    async def _outcome(
        self, name: str, argument: str | Mapping[str, Any]
    ) -> tuple[str, Literal["", "error", "timeout"]]:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: unknown tool {name}; known: {', '.join(self._tools) or 'none'}", "error"
        try:
            text = argument if isinstance(argument, str) else tool.argument(argument)
            outcome = await self._called(tool, text)
            if isinstance(outcome, Exception) and not tool.computes:
                # Retry once, as either the argument or the server may be at fault.
                outcome = await self._called(tool, text)
        except ToolError as error:
            return f"error: {error}", "error"
        except ToolUnavailable as error:
            self.failure = str(error)
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's tool
            return f"error: {type(error).__name__}: {text_of(error)}", "error"
        if isinstance(outcome, str):
            return outcome, ""
        tool.health.note(f"{name} {text}", answered=False)
        late = isinstance(outcome, TimeoutError)
        why = f"no answer within {self._timeout:g} s" if late else f"{type(outcome).__name__}: {text_of(outcome)}"
        why = str(outcome) if isinstance(outcome, CallLost) else why
        nobody = isinstance(outcome, _NOBODY) and not tool.health.has_answered
        if not tool.computes and (nobody or tool.health.answers_nobody):
            raise self._unavailable(name, why)
        return f"error: {why}", "timeout" if late else "error"

    async def _called(self, tool: Tool, argument: str) -> str | Exception:
        """Return the result of a call, or an error that may be the fault of either side."""
        try:
            async with asyncio.timeout(self._timeout):
                text = await tool.call(argument)
        except (TimeoutError, CallLost, ConnectionError, socket.gaierror) as error:
            return error
        except ToolError:
            tool.health.note(argument, answered=True)
            raise
        tool.health.note(argument, answered=True)
        return text
