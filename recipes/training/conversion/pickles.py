"""Pickle streams, read as data.

A pickle is a program that names functions and calls them. Here the names stay names. Containers, numbers and text are
built directly; every call in the stream goes to `PickleReader.make`, which knows a few names and builds their values
itself. A file can therefore reach only the reader's own code, whatever Python or torch allow.
`torch.load(weights_only=True)` promises the same, but broke the promise before torch 2.10 (CVE-2025-32434,
CVE-2026-24747), and rlinf supports older versions.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, Final, NoReturn, cast

# The largest stream in bytes; its values take up to a hundred times as much memory. A tensor of eight ranks takes about
# 1200.
LIMIT: Final = 64 << 20
# Types of keys whose hash takes one step. Hashing nested tuples that repeat their parts takes exponential time.
_KEYS: Final = (str, int)
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES: Final = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES")
)
_EMPTY: Final[dict[str, Callable[[], object]]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS: Final = frozenset(("BINPUT", "LONG_BINPUT"))
_GETS: Final = frozenset(("BINGET", "LONG_BINGET"))
_SKIPPED: Final = frozenset(("PROTO", "FRAME"))


class Name(str):
    """A name of a module's class or function, as in `torch.float32`. Nothing is looked up by it."""

    __slots__ = ()


class PickleReader:
    """A reader of one pickle stream; subclasses define the meaning of names.

    Memory and time are proportional to the length of the stream.
    """

    def make(self, name: Name, arguments: tuple[Any, ...]) -> object:
        """Return the result of a call in the stream.

        Raises:
            ValueError: `name` is unknown, or the arguments do not fit it.
        """
        raise ValueError(f"it calls `{name}`, which is never executed")

    def stored(self, reference: object) -> object:
        """Return the object that a persistent id of the stream refers to.

        Raises:
            ValueError: there is no such object.
        """
        raise ValueError("it refers to another file")

    def build(self, value: object, state: Any) -> None:
        """Give a value of `make` its state.

        Raises:
            ValueError: the value takes no state.
        """
        raise ValueError("it modifies an immutable value")

    def key(self, key: object) -> Any:
        """Return the key of a mapping.

        Raises:
            ValueError: the key is of a type whose hash may take long.
        """
        return key if type(key) in _KEYS else _refuse("a mapping key is neither text nor a number")

    def read(self, stream: bytes) -> object:
        """Return the value that a stream describes.

        Raises:
            ValueError: the stream is damaged, larger than `LIMIT`, or uses an unknown name or operation.
        """
        if len(stream) > LIMIT:
            raise ValueError(f"its pickle is {len(stream)} bytes long; the limit is {LIMIT}")
        try:
            return self._run(stream)
        except (IndexError, KeyError, TypeError, AttributeError, UnicodeError, OverflowError) as error:
            raise ValueError(f"it is damaged: {type(error).__name__}") from error

    def _run(self, stream: bytes) -> object:
        stack: list[Any] = []
        outer: list[list[Any]] = []
        memo: dict[int, object] = {}
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name in _GETS:
                stack.append(memo[cast("int", argument)])
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in _PUTS:
                memo[cast("int", argument)] = stack[-1]
            elif name in _VALUES:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name == "MARK":
                outer.append(stack)
                stack = []
            elif name in ("TUPLE", "SETITEMS", "APPENDS"):
                items, stack = stack, outer.pop()
                self._take(name, stack, items)
            elif name in ("SETITEM", "APPEND"):
                count = 2 if name == "SETITEM" else 1
                items = [stack.pop() for _ in range(count)][::-1]
                self._take(f"{name}S", stack, items)
            elif name in _TUPLES:
                count = _TUPLES[name]
                stack.append(tuple([stack.pop() for _ in range(count)][::-1]))
            elif name == "GLOBAL":
                stack.append(Name(cast("str", argument).replace(" ", ".")))
            elif name == "STACK_GLOBAL":
                last, first = stack.pop(), stack.pop()
                stack.append(Name(f"{_text(first)}.{_text(last)}"))
            elif name in ("REDUCE", "NEWOBJ"):
                arguments, called = stack.pop(), stack.pop()
                if type(called) is not Name or type(arguments) is not tuple:
                    raise ValueError("it calls an object that is not a name")
                stack.append(self.make(called, cast("tuple[Any, ...]", arguments)))
            elif name == "BUILD":
                state = stack.pop()
                self.build(stack[-1], state)
            elif name == "BINPERSID":
                stack.append(self.stored(stack.pop()))
            elif name == "STOP":
                (value,) = stack
                return value
            elif name not in _SKIPPED:
                raise ValueError(f"it contains the opcode `{name}`, which no checkpoint needs")
        raise ValueError("it is truncated")

    def _take(self, name: str, stack: list[Any], items: list[Any]) -> None:
        """Add items to a container: the top of the stack, or a new tuple."""
        if name == "TUPLE":
            stack.append(tuple(items))
        elif name == "APPENDS" and type(stack[-1]) is list:
            stack[-1].extend(items)
        elif name == "SETITEMS" and type(stack[-1]) is dict:
            stack[-1].update(zip(map(self.key, items[::2]), items[1::2], strict=True))
        else:
            raise ValueError("it adds items to an object that is not a container")


# The most parts of a value; a part that occurs twice counts twice.
_MOST_PARTS: Final = 100_000


def check_plain(value: object, types: tuple[type, ...] = ()) -> None:
    """Refuse a value that holds anything but numbers, text, None, containers of these, and `types`.

    Args:
        value: the result of `PickleReader.read`; its parts may occur many times, or contain each other.
        types: further permitted types.

    Raises:
        ValueError: the value has other parts, or too many.
    """
    plain = (type(None), bool, int, float, str, *types)
    pending: list[Any] = [value]
    left = _MOST_PARTS
    while pending:
        part = pending.pop()
        parts: list[Any] = []
        if isinstance(part, (list, tuple)):
            parts = list(cast("list[Any]", part))
        elif isinstance(part, dict):
            parts = list(cast("dict[Any, Any]", part).values())
        elif type(part) is Name or not isinstance(part, plain):
            raise ValueError(f"it contains a `{type(part).__name__}`")
        left -= len(parts)
        if left < 0:
            raise ValueError("it has more objects than a checkpoint can have")
        pending += parts


def _text(value: object) -> str:
    return value if isinstance(value, str) else _refuse("a name is not text")


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)
