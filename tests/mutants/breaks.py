"""The small ways to break a module, and where each applies."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_FUNCTIONS: Final = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean", "mean": "sum", "minimum": "maximum",
    "maximum": "minimum", "argmax": "argmin", "zeros": "ones", "ones": "zeros", "ceil": "floor",
}  # fmt: skip
_BUILTINS: Final = frozenset({"min", "max", "any", "all"})
# Exchanged arguments of these do nothing, or break a module in so many places that no test is needed.
_KEPT_ORDER: Final = frozenset(
    {"isinstance", "issubclass", "cast", "hasattr", "getattr", "zip", "print", "field", "Field", "Path", "next"}
)
_SMALLEST_MODULE: Final = 15


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change.

    Attributes:
        module: its path, relative to the project.
        line: the changed line.
        kind: the kind of change, such as `comparison`.
        before: the changed expression or statement.
        after: the text in its place.
        source: the whole changed module.
    """

    module: str
    line: int
    kind: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.kind}: {_short(self.before)} -> {_short(self.after)}"


@dataclass(frozen=True, slots=True)
class _Change:
    line: int
    span: slice
    kind: str
    after: str


def draw(project: Path, room: str, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of a room, a folder or a module, at most one a line.

    A module is drawn in proportion to its lines, then a kind of change, each as likely as another.
    """
    chance = random.Random(f"{room}-{seed}")
    top = project / room
    files = [top] if top.is_file() else sorted(file for file in top.rglob("*.py") if "templates" not in file.parts)
    texts = {str(file.relative_to(project)): file.read_bytes() for file in files}
    lines = {module: text.count(b"\n") for module, text in texts.items()}
    changes = {module: _changes(texts[module]) for module in texts if lines[module] > _SMALLEST_MODULE}
    modules = [module for module in changes if changes[module]]
    mutants: dict[tuple[str, int], Mutant] = {}
    # A room may have fewer places than are asked for.
    for _ in range(100 * count if modules else 0):
        module = chance.choices(modules, [lines[module] for module in modules])[0]
        kind = chance.choice(sorted({change.kind for change in changes[module]}))
        change = chance.choice([change for change in changes[module] if change.kind == kind])
        mutants.setdefault((module, change.line), _applied(module, texts[module], change))
        if len(mutants) == count:
            break
    return list(mutants.values())


def _applied(module: str, text: bytes, change: _Change) -> Mutant:
    source = text[: change.span.start] + change.after.encode() + text[change.span.stop :]
    return Mutant(module, change.line, change.kind, text[change.span].decode(), change.after, source.decode())


def _changes(text: bytes) -> list[_Change]:
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    changes: list[_Change] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt) and not _is_text(node, parents):
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            changes += [_Change(node.lineno, slice(start, stop), *change) for change in _changes_of(node, parents)]
    return sorted(changes, key=lambda change: (change.span.start, change.span.stop, change.kind))


def _changes_of(node: ast.expr | ast.stmt, parents: dict[ast.AST, ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the new text of each change of a node."""
    if _is_default(node, parents):
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            yield "default", _other_number(node.value)
        return
    if not any(isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef) for above in _above(node, parents)):
        return
    match node:
        case ast.Compare(ops=[operator]):
            other = ast.Compare(node.left, [_COMPARISONS[type(operator)]()], node.comparators)
            yield "comparison", f"({ast.unparse(other)})"
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS and not _is_string(node):
            yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, _OPERATORS[type(operator)](), node.right))})"
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "arithmetic", f"({ast.unparse(operand)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "no not", f"({ast.unparse(operand)})"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "one more", f"({value + 1})"
        case ast.BoolOp(op=operator):
            other = ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), node.values)
            yield "and for or", f"({ast.unparse(other)})"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "no call", "pass"
        case ast.Raise(exc=ast.expr()):
            yield "no error", "pass"
        case ast.IfExp():
            yield "other branch", f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
        case ast.Call():
            yield from _changes_of_call(node)
        case _:
            pass


def _changes_of_call(node: ast.Call) -> Iterator[tuple[str, str]]:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            pass
        case _:
            return
    if name in _FUNCTIONS and (isinstance(node.func, ast.Attribute) or name in _BUILTINS):
        function = ast.unparse(node.func)
        other = function[: -len(name)] + _FUNCTIONS[name]
        yield "other function", other + ast.unparse(node)[len(function) :]
    if len(node.args) == 2 and name not in _KEPT_ORDER | _FUNCTIONS.keys():
        first, second = node.args
        if ast.dump(first) != ast.dump(second) and not any(isinstance(part, ast.Starred) for part in node.args):
            yield "exchanged", ast.unparse(ast.Call(node.func, [second, first], node.keywords))


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _is_text(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether only a reader of logs, of messages or of types would see a change of `node`."""
    for part in (node.value if isinstance(node, ast.Expr) else node, *_above(node, parents)):
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name.lower() in {"logger", "log", "logging"}:
                return True
            case ast.JoinedStr() | ast.arg() | ast.Assert() | ast.Import() | ast.ImportFrom():
                return True
            case ast.ClassDef(bases=bases) if any("Protocol" in ast.unparse(base) for base in bases):
                return True
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                return True
            case ast.FunctionDef(name="__repr__" | "__str__"):
                return True
            case _:
                pass
    return False


def _is_default(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether `node` is the default of a parameter or of a field of a class, which may be in a call."""
    above = parents.get(node)
    if isinstance(above, ast.arguments):
        return node in above.defaults or node in above.kw_defaults
    if isinstance(above, ast.Call) and above.args and above.args[0] is node:
        node, above = above, parents.get(above)
    return isinstance(above, ast.AnnAssign) and above.value is node and isinstance(parents.get(above), ast.ClassDef)


def _is_string(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _other_number(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return str(not value)
    return str(value + 1) if isinstance(value, int) else repr(value * 2 if value else 0.5)


def _short(text: str) -> str:
    return " ".join(text.split())[:90]
