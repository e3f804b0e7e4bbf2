"""Integer arithmetic of a shell, `$(( ))` and `(( ))`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, Final

from rlinf_cli.importing.shell.grammar import ScriptError
from rlinf_core.suggest import excerpt

_LARGEST: Final = 2**63
_OPERATIONS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # A shell rounds toward 0, and a remainder has the sign of the dividend.
    ast.FloorDiv: lambda one, other: _quotient(one, other),
    ast.Mod: lambda one, other: one - other * _quotient(one, other),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def computed(expression: str, variable: Callable[[str], str]) -> int:
    """Return the value of an integer expression.

    Raises:
        ScriptError: it holds anything but integers, variables and operators, or divides by 0.
    """
    text = re.sub(r"(?<![<>=!])!(?!=)", " not ", expression.replace("&&", " and ").replace("||", " or "))
    text = re.sub(r"(?<!/)/(?!/)", "//", text.replace("$", ""))
    try:
        return _value(ast.parse(text.strip() or "0", mode="eval").body, variable, 0)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise ScriptError(f"`{excerpt(expression)}` cannot be evaluated") from error


def _quotient(one: int, other: int) -> int:
    magnitude = abs(one) // abs(other)
    return magnitude if (one < 0) == (other < 0) else -magnitude


def _value(node: ast.expr, variable: Callable[[str], str], depth: int) -> int:
    if depth > 30:
        raise ValueError
    match node:
        case ast.Constant(value=int(number)):
            result = number
        case ast.Name(id=name):
            result = computed(variable(name), variable) if depth < 30 else 0
        case ast.UnaryOp(op=ast.USub(), operand=below):
            result = -_value(below, variable, depth + 1)
        case ast.UnaryOp(op=ast.Not(), operand=below):
            result = int(not _value(below, variable, depth + 1))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            result = _OPERATIONS[type(sign)](_value(left, variable, depth + 1), _value(right, variable, depth + 1))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATIONS:
            result = int(_OPERATIONS[type(sign)](_value(left, variable, depth + 1), _value(right, variable, depth + 1)))
        case ast.BoolOp(op=sign, values=values):
            truths = [_value(below, variable, depth + 1) != 0 for below in values]
            result = int(all(truths) if isinstance(sign, ast.And) else any(truths))
        case _:
            raise ValueError
    if abs(result) >= _LARGEST:
        raise ValueError
    return result
