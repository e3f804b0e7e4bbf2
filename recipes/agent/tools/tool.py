"""The interface of tools."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, cast


class ToolError(Exception):
    """An argument that a tool cannot work with; its text is what the model is told."""


class Tool(ABC):
    """Something that a model may use, by its name, with a text.

    Attributes:
        name: the model calls it by this.
        description: what it does, in a sentence, for the model.
    """

    name: str
    description: str

    @abstractmethod
    async def call(self, argument: str) -> str:
        """Return what the tool finds.

        Raises:
            ToolError: it cannot work with the argument.
        """


class FunctionTool(Tool):
    """A function of the user's as a tool: its name, the first line of its docstring, one text as its argument.

    One that is not async runs in a thread of its own. A thread cannot be ended from outside: after a time-out it goes
    on, unheard, until the function returns or the process ends.
    """

    def __init__(self, function: Callable[[str], str | Awaitable[str]]) -> None:
        self.name = function.__name__
        self.description = (inspect.getdoc(function) or "").partition("\n")[0]
        self._function = function

    async def call(self, argument: str) -> str:
        """See `Tool`."""
        if inspect.iscoroutinefunction(self._function):
            return str(await cast("Awaitable[str]", self._function(argument)))
        return str(await in_thread(cast("Callable[[str], str]", self._function), argument))


async def in_thread(function: Callable[[str], str], argument: str) -> str:
    """Return what a function returns in a daemon thread; pools would fill up with functions that hang."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def settle(act: Callable[[Any], None], value: Any) -> None:
        if not found.done():
            act(value)

    def tell(act: Callable[[Any], None], value: Any) -> None:
        # The loop may be closed by now: whoever asked has gone on without an answer.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, act, value)

    def run() -> None:
        try:
            value = function(argument)
        except Exception as error:  # noqa: BLE001 - of the user's function; raised where it was called
            tell(found.set_exception, error)
        else:
            tell(found.set_result, value)

    threading.Thread(target=run, name="rlinf-tool", daemon=True).start()
    return await found
