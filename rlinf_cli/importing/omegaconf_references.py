"""OmegaConf references: absolute, relative, and resolvers such as `${oc.env:NAME}`.

rlinf references are absolute and have the environment resolver only. A reference to a value that is carried over is
kept, under the value's new name; any other is replaced by its value, if that is known without running code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlinf_core.config.composing.references import PathSyntaxError, parse_path, to_path
from rlinf_core.config.tree import MappingNode, Node, Path, ScalarNode, child, format_path, resolve_plain
from rlinf_core.suggest import excerpt

MAX_DEPTH: Final = 40
# Of one file, counted each time that one is looked at: a few lines can refer to each other without end.
_MOST_STEPS: Final = 5_000
_LONGEST: Final = 1 << 16
_LARGEST: Final = 2**63
_RESOLVER: Final = re.compile(r"\s*([A-Za-z_][\w.]*):")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*")
Number = int | float


class UnresolvableError(Exception):
    """A reference whose value is unknown; the message gives the reason, shortened."""

    def __init__(self, message: str) -> None:
        super().__init__(excerpt(message, 300))


class Rewritten(NamedTuple):
    """A value with rlinf references.

    Attributes:
        raw, plain: the new scalar.
        note: the change of meaning, or None.
    """

    raw: str
    plain: bool
    note: str | None = None


class _Interpolation(NamedTuple):
    """`${...}` in a text: the part between the braces."""

    body: str


def split(text: str) -> list[str | _Interpolation]:
    """Return the literal pieces of a text and the references between them; nested references stay text.

    Raises:
        UnresolvableError: a `${` is never closed.
    """
    pieces: list[str | _Interpolation] = []
    at = 0
    while (start := text.find("${", at)) >= 0:
        end = _closing(text, start + 2)
        if start > at:
            pieces.append(text[at:start])
        pieces.append(_Interpolation(text[start + 2 : end]))
        at = end + 1
    if at < len(text):
        pieces.append(text[at:])
    return pieces


def _closing(text: str, start: int) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise UnresolvableError(f"`{text[start - 2 :]}` is never closed")


@dataclass
class References:
    """The references of a composed tree.

    Attributes:
        tree: the composed tree, references as written.
        environ: the environment.
    """

    tree: MappingNode
    environ: Mapping[str, str]
    _steps: int = field(default=0, init=False)

    def target(self, body: str, path: Path) -> Path | None:
        """Return the path that `${body}` at `path` refers to; None for a resolver."""
        if _RESOLVER.match(body):
            return None
        name = body.strip()
        dots = len(name) - len(name.lstrip("."))
        if dots > len(path):
            raise UnresolvableError(f"`${{{body}}}` points above the root of the file")
        base = path[: len(path) - dots] if dots else ()
        try:
            steps, _ = parse_path(name[dots:])
        except PathSyntaxError as error:
            raise UnresolvableError(f"`${{{body}}}` is not a valid reference: {error.message}") from error
        # `a.0` is an item of a list in OmegaConf; `a[0]` too.
        return (
            *base,
            *(
                int(segment) if isinstance(segment, str) and segment.isdigit() else segment
                for segment in to_path(steps)
            ),
        )

    def node(self, path: Path, depth: int = 0) -> Node | None:
        """Return the node at a path, following references to mappings on the way."""
        current: Node | None = self.tree
        for index, segment in enumerate(path):
            current = self.followed(current, path[:index], depth) if current is not None else None
            # A numeric name may be the key of a mapping.
            current = child(current, segment) if current is not None else None
        return current

    def followed(self, node: Node, path: Path, depth: int = 0) -> Node:
        """Return the final target of a value that is a single reference; any other value unchanged."""
        while isinstance(node, ScalarNode) and "${" in node.raw:
            depth += 1
            self._take_step(depth, node.raw)
            pieces = split(node.raw)
            if len(pieces) != 1 or not isinstance(pieces[0], _Interpolation):
                return node
            target = self.target(pieces[0].body, path)
            resolved = self.node(target, depth) if target is not None else None
            if target is None or resolved is None:
                return node
            node, path = resolved, target
        return node

    def section(self, node: ScalarNode, path: Path) -> MappingNode:
        """Return the section that a value refers to; an empty one where it refers to none."""
        try:
            match = _RESOLVER.match(node.raw.removeprefix("${"))
            arguments = _arguments(node.raw[2:-1][match.end() :]) if match is not None else []
            of = ScalarNode(node.span, f"${{{arguments[0]}}}", None) if arguments else node
            target = self.followed(of, path)
        except UnresolvableError:
            target = node
        return target if isinstance(target, MappingNode) else MappingNode(node.span, ())

    def value(self, node: Node, path: Path, depth: int = 0) -> Node:
        """Return a value with all references resolved.

        Raises:
            UnresolvableError: its value is unknown.
        """
        if not isinstance(node, ScalarNode) or "${" not in node.raw:
            return node
        pieces = split(node.raw)
        if len(pieces) == 1 and isinstance(pieces[0], _Interpolation):
            value = self._value_of(pieces[0].body, path, depth + 1)
            return (
                ScalarNode(node.span, value.raw, value.value, value.plain) if isinstance(value, ScalarNode) else value
            )
        text = ""
        for piece in pieces:
            value = self._value_of(piece.body, path, depth + 1) if isinstance(piece, _Interpolation) else None
            if value is not None and not isinstance(value, ScalarNode):
                raise UnresolvableError(f"`{node.raw}` inserts a section or a list into a string")
            text += value.raw if isinstance(value, ScalarNode) else str(piece)
            if len(text) > _LONGEST:
                raise UnresolvableError(f"`{node.raw}` is a text of more than {_LONGEST} characters")
        return ScalarNode(node.span, text, text, plain=False)

    def _value_of(self, body: str, path: Path, depth: int) -> Node:
        self._take_step(depth, f"${{{body}}}")
        match = _RESOLVER.match(body)
        if match is not None:
            return self._resolve(match[1], _arguments(body[match.end() :]), path, depth)
        target = self.target(body, path)
        resolved = self.node(target, depth) if target is not None else None
        if resolved is None or target is None:
            raise UnresolvableError(f"`${{{body}}}` refers to nothing")
        return self.value(resolved, target, depth)

    def _take_step(self, depth: int, text: str) -> None:
        self._steps += 1
        if depth > MAX_DEPTH:
            raise UnresolvableError(f"`{text}` refers back to itself")
        if self._steps > _MOST_STEPS:
            raise UnresolvableError("the references of this file are too many to follow")

    def _resolve(self, name: str, arguments: list[str], path: Path, depth: int) -> Node:
        if name in ("oc.env", "env"):
            text = self.environ.get(arguments[0]) if arguments else None
            if text is None and len(arguments) < 2:
                raise UnresolvableError(f"the environment has no variable `{arguments[0] if arguments else ''}`")
            return self._argument(text if text is not None else arguments[1], path, depth)
        if name == "oc.select" and arguments:
            try:
                return self._value_of(arguments[0], path, depth)
            except UnresolvableError:
                if len(arguments) < 2:
                    raise
                return self._argument(arguments[1], path, depth)
        if name == "oc.decode" and len(arguments) == 1:
            return self._argument(arguments[0], path, depth)
        if name in _ARITHMETIC and len(arguments) == 2:
            return self._computed(name, arguments, path, depth)
        raise UnresolvableError(_UNKNOWN.get(name.partition(".")[0], f"there is no resolver `{name}` here"))

    def _argument(self, text: str, path: Path, depth: int) -> Node:
        span = self.tree.span
        scalar = ScalarNode(span, _unquoted(text), resolve_plain(_unquoted(text)))
        return self.value(scalar, path, depth + 1)

    def _computed(self, name: str, arguments: list[str], path: Path, depth: int) -> Node:
        numbers: list[Number] = []
        for argument in arguments:
            value = self._argument(argument, path, depth)
            number = value.value if isinstance(value, ScalarNode) else None
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise UnresolvableError(f"`{argument}` is not a number")
            numbers.append(number)
        try:
            result = _ARITHMETIC[name](*numbers)
        except ZeroDivisionError:
            raise UnresolvableError(f"`{name}` divides by 0") from None
        except OverflowError:
            result = _LARGEST
        if not abs(result) < _LARGEST:
            raise UnresolvableError(f"`{name}` computes a number that is too large")
        return ScalarNode(self.tree.span, f"{result!r}", result)

    def rewritten(self, node: ScalarNode, path: Path, names: Mapping[Path, Path]) -> Rewritten:
        """Return a scalar with rlinf references.

        Args:
            node: a scalar that holds references.
            path: its path in the composed tree.
            names: the paths of values that are carried over unchanged, each with its path in the new file.

        Raises:
            UnresolvableError: it has no counterpart, and its value is unknown.
        """
        pieces = [
            self._symbol(piece.body, path, names) if isinstance(piece, _Interpolation) else piece
            for piece in split(node.raw)
        ]
        if all(piece is not None for piece in pieces):
            return Rewritten("".join(piece or "" for piece in pieces), node.plain)
        resolved = self.value(node, path)
        if not isinstance(resolved, ScalarNode):
            raise UnresolvableError(f"`{node.raw}` is a section or a list")
        note = f"is no longer computed: `{node.raw}` was {resolved.raw} when this file was written"
        return Rewritten(resolved.raw.replace("${", "$${"), resolved.plain, note)

    def _symbol(self, body: str, path: Path, names: Mapping[Path, Path]) -> str | None:
        """Return the rlinf form of a reference; None if there is none."""
        match = _RESOLVER.match(body)
        if match is None:
            target = names.get(self.target(body, path) or ())
            return None if target is None else f"${{{format_path(target)}}}"
        arguments = _arguments(body[match.end() :])
        if match[1] not in ("oc.env", "env") or not arguments or not _VARIABLE.fullmatch(arguments[0]):
            return None
        if len(arguments) == 1:
            return f"${{env:{arguments[0]}}}"
        default = _unquoted(arguments[1])
        if "${" in default:
            try:
                resolved = self._argument(default, path, 0)
            except UnresolvableError:
                return None
            default = resolved.raw if isinstance(resolved, ScalarNode) else "}"
        default = "" if default in ("null", "None") else default
        return None if "}" in default else f"${{env:{arguments[0]}:-{default}}}"


def _arguments(text: str) -> list[str]:
    """Return the arguments of a resolver, split at commas outside braces and quotes."""
    parts, depth, quote, start = [""][:0], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()] if text.strip() else parts


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


# Resolvers that files of these projects register for their arithmetic.
_ARITHMETIC: Final[Mapping[str, Callable[[Number, Number], Number]]] = {
    "add": lambda one, other: one + other,
    "subtract": lambda one, other: one - other,
    "multiply": lambda one, other: one * other,
    "mul": lambda one, other: one * other,
    "divide": lambda one, other: one / other,
    "int_div": lambda one, other: one // other,
    "max": max,
    "min": min,
}
_UNKNOWN: Final = {
    "hydra": "`hydra:` describes a Hydra run, which does not exist here",
    "now": "`now:` names folders by time; here every run gets its own folder",
}
