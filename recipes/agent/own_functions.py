"""Checks, when a job starts, of whether a user's function can be called as agents and tools are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rlinf_core import ConfigError


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
