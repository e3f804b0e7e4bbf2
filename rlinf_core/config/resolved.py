"""The resolved configuration as YAML, defaults included."""

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
    """Return YAML that loads to the same values, with those defaults that are neither null nor empty, and a final line
    end.

    Args:
        tree: the configuration, secrets masked.
        model: what it was validated as.
    """
    found = (origin for origin in origins(tree, model) if says_something(origin))
    return "".join(f"{text}\n" for text, _ in lines_of(nested_of(found)))


def says_something(origin: Origin) -> bool:
    """Return whether a value is worth printing: a default that is null or empty is not."""
    return origin.kind != "default" or origin.text not in ("null", "[]", "{}")


def nested_of(values: Iterable[Origin]) -> Nested:
    """Return values nested in the mappings and lists of their paths."""
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
    """Return the lines of YAML, each with the origin of its value."""
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
