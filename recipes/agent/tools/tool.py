"""The interface of tools."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from numbers import Number
from types import MappingProxyType
from typing import Any, Final, cast

from recipes.agent.own_functions import check_call

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
