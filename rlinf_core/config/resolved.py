"""A composed configuration in one piece, with the values that nobody wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias, cast

from pydantic import BaseModel

from rlinf_core.config.dump import inline
from rlinf_core.config.origins import Origin, origins
from rlinf_core.config.tree import Mapping

# Keys of a mapping are text, those of a list are the indices of its items.
Nested: TypeAlias = "Origin | dict[str | int, Nested]"


def resolved_text(tree: Mapping, model: BaseModel | None = None) -> str:
    """YAML that loads to the same values, defaults included except those that are null or empty, with a final line end.

    Args:
        tree: the configuration, secrets masked.
        model: what it was validated as.
    """
    found = (origin for origin in origins(tree, model) if says_something(origin))
    return "".join(f"{text}\n" for text, _ in lines_of(nested_of(found)))


def says_something(origin: Origin) -> bool:
    """Return False for a default that is null or empty: that nothing is there by default is no news."""
    return origin.kind != "default" or origin.text not in ("null", "[]", "{}")


def nested_of(values: Iterable[Origin]) -> Nested:
    """Return values in the mappings and lists that they stand in."""
    top: dict[str | int, Nested] = {}
    for origin in values:
        if not origin.path:
            return origin
        at = top
        for segment in origin.path[:-1]:
            at = cast("dict[str | int, Nested]", at.setdefault(segment, {}))
        at[origin.path[-1]] = origin
    return top


def lines_of(nested: Nested) -> Iterator[tuple[str, Origin | None]]:
    """Return the lines of YAML, and whose value each holds."""
    if isinstance(nested, Origin):
        yield nested.text, nested
        return
    for key, value in nested.items():
        inner = list(lines_of(value))
        if isinstance(key, int):
            first, *rest = inner
            yield f"- {first[0]}", first[1]
            yield from ((f"  {text}", origin) for text, origin in rest)
        elif isinstance(value, Origin):
            yield f"{inline(key)}: {value.text}", value
        else:
            yield f"{inline(key)}:", None
            yield from ((f"  {text}", origin) for text, origin in inner)
