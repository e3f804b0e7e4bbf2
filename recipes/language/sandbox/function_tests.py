"""Tests of functions: the tests and the program that they judge, each in a process of its own.

Travels into the sandbox as one file, so it is one file: standard library only, and of that what is written in C. Each
answer pays for each import: `json`, `ctypes` and `collections` take longer than most tests.

The program's process is forked before the tests are read, and a pipe of JSON is all that joins the two. An object that
is no plain value stays in its process: the other one holds a `Remote`, which equals no plain value and stands for none.
So a program reaches neither the tests, nor what they compare with, nor the line by which they say that they passed.
"""

# Values of programs have no types here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import _ctypes
import _json
import _operator as operator
import builtins
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import BuiltinFunctionType, FunctionType, ModuleType
    from typing import Any, Final
else:
    from _collections import deque

    ModuleType, FunctionType, BuiltinFunctionType = type(sys), type(lambda: None), type(len)

# Bytes of a message; a program that sends a longer one fails.
_LONGEST: Final = 16 << 20
_LENGTH: Final = 8
_PR_SET_DUMPABLE: Final = 4
_ENDED: Final = "the program ended before its tests"
# Exit statuses above it are signals, by the shell's convention.
_ENDED_BY: Final = 128
# Values that have a text of their own, by module and class, and how it is read.
_WRITTEN: Final = {
    **{("datetime", name): "fromisoformat" for name in ("datetime", "date", "time")},
    ("fractions", "Fraction"): "",
    ("decimal", "Decimal"): "",
}
_SEQUENCES: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
_UNARY: Final = (
    *("len", "str", "repr", "bool", "hash", "abs", "round", "int", "float", "iter", "next", "reversed", "dir"),
)
_ITEMS: Final = ("getitem", "setitem", "delitem")
_ORDER: Final = ("lt", "le", "gt", "ge")
_ARITHMETIC: Final = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
)


class _Grammar:
    """The grammar of messages, that of JSON as Python writes it."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float


# As `json` makes them of these functions, without its modules in Python.
_C: Final[Any] = _json
_scan: Final[Callable[[str, int], tuple[Any, int]]] = _C.make_scanner(_Grammar)
_encode: Final[Callable[[object, int], Sequence[str]]] = _C.make_encoder(
    None, None, _C.encode_basestring_ascii, None, ":", ",", False, False, True
)


class Gone(BaseException):
    """The end of the program's process. No `except Exception` of a test takes it for an error of a function."""


class Remote:
    """An object of the other process."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: PipeEnd, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return _asked(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _asked(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _asked(self, "delattr", name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        link: PipeEnd = object.__getattribute__(self, "_link")
        return link.ask("call", [self, *args], kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(_asked(self, "eq", other))

    def __hash__(self) -> int:
        return int(_asked(self, "hash"))

    def __contains__(self, value: object) -> bool:
        return any(value is item or value == item for item in self)

    def __iter__(self) -> Iterator[Any]:
        return _asked(self, "iter")

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(_asked(instance, "isinstance", self))

    def __enter__(self) -> Any:
        return _asked(self, "enter")

    def __exit__(self, *error: object) -> None:
        _asked(self, "exit")


def _asked(remote: Remote, name: str, *args: object) -> Any:
    link: PipeEnd = object.__getattribute__(remote, "_link")
    return link.ask(name, [remote, *args], {})


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args: _asked(self, name, *args)


def _operator_method(name: str) -> Callable[[Remote, object], Any]:
    """Return a method for an operator. An object must not stand for the number, or the text, that a test expects."""

    def method(self: Remote, other: object) -> Any:
        result = _asked(self, name, other)
        if not isinstance(other, Remote) and not isinstance(result, Remote):
            raise TypeError("the program gives an object where a plain value is expected")
        return result

    return method


for _name in (*_UNARY, *_ITEMS):
    if f"__{_name}__" not in Remote.__dict__:
        setattr(Remote, f"__{_name}__", _method(_name))
for _name in (*_ORDER, *_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC)):
    setattr(Remote, f"__{_name}__", _operator_method(_name))


def _module(name: str) -> Any:
    """Import a module that few programs need."""
    __import__(name)
    return sys.modules[name]


def _operations() -> dict[str, Callable[..., Any]]:
    """Return what the tests may ask of objects of the program, by name."""
    binary = {
        name: getattr(operator, f"{name}_" if name in ("and", "or") else name) for name in (*_ORDER, *_ARITHMETIC)
    }

    def swapped(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda one, other: operation(other, one)

    return {
        **{name: getattr(builtins, name) for name in (*_UNARY, "getattr", "setattr", "delattr", "isinstance")},
        **{name: getattr(operator, name) for name in (*_ITEMS, "eq")},
        **binary,
        **{f"r{name}": swapped(binary[name]) for name in _ARITHMETIC},
        "call": lambda function, *args, **kwargs: function(*args, **kwargs),
        "enter": lambda manager: manager.__enter__(),
        "exit": lambda manager: manager.__exit__(None, None, None),
        "await": lambda awaitable: _module("asyncio").run(awaitable),
        "load": _load,
    }


def _load(program: str) -> dict[str, object]:
    """Run a program as a module, and return the names that it defines."""
    module = sys.modules["answer"] = ModuleType("answer")
    names = module.__dict__
    try:
        exec(compile(program, "<answer>", "exec", dont_inherit=True), names)  # noqa: S102 - this process is there for it
    except SystemExit as error:
        # A program may end itself behind its functions.
        if error.code not in (None, 0):
            raise
    return {name: value for name, value in names.items() if not name.startswith("__")}


class PipeEnd:
    """An end of the pipe between the two processes, which writes values as messages, and numbers objects.

    Args:
        reader, writer: file descriptors.
        serves: whether this is the program's side, of whose objects the tests may ask every operation. The program may
            call the functions that a test gives it, and no more.
    """

    def __init__(self, reader: int, writer: int, *, serves: bool) -> None:
        self._reader, self._writer = reader, writer
        self._operations = _operations() if serves else None
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._classes: dict[str, type[BaseException]] = {}
        # Why the other side is there no more.
        self.gone = ""

    def ask(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Have the other side do an operation, and return its result. It may call functions of this side meanwhile.

        Raises:
            Gone: it has ended, or sent what is no message.
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
        """Return a value as JSON: scalars as they are, others as a list that begins with their kind."""
        match value:
            # A class of the program that is derived from a plain one loses its own methods.
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
            # Kept, so that no other object gets its id.
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", value.__name__, _bases(value)]
        return ["coroutine" if place == ("builtins", "coroutine") else "mine", number]

    def _read(self, written: Any) -> Any:
        """Return the value of a message; raises some `Exception` where it is none."""
        match written:
            case None | bool() | int() | float() | str():
                return written
            case ["yours", int() as number] if number >= 0:
                return self._objects[number]
            case ["mine", int() as number]:
                return self._remotes.setdefault(number, Remote(self, number))
            case ["coroutine", int() as number]:
                return _awaited(self._remotes.setdefault(number, Remote(self, number)))
            case ["exception", str() as name, list() as bases]:
                return self._exception(name, bases)
            case ["module", str() as name] if name in sys.stdlib_module_names:
                return _module(name)
            case ["named", str() as name, list() as fields, list() as items]:
                return _module("collections").namedtuple(name, fields)(*map(self._read, items))
            case ["dict", list() as items]:
                return {self._read(key): self._read(item) for key, item in items}
            case [("bytes" | "bytearray") as name, str() as digits]:
                return bytes.fromhex(digits) if name == "bytes" else bytearray.fromhex(digits)
            case ["complex", float() as real, float() as imaginary]:
                return complex(real, imaginary)
            case ["range", int() as start, int() as stop, int() as step]:
                return range(start, stop, step)
            case ["timedelta", int() as days, int() as seconds, int() as microseconds]:
                return _module("datetime").timedelta(days, seconds, microseconds)
            case ["written", str() as module, str() as name, str() as text]:
                kind = getattr(_module(module) if (module, name) in _WRITTEN else None, name)
                return kind.fromisoformat(text) if _WRITTEN[module, name] else kind(text)
            case [str() as name, list() as items]:
                return _SEQUENCES[name](map(self._read, items))
            case _:
                raise ValueError("no value")

    def _exception(self, name: str, bases: list[str]) -> type[BaseException]:
        """Return the class that stands for an exception class of the other side, so that tests may catch it."""
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
            raise self._gone(_ENDED) from None

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
                raise self._gone(_ENDED)
            data += chunk
        return bytes(data)

    def _gone(self, reason: str) -> Gone:
        self.gone = self.gone or reason
        return Gone(reason)


def _bases(kind: type[BaseException]) -> list[str]:
    """Return the names of a class and its bases that are Python's own, the nearest first."""
    return [base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]


async def _awaited(coroutine: Remote) -> Any:
    return _asked(coroutine, "await")


def _restore(own: Any, new: Any) -> None:
    """Change an argument as the other side has changed its copy."""
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


def _names(used: Sequence[str], defined: Mapping[str, object]) -> dict[str, object]:
    """Return the names that the tests take from a program.

    A name of Python's own, such as `abs`, is the program's only where it alone is tested: a program could replace what
    the tests compare with.

    Args:
        used: the names in the tests.
        defined: the names of the program.
    """
    own = {name: value for name, value in defined.items() if not hasattr(builtins, name)}
    shadowing = [name for name in defined if name in used and hasattr(builtins, name)]
    if len(shadowing) == 1 and own.keys().isdisjoint(used):
        own[shadowing[0]] = defined[shadowing[0]]
    return own


def _check_call(names: Mapping[str, Any], function: str, args: list[Any], expected: object) -> None:
    """Call a function, or the method of `Solution`, and compare its result.

    Raises:
        AssertionError: it is another one.
    """
    called = names[function] if function in names else getattr(names["Solution"](), function)
    result = _listed(called(*args))
    if result != expected and [result] != expected:
        raise AssertionError


def _listed(value: object) -> object:
    """Return a value with lists in place of tuples, which JSON does not have."""
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return value


def _judge(link: PipeEnd, job: Mapping[str, Any]) -> None:
    """Run the tests; raises what a test, or the program, raises."""
    defined: dict[str, object] = link.ask("load", [job["program"]], {})
    names: dict[str, object] = {"__name__": "tests", **_names(job["names"], defined)}
    for statement in job["statements"]:
        exec(compile(statement, "<test>", "exec", dont_inherit=True), names)  # noqa: S102 - the tests are the data set's
    for function, args, expected in job["calls"]:
        _check_call(defined, function, args, expected)


def main() -> None:
    """Fork the program's process, read the job from standard input, and write its mark where all tests pass."""
    here, there = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        # Neither the tests, which are not read yet, nor the standard output is the program's.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.close(here[1])
        os.close(there[0])
        PipeEnd(here[0], there[1], serves=True).serve()
        os._exit(0)
    os.close(here[0])
    os.close(there[1])
    # Another process of this user may neither trace this one, nor read its memory and files. It waits for a message.
    c: Any = _ctypes
    prctl = c.dlsym(c.dlopen(None, 0), "prctl")
    if c.call_function(prctl, (_PR_SET_DUMPABLE, 0, 0, 0, 0)) != 0:
        raise OSError("this process cannot be hidden from the program's")
    link = PipeEnd(there[0], here[1], serves=False)
    with open(0, "rb", closefd=False) as file:
        job = marshal.load(file)
    try:  # noqa: SIM105 - contextlib is one import more
        _judge(link, job)
    except Gone:
        pass
    if link.gone:
        _end_as(child, link.gone)
    print(f"\n{job['end']}", flush=True)
    os._exit(0)


def _end_as(child: int, reason: str) -> None:
    """End as the program's process did; where it has sent what is no message, say so, and end it."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if reason == _ENDED else 0
    if code == 0:
        print(reason, file=sys.stderr, flush=True)
    os._exit(code if code > 0 else _ENDED_BY - code if code else 1)


if __name__ == "__main__":
    main()
