"""The interface of tools."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, cast

_ONE_TEXT: Final[Mapping[str, Any]] = MappingProxyType(
    {"type": "object", "properties": {"argument": {"type": "string"}}, "required": ["argument"]}
)


class ToolError(Exception):
    """An invalid tool argument; the error text is shown to the model."""


class ToolUnavailable(Exception):  # noqa: N818 - says what is the matter, as `ToolError` does
    """A tool that is unavailable because its server is down: the run fails, and the model is not at fault."""


class CallLost(ToolUnavailable):
    """A call, or an episode, that broke though its server could be reached: what was asked may be the reason."""


# Different calls in a row without an answer after which a tool answers nobody.
_MOST_LOST: Final = 3


class ToolHealth:
    """The ends of a tool's last calls in this process, which say whether it answers anybody.

    Attributes:
        has_answered: whether it ever has.
    """

    def __init__(self) -> None:
        self.has_answered = False
        self._lost: set[int] = set()

    def note(self, call: str, *, answered: bool) -> None:
        """Note the end of a call."""
        self.has_answered |= answered
        self._lost = set() if answered else {*self._lost, hash(call)}

    @property
    def answers_nobody(self) -> bool:
        """Whether several different calls in a row had no answer: one alone may be at fault itself."""
        return len(self._lost) >= _MOST_LOST


class Tool(ABC):
    """Something that a model may use, by its name, with a text.

    Attributes:
        name: the model calls it by this.
        description: what it does, in a sentence, for the model.
        parameters: JSON Schema of its arguments, for models that call functions in their own form.
        computes: a call does here what its argument says, and nothing else. One that takes too long is the model's
            fault then; of another one only after a second try, and where the tool answers others.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = _ONE_TEXT
    computes: bool = False

    @cached_property
    def health(self) -> ToolHealth:
        """Whether it answers anybody."""
        return ToolHealth()

    def argument(self, values: Mapping[str, Any]) -> str:
        """Return the argument of `call` for a call with named arguments.

        Raises:
            ToolError: they are not those of `parameters`.
        """
        value = values.get("argument")
        if set(values) != {"argument"} or isinstance(value, dict | list | None):
            raise ToolError(f'the arguments of {self.name} are {{"argument": TEXT}}')
        return str(value)

    @abstractmethod
    async def call(self, argument: str) -> str:
        """Return what the tool finds.

        Raises:
            ToolError: it cannot work with the argument.
            ToolUnavailable: it cannot be asked at all.
            CallLost: it was asked, and there is no answer.
        """


class FunctionTool(Tool):
    """A user's function as a tool: its name, the first line of its docstring, one text as its argument.

    One that is not async runs in its own thread. A thread cannot be ended from outside: after a time-out it goes
    on, unheard, until the function returns or the process ends.
    """

    def __init__(self, function: Callable[[str], str | Awaitable[str]]) -> None:
        self.name = function.__name__
        self.description = (inspect.getdoc(function) or "").partition("\n")[0]
        self._function = function

    async def call(self, argument: str) -> str:
        if inspect.iscoroutinefunction(self._function):
            return str(await cast("Awaitable[str]", self._function(argument)))
        return str(await in_thread(cast("Callable[[str], str]", self._function), argument))


async def in_thread(function: Callable[[str], str], argument: str) -> str:
    """Run a function in a daemon thread and return its result; a pool would fill up with hanging functions."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[str] = loop.create_future()

    def settle(act: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            act(value)

    def tell(act: Callable[[Any], None], value: Any) -> None:
        # The loop may be closed by now: the caller has continued without the result.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, act, value)

    def run() -> None:
        try:
            value = function(argument)
        except Exception as error:  # noqa: BLE001 - of the user's function; raised where it was called
            tell(result.set_exception, error)
        else:
            tell(result.set_result, value)

    threading.Thread(target=run, name="rlinf-tool", daemon=True).start()
    return await result
