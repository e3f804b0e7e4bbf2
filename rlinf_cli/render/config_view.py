"""The resolved configuration, each of its values with the place it came from: YAML for people, records for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias, cast

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.dump import inline
from rlinf_core.config.origins import Origin
from rlinf_core.config.reader import read_value
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import Mapping, find, format_path, to_data
from rlinf_core.scalars import plain

SCHEMA = "rlinf.config/1"
# Origins stand in one column, which longer values reach beyond.
_COLUMN = 56

# Keys of a mapping are text, those of a list are the indices of its items.
_Nested: TypeAlias = "Origin | dict[str | int, _Nested]"


def config_text(origins: Iterable[Origin]) -> str:
    """YAML that loads to the same values, with each value's origin as a comment behind it."""
    lines = list(_lines(_nested(origins)))
    column = max((len(text) for text, origin in lines if origin and len(text) < _COLUMN), default=0)
    return "\n".join(f"{text.ljust(column)}  # {_where(origin)}" if origin else text for text, origin in lines)


def says_something(origin: Origin) -> bool:
    """False for a default that is null or empty: that nothing is there by default is no news."""
    return origin.kind != "default" or origin.text not in ("null", "[]", "{}")


def config_record(tree: Mapping, origins: Iterable[Origin]) -> dict[str, Any]:
    """The contract `rlinf.config/1`: the data as a whole, and every value by its path.

    Args:
        tree: what the origins are of, secrets masked.
    """
    values = [(origin, _value(tree, origin)) for origin in origins]
    nested = _nested(origin for origin, _ in values)
    data = {origin.path: value for origin, value in values}
    return {
        "schema": SCHEMA,
        "config": _data(nested, data),
        "values": [_record(origin, value) for origin, value in values],
    }


def _nested(origins: Iterable[Origin]) -> _Nested:
    top: dict[str | int, _Nested] = {}
    for origin in origins:
        if not origin.path:
            return origin
        at = top
        for segment in origin.path[:-1]:
            at = cast("dict[str | int, _Nested]", at.setdefault(segment, {}))
        at[origin.path[-1]] = origin
    return top


def _lines(nested: _Nested) -> Iterator[tuple[str, Origin | None]]:
    if isinstance(nested, Origin):
        yield nested.text, nested
        return
    for key, value in nested.items():
        inner = list(_lines(value))
        if isinstance(key, int):
            first, *rest = inner
            yield f"- {first[0]}", first[1]
            yield from ((f"  {text}", origin) for text, origin in rest)
        elif isinstance(value, Origin):
            yield f"{inline(key)}: {value.text}", value
        else:
            yield f"{inline(key)}:", None
            yield from ((f"  {text}", origin) for text, origin in inner)


def _where(origin: Origin) -> str:
    """`job.yaml:9`; the column says little behind a value and costs width."""
    if origin.span is None or origin.kind == "override":
        return origin.where
    return f"{origin.span.source.name}:{origin.span.begin.line}"


def _value(tree: Mapping, origin: Origin) -> Any:
    node = find(tree, origin.path)
    if node is None:
        # A default: nobody wrote it, so its text is all there is.
        node = read_value(SourceText("default", origin.text), 0, len(origin.text), Diagnostics())
    return None if node is None else plain(to_data(node))


def _data(nested: _Nested, values: dict[Any, Any]) -> Any:
    if isinstance(nested, Origin):
        return values[nested.path]
    if nested and all(isinstance(key, int) for key in nested):
        return [_data(value, values) for value in nested.values()]
    return {str(key): _data(value, values) for key, value in nested.items()}


def _record(origin: Origin, value: Any) -> dict[str, Any]:
    begin = origin.span.begin if origin.span else None
    return {
        "path": format_path(origin.path),
        "value": value,
        "origin": origin.kind,
        "file": origin.span.source.name if origin.span else None,
        "line": begin.line if begin else None,
        "column": begin.column if begin else None,
    }
