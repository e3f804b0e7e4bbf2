"""Tools as an agent is given them: called by name, with a time limit; what goes wrong is an observation."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from recipes.agent.call_forms import find_calls
from recipes.agent.llm import ModelReply
from recipes.agent.messages import ChatMessage, ToolOffer
from recipes.agent.tools.base import Tool, ToolError, ToolUnavailable

# Longest observation in characters; what is longer is cut.
_LONGEST: Final = 4000
RESULT: Final = "result"


class ToolCall(NamedTuple):
    """A call that a model wrote.

    Attributes:
        name: of the tool.
        argument: as text.
        call_id: of a call in the form that the model's chat template teaches; its argument is a JSON object.
    """

    name: str
    argument: str
    call_id: str = ""


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
    def offer(self) -> ToolOffer | None:
        """The tools as functions, for a conversation whose calls are in the form of the chat template."""
        if not self._native or not self._tools:
            return None
        described = (
            {"name": each.name, "description": each.description, "parameters": dict(each.parameters)}
            for each in self._tools.values()
        )
        functions = tuple(json.dumps({"type": "function", "function": each}) for each in described)
        return ToolOffer(functions, self.instructions)

    def calls(self, reply: ModelReply) -> tuple[ToolCall, ...]:
        """Return the calls in a turn: all of those in the form of the chat template, or the one at its end."""
        if reply.form is None:
            call = self.find_call(reply.text)
            return () if call is None else (call,)
        schemas = {name: each.parameters for name, each in self._tools.items()}
        _, calls = find_calls(reply.raw, reply.form, schemas)
        return tuple(ToolCall(*each) for each in calls)

    async def answer(self, call: ToolCall) -> ChatMessage:
        """Carry out a call, and return the message that tells the model of its outcome.

        Raises:
            ToolUnavailable: the tool cannot be asked.
        """
        seen = await self._observed(call, json.loads(call.argument) if call.call_id else call.argument)
        text = seen.text if call.call_id else self.written(seen)
        return ChatMessage("tool", text, call_id=call.call_id, name=call.name if call.call_id else "")

    def find_call(self, text: str) -> ToolCall | None:
        """Return the call at the end of a turn; None where there is none."""
        found = self._call.search(text) if self._tools else None
        return None if found is None else ToolCall(found[1], found[2])

    def written(self, seen: Observation) -> str:
        """Return an observation as the model reads it."""
        return f"<{RESULT}>{seen.text}</{RESULT}>"

    async def call(self, name: str, argument: str) -> Observation:
        """Return what a tool finds. Errors and time-outs are observations, too, and are counted.

        Raises:
            ToolUnavailable: the tool cannot be asked.
        """
        return await self._observed(ToolCall(name, argument), argument)

    async def _observed(self, call: ToolCall, argument: str | Mapping[str, Any]) -> Observation:
        name, began = call.name, time.perf_counter()
        text, failure = await self._outcome(name, argument)
        cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
        seen = Observation(cut, failure, time.perf_counter() - began)
        self.figures["agent/tool_calls"] += 1
        self.figures["agent/tool_errors"] += failure == "error"
        self.figures["agent/tool_timeouts"] += failure == "timeout"
        if name in self._tools:
            self.figures[f"agent/tool_seconds/{name}"] += seen.seconds
        self._told(call, seen)
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
