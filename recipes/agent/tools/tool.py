"""The interface of tools, and checks of whether a user's function can be called as tools and agents are."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from numbers import Number
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from rlinf_core import ConfigError

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
