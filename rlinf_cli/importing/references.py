"""The references of a composed file: their values by OmegaConf, and their form in a file of rlinf.

rlinf's references are absolute, and its only resolver is the environment. A reference to a value that is carried over
is kept under the value's new name; any other is replaced by its value. OmegaConf follows references without limit, so
their cost is counted first. It knows only the resolvers below, none of which runs code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_cli.importing.hydra_source import changed, marked, plain, scalar_of
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.tree import (
    MappingNode,
    Node,
    NotationError,
    Path,
    ScalarNode,
    children,
    find,
    format_path,
    resolve_plain,
)
from rlinf_core.suggest import excerpt

# Limits on the characters of references read in one file and for one value, and on the links of a chain.
_MOST_TEXT: Final = 1_000_000
_MOST_OF_ONE: Final = 1 << 16
_MOST_LINKS: Final = 40
# Most characters of a text whose references are resolved.
_LONGEST: Final = 4_000
_TOO_MANY: Final = "the references of this file are too many to follow"
_LARGEST: Final = 2**63
# The prefix of our resolvers' names, which keeps them apart from OmegaConf's own.
_OURS: Final = "rlinf."
_ANY: Final = re.compile(r"\$\{")
_REFERENCE: Final = re.compile(r"\$\{\s*(?:(?P<resolver>[A-Za-z_][\w.]*)\s*:|(?P<path>\.*[^\s${}:,]*)\s*\})")
_RESOLVED: Final = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_SELECTED: Final = re.compile(r"""\s*["']?(\.*[\w.\[\]]+)["']?\s*[,}]""")
# A reference that contains no other reference.
_PIECE: Final = re.compile(r"(\$\{[^${}]*\})")
_VARIABLE: Final = re.compile(r"\$\{\s*(?:oc\.)?env:\s*([A-Za-z_]\w*)\s*(?:,(.*))?\}\Z", re.DOTALL)
Number = int | float


class UnresolvableError(Exception):
    """A reference has no known value; the message gives the reason, shortened."""

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


class References:
    """The references of a composed tree, with the values of an environment."""

    environ_in_use: ClassVar[Mapping[str, str]] = {}

    def __init__(self, tree: MappingNode, environ: Mapping[str, str]) -> None:
        self.tree, self.environ = tree, environ
        self._config = OmegaConf.create(changed(plain(tree), _parsable))
        self._costs: dict[Path, int] = {}
        self._left = _MOST_TEXT
        for name, resolver in _RESOLVERS.items():
            OmegaConf.register_new_resolver(f"{_OURS}{name}", resolver, replace=True)

    def value(self, path: Path) -> Any:
        """Return the value at a path as plain data, with all references resolved.

        Raises:
            UnresolvableError: the value is unknown or missing.
        """
        value: Any = self._config
        References.environ_in_use = self.environ
        try:
            self._left -= self._cost(path)
            if self._left < 0:
                raise UnresolvableError(_TOO_MANY)
            for segment in path:
                value = value[segment]
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, LookupError, TypeError, ValueError, RecursionError, OverflowError) as error:
            first = str(error.__cause__ or error).strip().partition("\n")[0]
            raise UnresolvableError(first or f"`{format_path(path)}` has no value") from error

    def section(self, node: Node, path: Path) -> Node:
        """Return the value to which a reference leads over all links; any other value unchanged."""
        target = path
        for _ in range(_MOST_LINKS):
            there = find(self.tree, target)
            if there is None:
                target = self._behind(target)
                if not target:
                    break
                continue
            if target != path:
                node = there
            match = _REFERENCE.fullmatch(there.raw) if isinstance(there, ScalarNode) else None
            if match is None or not match["path"]:
                break
            target = _absolute(match["path"], target)
        return node

    def _behind(self, path: Path) -> Path:
        """Return a path below a reference as a path below its target; empty if no reference is above it."""
        for size in range(1, len(path)):
            node = find(self.tree, path[:size])
            if isinstance(node, ScalarNode):
                match = _REFERENCE.fullmatch(node.raw)
                return (*_absolute(match["path"], path[:size]), *path[size:]) if match and match["path"] else ()
        return ()

    def rewritten(self, node: ScalarNode, path: Path, names: Mapping[Path, Path]) -> Rewritten:
        """Return a scalar with rlinf references.

        Args:
            node: a scalar that holds references.
            path: its path in the composed tree.
            names: the paths of values that are carried over unchanged, each with its path in the new file.

        Raises:
            UnresolvableError: a reference has no counterpart, and the scalar's value is unknown.
        """
        whole = _PIECE.split(node.raw)
        if any("${" in text for text in whole[::2]):
            whole = [node.raw]
        pieces = [self._symbol(piece, path, names) if "${" in piece else piece for piece in whole]
        if all(piece is not None for piece in pieces):
            return Rewritten("".join(piece or "" for piece in pieces), node.plain)
        if not isinstance(self.section(node, path), ScalarNode):
            raise UnresolvableError(f"`{node.raw}` is a section or a list")
        scalar = scalar_of(self.value(path))
        note = f"is no longer computed: `{node.raw}` was {scalar.raw} when this file was written"
        return Rewritten(scalar.raw.replace("${", "$${"), scalar.plain, note)

    def _symbol(self, text: str, path: Path, names: Mapping[Path, Path]) -> str | None:
        """Return the rlinf form of a reference; None if there is none."""
        match = _REFERENCE.match(text)
        if match is not None and match["path"]:
            target = names.get(_absolute(match["path"], path))
            return None if target is None else f"${{{format_path(target)}}}"
        variable = _VARIABLE.match(text)
        if variable is None:
            return None
        if variable[2] is None:
            return f"${{env:{variable[1]}}}"
        default = variable[2].strip()
        if len(default) > 1 and default[0] == default[-1] and default[0] in "\"'":
            default = default[1:-1]
        if "${" in default:
            inner = _REFERENCE.fullmatch(default)
            if inner is None or not inner["path"]:
                return None
            try:
                default = str(self.value(_absolute(inner["path"], path)))
            except UnresolvableError:
                return None
        default = "" if default in ("null", "None") else default
        return None if "}" in default else f"${{env:{variable[1]}:-{default}}}"

    def _cost(self, path: Path, links: int = 0) -> int:
        """Return the number of characters that resolving the value at a path reads, including its targets.

        Raises:
            UnresolvableError: the number exceeds any real value's, or a reference is circular, missing or unsupported.
        """
        at = path
        while at and find(self.tree, at) is None:
            at = at[:-1]
        if at not in self._costs:
            if links > _MOST_LINKS:
                raise UnresolvableError(f"`{format_path(path)}` refers back to itself")
            node = find(self.tree, at)
            if isinstance(node, ScalarNode):
                cost = len(node.raw)
                for target, must in _targets(node.raw, at):
                    if self._leads_somewhere(target):
                        cost += self._cost(target, links + 1)
                    elif must:
                        raise UnresolvableError(f"`${{{format_path(target)}}}` refers to nothing")
            else:
                cost = sum(self._cost((*at, key), links) for key, _ in children(node)) if node is not None else 0
            if cost > _MOST_OF_ONE:
                raise UnresolvableError(_TOO_MANY)
            self._costs[at] = cost
        return self._costs[at]

    def _leads_somewhere(self, path: Path) -> bool:
        """Return whether there is a value at a path, or a reference above it."""
        above = (find(self.tree, path[:size]) for size in range(len(path), 0, -1))
        node = next((node for node in above if node is not None), None)
        return find(self.tree, path) is not None or (isinstance(node, ScalarNode) and "${" in node.raw)


def _variable(name: str, *default: Any) -> Any:
    environ = References.environ_in_use
    if name in environ:
        return resolve_plain(environ[name])
    if not default:
        raise ValueError(f"the environment has no variable `{name}`")
    return default[0]


def _targets(text: str, path: Path) -> list[tuple[Path, bool]]:
    """Return the paths that the references in a text name, each with whether it must exist.

    Raises:
        UnresolvableError: a reference is malformed or has an unknown resolver.
    """
    targets: list[tuple[Path, bool]] = []
    for start in (match.start() for match in _ANY.finditer(text)):
        match = _REFERENCE.match(text, start)
        name = match["resolver"] if match is not None else None
        if match is None:
            raise UnresolvableError(f"`{text[start:]}` is not a reference that can be followed")
        if match["path"] is not None:
            targets.append((_absolute(match["path"], path), True))
        elif name == "oc.select":
            selected = _SELECTED.match(text, match.end())
            if selected is None:
                raise UnresolvableError(f"`{text[start:]}` is not a reference that can be followed")
            targets.append((_absolute(selected[1], path), False))
        elif name not in _RESOLVERS:
            raise UnresolvableError(_UNKNOWN.get(str(name).partition(".")[0], f"there is no resolver `{name}` here"))
    return targets


def _parsable(text: str) -> str:
    """Return a text for OmegaConf, with our resolvers' names; references that it cannot parse are made plain text."""
    if "${" not in text:
        return text
    text = _RESOLVED.sub(lambda match: f"${{{_OURS if match[1] in _RESOLVERS else ''}{match[1]}:", text)
    try:
        OmegaConf.create([text if len(text) <= _LONGEST else ""])
    except (OmegaConfBaseException, RecursionError):
        return marked(text)
    return text if len(text) <= _LONGEST else marked(text)


def _absolute(name: str, path: Path) -> Path:
    """Return the path to which `${name}` at `path` refers.

    Raises:
        UnresolvableError: `name` is not a path, or points above the root of the file.
    """
    dots = len(name) - len(name.lstrip("."))
    if dots > len(path):
        raise UnresolvableError(f"`${{{name}}}` points above the root of the file")
    try:
        steps, _ = parse_path(name[dots:]) if name[dots:] else ((), None)
    except NotationError as error:
        raise UnresolvableError(f"`${{{name}}}` is not a valid reference: {error.message}") from error
    # In OmegaConf, both `a.0` and `a[0]` are items of a list.
    below = (int(step) if isinstance(step, str) and step.isdigit() else step for step in to_path(steps))
    return (*(path[: len(path) - dots] if dots else ()), *below)


def _bounded(name: str, compute: Callable[[Number, Number], Number]) -> Callable[[Any, Any], Number]:
    """Return a resolver that computes a number, and raises for a result too large for a setting."""

    def resolver(one: Any, other: Any) -> Number:
        for argument in (one, other):
            if isinstance(argument, bool) or not isinstance(argument, int | float):
                raise ValueError(f"`{argument}` is not a number")
        try:
            result = compute(one, other)
        except ZeroDivisionError:
            raise ValueError(f"`{name}` divides by 0") from None
        except OverflowError:
            result = _LARGEST
        if not abs(result) < _LARGEST:
            raise ValueError(f"`{name}` computes a number that is too large")
        return result

    return resolver


def _decoded(text: Any) -> Any:
    return resolve_plain(str(text))


# The arithmetic resolvers that these projects register.
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
_RESOLVERS: Final[Mapping[str, Callable[..., Any]]] = {
    "oc.env": _variable,
    "env": _variable,
    "oc.decode": _decoded,
    **{name: _bounded(name, compute) for name, compute in _ARITHMETIC.items()},
}
_UNKNOWN: Final = {
    "hydra": "`hydra:` describes a Hydra run, which does not exist here",
    "now": "`now:` names folders by time; here every run gets its own folder",
}
