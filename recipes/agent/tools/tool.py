"""The interface of tools, and the toolbox of one run of an agent: named tools with a time limit per call, whose errors
become observations.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from numbers import Number
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, cast, get_args, get_origin

from recipes.language.text.text_tokens import Spoken, mended
from rlinf_core import ConfigError
from rlinf_core.failures import text_of

_ONE_TEXT: Final[Mapping[str, Any]] = MappingProxyType(
    {"type": "object", "properties": {"argument": {"type": "string"}}, "required": ["argument"]}
)


class ToolError(Exception):
    """An invalid tool argument; the error text is shown to the model."""


class ToolUnavailable(Exception):  # noqa: N818 - says what is the matter, as `ToolError` does
    """A tool that is unavailable because its server is down: the run fails, and the model is not at fault."""


class CallLost(ToolUnavailable):
    """A call or an episode that failed on a reachable server, possibly because of what was asked."""


# Different consecutive unanswered calls after which a tool counts as unresponsive.
_MOST_LOST: Final = 3


class ToolHealth:
    """The results of a tool's last calls in this process, which show whether it responds.

    Attributes:
        has_answered: whether any call was answered.
    """

    def __init__(self) -> None:
        self.has_answered = False
        self._lost: set[int] = set()

    def note(self, call: str, *, answered: bool) -> None:
        """Record the end of a call."""
        self.has_answered |= answered
        self._lost = set() if answered else {*self._lost, hash(call)}

    @property
    def answers_nobody(self) -> bool:
        """Whether several different calls in a row had no answer; a single call may itself be at fault."""
        return len(self._lost) >= _MOST_LOST


class Tool(ABC):
    """A tool that a model may call by name with a text.

    Attributes:
        name: the name in the model's calls.
        description: a sentence for the model about what it does.
        parameters: the JSON Schema of its arguments, for models that call functions in their own form.
        computes: whether a call only computes its argument here, so that a timeout is the model's fault. For other
            tools, it is only after a second try, and if the tool answers other calls.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = _ONE_TEXT
    computes: bool = False

    @cached_property
    def health(self) -> ToolHealth:
        """The tool's health in this process."""
        return ToolHealth()

    def argument(self, values: Mapping[str, Any]) -> str:
        """Return the argument of `call` for a call with named arguments.

        Raises:
            ToolError: the arguments do not match `parameters`.
        """
        value = values.get("argument")
        if set(values) != {"argument"} or isinstance(value, dict | list | None):
            raise ToolError(f'the arguments of {self.name} are {{"argument": TEXT}}')
        return str(value)

    @abstractmethod
    async def call(self, argument: str) -> str:
        """Return the tool's result.

        Raises:
            ToolError: the argument is invalid.
            ToolUnavailable: the tool cannot be called at all.
            CallLost: the tool was called and did not answer.
        """


class FunctionTool(Tool):
    """A user's function as a tool, with the first line of its docstring and one text argument.

    A function that is not async runs in its own thread. Threads cannot be ended from outside: after a timeout it
    continues, and its result is ignored.

    Args:
        function: the function, which returns a text or a number, or something to await for one.
        target: the `package.module:name` of the function, whose name the tool has; "": the function's own name.

    Raises:
        ConfigError: the function cannot be called with one text.
    """

    def __init__(self, function: Callable[[str], Any], target: str = "") -> None:
        self.name = target.rpartition(":")[2] or function.__name__
        check_call(function, f"tool `{target or self.name}`", "a text", text=True)
        described = cast("Any", function).func if isinstance(function, partial) else function
        self.description = (inspect.getdoc(described) or "").partition("\n")[0]
        self._function: Callable[[str], Any] = function

    async def call(self, argument: str) -> str:
        is_async = inspect.iscoroutinefunction(self._function)
        result = self._function(argument) if is_async else await in_thread(self._function, argument)
        # Decorated functions and objects do not show that they are async.
        result = await result if inspect.isawaitable(result) else result
        if not isinstance(result, str | Number):
            raise TypeError(f"{self.name} returned {type(result).__name__}, not a text or a number")
        return str(result)


async def in_thread(function: Callable[[str], Any], argument: str) -> Any:
    """Run a function in a daemon thread and return its result; a pool would fill up with hanging functions.

    Raises:
        RuntimeError: the function raised something that is no `Exception`, such as `SystemExit`.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((value, error))

    def run() -> None:
        value, raised = None, None
        try:
            value = function(argument)
        except BaseException as error:  # noqa: BLE001 - of the user's function; raised where it was called
            raised = error
        # The loop may be closed if the caller has continued without the result.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, raised)

    threading.Thread(target=run, name="rlinf-tool", daemon=True).start()
    value, error = await ended
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return value


def check_call(function: Callable[..., Any], what: str, *arguments: str, text: bool = False) -> None:
    """Check that a function accepts positional arguments; one whose signature cannot be read passes.

    Args:
        function: the function.
        what: the function, for messages.
        arguments: the names of the arguments, for messages.
        text: whether the first argument is a text.

    Raises:
        ConfigError: it is a class, or does not accept the arguments.
    """
    if isinstance(function, type):
        raise ConfigError(f"{what} is a class, not a function", help="name a function that makes an object and uses it")
    signature = _signature(function)
    try:
        bound = signature.bind(*arguments) if signature is not None else None
    except TypeError as error:
        raise ConfigError(
            f"{what} cannot be called with {', '.join(arguments)}",
            why=f"its arguments are `{signature}`: {error}",
            help=f"let it accept {len(arguments)} positional argument{'s' if len(arguments) > 1 else ''}",
        ) from None
    if signature is None or bound is None or not text:
        return
    first = signature.parameters[next(iter(bound.arguments))]
    if first.annotation is not first.empty and not _takes_text(first.annotation):
        raise ConfigError(
            f"{what} takes `{first}`, and would get a text",
            help=f"write `{first.name}: str`, and convert the text in the function",
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function, with annotations evaluated if possible; None: it has none, as in C."""
    for evaluates in (True, False):
        try:
            return inspect.signature(function, eval_str=evaluates)
        except Exception:  # noqa: BLE001 - an annotation may be any expression
            continue
    return None


def _takes_text(annotation: Any) -> bool:
    """Return whether an annotation accepts any text; true where it is not understood."""
    origin, kinds = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType, Annotated):
        return any(map(_takes_text, kinds[:1] if origin is Annotated else kinds))
    kind: Any = origin or annotation
    if kind in (None, Literal, Any):
        return kind is Any
    return not isinstance(kind, type) or getattr(kind, "_is_protocol", False) or issubclass(str, kind)


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
