"""The pipe between the processes of tests and program: values as messages, objects by number."""

# Values of programs have no types here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import _json
import builtins
import os
import sys

from recipes.language.sandbox.function_tests.remote import Remote, asked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Mapping, Sequence
    from types import BuiltinFunctionType, FunctionType, ModuleType
    from typing import Any, Final
else:
    from _collections import deque

    ModuleType, FunctionType, BuiltinFunctionType = type(sys), type(lambda: None), type(len)

ENDED: Final = "the program ended before its tests"
# The maximum bytes of a message; a program that sends a longer one fails.
_LONGEST: Final = 16 << 20
_LENGTH: Final = 8
# Types with a text form, by module and class, and the method that parses it; "": the constructor.
_WRITTEN: Final = {
    **{("datetime", name): "fromisoformat" for name in ("datetime", "date", "time")},
    ("fractions", "Fraction"): "",
    ("decimal", "Decimal"): "",
}
_SEQUENCES: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}


class _Grammar:
    """The grammar of messages, Python's JSON."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float


# Built like those of `json`, without importing its Python modules.
_C: Final[Any] = _json
_scan: Final[Callable[[str, int], tuple[Any, int]]] = _C.make_scanner(_Grammar)
_encode: Final[Callable[[object, int], Sequence[str]]] = _C.make_encoder(
    None, None, _C.encode_basestring_ascii, None, ":", ",", False, False, True
)


class Gone(BaseException):
    """The end of the program's process; not an `Exception`, so that no test mistakes it for an error of a function."""


def imported(name: str) -> Any:
    """Import a rarely needed module."""
    __import__(name)
    return sys.modules[name]


class PipeEnd:
    """An end of the pipe between the two processes, which encodes values and numbers objects.

    Args:
        reader, writer: file descriptors.
        operations: the operations on this side's objects that the other side may request, by name. None: it may only
            call the functions that it was given.
    """

    def __init__(self, reader: int, writer: int, operations: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._reader, self._writer = reader, writer
        self._operations = operations
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._classes: dict[str, type[BaseException]] = {}
        # The reason why the other side is gone.
        self.gone = ""

    def ask(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Have the other side do an operation, and return its result. Meanwhile, it may call functions of this side.

        Raises:
            Gone: the other side has ended, or sent an invalid message.
            BaseException: the operation raised it.
        """
        self._send(["ask", name, [self._written(value) for value in args], self._written(dict(kwargs))])
        while True:
            message = self._receive()
            if message[0] == "ask":
                self._answer(message)
                continue
            try:
                if message[0] == "value":
                    value, changed = self._read(message[1]), [self._read(written) for written in message[2]]
                    for own, new in zip(args, changed, strict=True):
                        _restore(own, new)
                    return value
                error = self._error(*message[1:4])
            except Exception:  # noqa: BLE001 - the program may send anything
                raise self._gone("the program's process sent what is no message") from None
            raise error

    def serve(self) -> None:
        """Answer the other side until it has ended."""
        try:
            while True:
                self._answer(self._receive())
        except Gone:
            return

    def _answer(self, message: list[Any]) -> None:
        try:
            name, args, kwargs = message[1], [self._read(value) for value in message[2]], self._read(message[3])
        except Exception:  # noqa: BLE001 - the program may send anything
            raise self._gone("the program's process sent what is no message") from None
        try:
            if self._operations is not None:
                value = self._operations[name](*args, **kwargs)
            elif name == "call" and isinstance(args[0], FunctionType | BuiltinFunctionType | type):
                value = args[0](*args[1:], **kwargs)
            else:
                raise TypeError("a program may only call the functions that a test gives it")
            reply = ["value", self._written(value), [self._written(value) for value in args]]
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised on the other side
            plain = all(isinstance(text, str | int | float | None) for text in error.args)
            texts = list(error.args) if plain else [str(error)]
            reply = ["raised", type(error).__name__, _bases(type(error)), [self._written(text) for text in texts]]
        self._send(reply)

    def _error(self, name: str, bases: list[str], texts: list[Any]) -> BaseException:
        kind, arguments = self._exception(name, bases), [self._read(text) for text in texts]
        try:
            return kind(*arguments)
        except TypeError:
            error = kind.__new__(kind)
            error.args = tuple(arguments)
            return error

    def _written(self, value: object) -> object:
        """Return a value as JSON: scalars unchanged, others as a list that begins with their kind."""
        match value:
            # Convert subclasses to plain values, without calling their methods.
            case None | bool():
                return value
            case int():
                return int.__pos__(value)
            case float():
                return float.__pos__(value)
            case str():
                return str.__str__(value)
            case bytes() | bytearray():
                return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
            case complex():
                return ["complex", value.real, value.imag]
            case range():
                return ["range", value.start, value.stop, value.step]
            case dict():
                items = dict.items(value)
                return ["dict", [[self._written(key), self._written(item)] for key, item in items]]
            case tuple() if isinstance(getattr(value, "_fields", None), tuple):
                fields = list(getattr(value, "_fields"))  # noqa: B009 - no tuple's, by its type
                return ["named", type(value).__name__, fields, [self._written(item) for item in tuple.__iter__(value)]]
            case _:
                return self._written_object(value)

    def _written_object(self, value: object) -> object:
        kind = type(value)
        for name, sequence in _SEQUENCES.items():
            if isinstance(value, sequence):
                return [name, [self._written(item) for item in sequence.__iter__(value)]]
        if isinstance(value, Remote):
            return ["yours", object.__getattribute__(value, "_number")]
        if isinstance(value, ModuleType) and value.__name__ in sys.stdlib_module_names:
            return ["module", value.__name__]
        place = (kind.__module__, kind.__name__)
        if place in _WRITTEN:
            return ["written", *place, value.isoformat() if _WRITTEN[place] else str(value)]  # type: ignore[attr-defined]
        if place == ("datetime", "timedelta"):
            delta: Any = value
            return ["timedelta", delta.days, delta.seconds, delta.microseconds]
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            # Keep the object, so that no other gets its id.
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", value.__name__, _bases(value)]
        return ["coroutine" if place == ("builtins", "coroutine") else "mine", number]

    def _read(self, written: Any) -> Any:
        """Return the value of a message; raise any `Exception` if it is invalid."""
        match written:
            case None | bool() | int() | float() | str():
                return written
            case ["yours", int() as number] if number >= 0:
                return self._objects[number]
            case ["mine", int() as number]:
                return self._remotes.setdefault(number, Remote(self.ask, number))
            case ["coroutine", int() as number]:
                return _awaited(self._remotes.setdefault(number, Remote(self.ask, number)))
            case ["exception", str() as name, list() as bases]:
                return self._exception(name, bases)
            case ["module", str() as name] if name in sys.stdlib_module_names:
                return imported(name)
            case ["named", str() as name, list() as fields, list() as items]:
                return imported("collections").namedtuple(name, fields)(*map(self._read, items))
            case ["dict", list() as items]:
                return {self._read(key): self._read(item) for key, item in items}
            case [("bytes" | "bytearray") as name, str() as digits]:
                return bytes.fromhex(digits) if name == "bytes" else bytearray.fromhex(digits)
            case ["complex", float() as real, float() as imaginary]:
                return complex(real, imaginary)
            case ["range", int() as start, int() as stop, int() as step]:
                return range(start, stop, step)
            case ["timedelta", int() as days, int() as seconds, int() as microseconds]:
                return imported("datetime").timedelta(days, seconds, microseconds)
            case ["written", str() as module, str() as name, str() as text]:
                kind = getattr(imported(module) if (module, name) in _WRITTEN else None, name)
                return kind.fromisoformat(text) if _WRITTEN[module, name] else kind(text)
            case [str() as name, list() as items]:
                return _SEQUENCES[name](map(self._read, items))
            case _:
                raise ValueError("no value")

    def _exception(self, name: str, bases: list[str]) -> type[BaseException]:
        """Return the class that represents an exception class of the other side, so that tests can catch it."""
        if name not in self._classes:
            base = getattr(builtins, next(iter(bases)))
            if not (isinstance(base, type) and issubclass(base, BaseException)):
                raise ValueError("no exception")
            self._classes[name] = base if base.__name__ == name else type(name, (base,), {})
        return self._classes[name]

    def _send(self, message: object) -> None:
        data = "".join(_encode(message, 0)).encode()
        data = len(data).to_bytes(_LENGTH, "big") + data
        try:
            while data:
                data = data[os.write(self._writer, data) :]
        except OSError:
            raise self._gone(ENDED) from None

    def _receive(self) -> list[Any]:
        length = int.from_bytes(self._exactly(_LENGTH), "big")
        if length > _LONGEST:
            raise self._gone(f"the program gives a value of more than {_LONGEST >> 20} MiB")
        try:
            text = self._exactly(length).decode()
            message, end = _scan(text, 0)
        except (ValueError, RecursionError, StopIteration):
            text, message, end = "", None, 0
        if not isinstance(message, list) or end != len(text):
            raise self._gone("the program's process sent what is no message")
        return message

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            chunk = os.read(self._reader, length - len(data))
            if not chunk:
                raise self._gone(ENDED)
            data += chunk
        return bytes(data)

    def _gone(self, reason: str) -> Gone:
        self.gone = self.gone or reason
        return Gone(reason)


def _bases(kind: type[BaseException]) -> list[str]:
    """Return the names of a class and its bases that are built-in, the nearest first."""
    return [base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]


async def _awaited(coroutine: Remote) -> Any:
    return asked(coroutine, "await")


def _restore(own: Any, new: Any) -> None:
    """Apply the other side's changes of an argument to the original."""
    if isinstance(own, list) and isinstance(new, list):
        mine, theirs = own, new
        if len(mine) == len(theirs):
            for index, (one, other) in enumerate(zip(tuple(mine), theirs, strict=True)):
                if type(one) is type(other) and isinstance(one, list | dict | set | bytearray | deque):
                    _restore(one, other)
                else:
                    mine[index] = other
        else:
            mine[:] = theirs
    elif isinstance(own, dict | set) and type(own) is type(new):
        own.clear()
        own.update(new)
    elif isinstance(own, bytearray) and isinstance(new, bytearray):
        own[:] = new
    elif isinstance(own, deque) and isinstance(new, deque):
        own.clear()
        own.extend(new)
