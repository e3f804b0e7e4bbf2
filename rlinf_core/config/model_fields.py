"""Introspection of the models: the fields allowed at a path, and the paths of a field.

Only a mistake, `rlinf explain` or completion asks this; a file without mistakes never imports it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from collections.abc import Mapping as MappingABC
from typing import Annotated, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlinf_core.config.tree import Path

_LISTS = (list, tuple, set, frozenset)


def alternatives(annotation: object) -> Iterator[object]:
    """Return the members of a union, each without `Annotated`; the annotation itself when it is none."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from alternatives(member)
    elif (aliased := getattr(annotation, "__value__", None)) is not None:  # `type X = ...`
        yield from alternatives(aliased)
    else:
        yield annotation


def model_of(annotation: object) -> type[BaseModel] | None:
    """Return `annotation` when it is a model class."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def written_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by the name that a file uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def step(annotation: object, segment: str | int) -> Iterator[object]:
    """Return the types allowed under one path segment of a value of this type."""
    for member in alternatives(annotation):
        model = model_of(member)
        if model is not None:
            field = written_fields(model).get(str(segment))
            if field is not None:
                yield field.annotation
        else:
            item = item_type(member)
            if item is not None and isinstance(segment, int):
                yield item
            value = value_type(member)
            if value is not None:
                yield value


def item_type(annotation: object) -> object | None:
    """Return `X` of `list[X]` or `tuple[X, ...]`, else None."""
    if get_origin(annotation) not in _LISTS:
        return None
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return cast(object, arguments[0]) if len(arguments) == 1 else None


def value_type(annotation: object) -> object | None:
    """Return `V` of `dict[K, V]`, else None."""
    origin = get_origin(annotation)
    if not (isinstance(origin, type) and issubclass(origin, MappingABC)):
        return None
    arguments = get_args(annotation)
    return cast(object, arguments[1]) if len(arguments) == 2 else None


def types_at(model: type[BaseModel], path: Path) -> list[object]:
    """Return all types allowed at `path`, unions flattened; empty when the models have no such path."""
    found: list[object] = [model]
    for segment in path:
        found = [below for annotation in found for below in step(annotation, segment)]
    return [member for annotation in found for member in alternatives(annotation)]


def fields_at(model: type[BaseModel], path: Path) -> dict[str, FieldInfo]:
    """Return the fields of all models allowed at `path`."""
    fields: dict[str, FieldInfo] = {}
    for annotation in types_at(model, path):
        below = model_of(annotation)
        if below is not None:
            fields |= written_fields(below)
    return fields


def places_of(model: type[BaseModel], name: str) -> list[str]:
    """Return the paths of sections that have a field `name`, shallowest first: `cluster.node_groups[]`; empty for the
    top.
    """
    found: list[str] = []
    # With the models around each place: one within itself is not entered again.
    level: list[tuple[str, object, frozenset[object]]] = [("", model, frozenset())]
    while level:
        below: list[tuple[str, object, frozenset[object]]] = []
        for place, annotation, around in level:
            for member in alternatives(annotation):
                section = model_of(member)
                if section is not None and section not in around:
                    fields = written_fields(section)
                    if name in fields:
                        found.append(place)
                    prefix, within = f"{place}." if place else "", around | {section}
                    below += [(f"{prefix}{key}", field.annotation, within) for key, field in fields.items()]
                elif (item := item_type(member)) is not None:
                    below.append((f"{place}[]", item, around))
                elif (value := value_type(member)) is not None:
                    below.append((f"{place}.NAME", value, around))
        level = below
    return found
