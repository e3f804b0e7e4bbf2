"""The fork of the program's process, and the tests in this process."""

# Values of programs have no types here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import _ctypes
import _operator as operator
import builtins
import marshal
import os
import sys

from recipes.language.sandbox.function_tests.pipe import ENDED, Gone, PipeEnd, imported
from recipes.language.sandbox.function_tests.remote import ARITHMETIC, ITEMS, ORDER, UNARY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any, Final
else:
    ModuleType = type(sys)

_PR_SET_DUMPABLE: Final = 4
# Exit statuses above it are signals, by the shell's convention.
_ENDED_BY: Final = 128


def _operations() -> dict[str, Callable[..., Any]]:
    """Return the operations that the tests may request on the program's objects, by name."""
    binary = {name: getattr(operator, f"{name}_" if name in ("and", "or") else name) for name in (*ORDER, *ARITHMETIC)}

    def swapped(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda one, other: operation(other, one)

    return {
        **{name: getattr(builtins, name) for name in (*UNARY, "getattr", "setattr", "delattr", "isinstance")},
        **{name: getattr(operator, name) for name in (*ITEMS, "eq")},
        **binary,
        **{f"r{name}": swapped(binary[name]) for name in ARITHMETIC},
        "call": lambda function, *args, **kwargs: function(*args, **kwargs),
        "enter": lambda manager: manager.__enter__(),
        "exit": lambda manager: manager.__exit__(None, None, None),
        "await": lambda awaitable: imported("asyncio").run(awaitable),
        "load": _load,
    }


def _load(program: str, imports: Mapping[str, str], depth: int) -> dict[str, object]:
    """Run a program as a module, and return the names that it defines.

    Args:
        program: the program.
        imports: the names that it may use without importing them, each with its module; "": the name is a module's.
        depth: the limit of recursion; 0: Python's.
    """
    if depth:
        sys.setrecursionlimit(depth)
    module = sys.modules["answer"] = ModuleType("answer")
    names = module.__dict__
    known = {name: getattr(imported(of), name) if of else imported(name) for name, of in imports.items()}
    names.update(known)
    try:
        exec(compile(program, "<answer>", "exec", dont_inherit=True), names)  # noqa: S102 - this process is there for it
    except SystemExit as error:
        # A program may call `exit` after defining its functions.
        if error.code not in (None, 0):
            raise
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("__") and not (name in known and value is known[name])
    }


def _names(used: Sequence[str], defined: Mapping[str, object]) -> dict[str, object]:
    """Return the names that the tests take from a program.

    A built-in name such as `abs` is taken from the program only if the tests use no other name of it, as a program
    could replace what the tests compare with.

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
        AssertionError: the result differs from `expected`.
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
    """Run the tests; exceptions of tests and program propagate."""
    defined: dict[str, object] = link.ask("load", [job["program"], job["imports"], job["depth"]], {})
    names: dict[str, object] = {"__name__": "tests", **_names(job["names"], defined)}
    for statement in job["statements"]:
        exec(compile(statement, "<test>", "exec", dont_inherit=True), names)  # noqa: S102 - the tests are the data set's
    for function, args, expected in job["calls"]:
        _check_call(defined, function, args, expected)


def main() -> None:
    """Fork the program's process, read the job from standard input, and write the job's mark if all tests pass."""
    here, there = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        # Hide the tests, which are not read yet, and the standard output from the program.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.close(here[1])
        os.close(there[0])
        PipeEnd(here[0], there[1], _operations()).serve()
        os._exit(0)
    os.close(here[0])
    os.close(there[1])
    # Forbid other processes of this user to trace this process or read its memory and files, before any program runs.
    c: Any = _ctypes
    prctl = c.dlsym(c.dlopen(None, 0), "prctl")
    if c.call_function(prctl, (_PR_SET_DUMPABLE, 0, 0, 0, 0)) != 0:
        raise OSError("this process cannot be hidden from the program's")
    link = PipeEnd(there[0], here[1])
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
    """End with the status of the program's process; if it sent an invalid message, print the reason and end with 1."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if reason == ENDED else 0
    if code == 0:
        print(reason, file=sys.stderr, flush=True)
    os._exit(code if code > 0 else _ENDED_BY - code if code else 1)
