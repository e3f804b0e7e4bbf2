"""Proxies for objects of the other process."""

# Values of programs have no types here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final, TypeAlias

    # Has the other process do an operation with arguments, and returns its result.
    Ask: TypeAlias = Callable[[str, list[object], dict[str, object]], Any]

UNARY: Final = (
    *("len", "str", "repr", "bool", "hash", "abs", "round", "int", "float", "iter", "next", "reversed", "dir"),
)
ITEMS: Final = ("getitem", "setitem", "delitem")
ORDER: Final = ("lt", "le", "gt", "ge")
ARITHMETIC: Final = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
)


class Remote:
    """A proxy for an object of the other process.

    Args:
        ask: requests an operation of that process.
        number: the object's number there.
    """

    __slots__ = ("_ask", "_number")

    def __init__(self, ask: Ask, number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return asked(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        asked(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        asked(self, "delattr", name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        ask: Ask = object.__getattribute__(self, "_ask")
        return ask("call", [self, *args], kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(asked(self, "eq", other))

    def __hash__(self) -> int:
        return int(asked(self, "hash"))

    def __contains__(self, value: object) -> bool:
        return any(value is item or value == item for item in self)

    def __iter__(self) -> Iterator[Any]:
        return asked(self, "iter")

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(asked(instance, "isinstance", self))

    def __enter__(self) -> Any:
        return asked(self, "enter")

    def __exit__(self, *error: object) -> None:
        asked(self, "exit")


def asked(remote: Remote, name: str, *args: object) -> Any:
    ask: Ask = object.__getattribute__(remote, "_ask")
    return ask(name, [remote, *args], {})


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args: asked(self, name, *args)


def _operator_method(name: str) -> Callable[[Remote, object], Any]:
    """Return a method for an operator, which refuses a plain operand: an object must not imitate an expected value."""

    def method(self: Remote, other: object) -> Any:
        result = asked(self, name, other)
        if not isinstance(other, Remote) and not isinstance(result, Remote):
            raise TypeError("the program gives an object where a plain value is expected")
        return result

    return method


for _name in (*UNARY, *ITEMS):
    if f"__{_name}__" not in Remote.__dict__:
        setattr(Remote, f"__{_name}__", _method(_name))
for _name in (*ORDER, *ARITHMETIC, *(f"r{name}" for name in ARITHMETIC)):
    setattr(Remote, f"__{_name}__", _operator_method(_name))
