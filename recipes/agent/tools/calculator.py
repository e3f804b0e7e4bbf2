"""A calculator: arithmetic that is parsed and never evaluated as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Final

from recipes.agent.tools.tool import Tool, ToolError

Number = int | float

# The maximum characters of an expression, and bits of an integer; larger ones only take time.
_LONGEST: Final = 200
_MOST_BITS: Final = 1024
_BINARY: Final[Mapping[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: operator.mod,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Number], Number]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Tool):
    """Numbers, parentheses and + - * / // % **."""

    name = "calculator"
    computes = True
    description = "computes an arithmetic expression, such as (3 + 4) * 2"

    async def call(self, argument: str) -> str:
        return calculate(argument)


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text; floats with 12 digits.

    Raises:
        ToolError: the text is no arithmetic expression, or its value is undefined or too large.
    """
    if len(expression) > _LONGEST:
        raise ToolError(f"the expression is longer than {_LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the number is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case _:
            raise ToolError("only numbers, parentheses and + - * / // % ** are known")


def _power(base: Number, exponent: Number) -> Number:
    # Checked before computing, as a huge integer would exhaust the machine's memory.
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent * (abs(int(base)).bit_length() - 1) > _MOST_BITS:
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ToolError("the value is not a real number")
    return _checked(value)


def _checked(value: Number) -> Number:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
        return value
    if value.bit_length() > _MOST_BITS:
        raise OverflowError
    return value
