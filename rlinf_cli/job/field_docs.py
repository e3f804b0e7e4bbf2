"""Documentation of the fields of a file, from the models: type, default, meaning and children.

describe(ClusterFile, "cluster.node_groups.env_configs")
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

from rlinf_core.config.composing.references import parse_path
from rlinf_core.config.foreign_names import names_at
from rlinf_core.config.model import Variant
from rlinf_core.config.ranks import NodeRanks, RankMap, format_range
from rlinf_core.config.tree import NotationError
from rlinf_core.config.validating.model_fields import (
    ITEM,
    alternatives,
    fields_at,
    item_type,
    join,
    model_of,
    parts,
    places_of,
    types_at,
    value_type,
    variants_of,
)
from rlinf_core.errors import ConfigError
from rlinf_core.hardware.robots import RobotUnit, hardware_model, hardware_types
from rlinf_core.suggest import did_you_mean, quoted

_WORDS: Final[dict[object, str]] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    range: "range, first-last",
    NodeRanks: "node ranks",
    RankMap: "rank map",
    object: "anything",
}
_BOUNDS: Final = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


class UnknownFieldError(ConfigError):
    """No model has a field at this path; `help` names the likely one.

    Attributes:
        depth: the number of keys in the path.
        known: the existing keys, if the error has no specific hint.
    """

    depth: int = 0
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One field.

    Attributes:
        path: the path, as in `cluster.node_groups[].label`; `NAME` stands for a key that the user chooses.
        type: its type, in words.
        required: whether its section requires it.
        default: its default as YAML; None if it is required or has no default.
        description: its meaning.
        children: its fields, without their own children.
    """

    path: str
    type: str
    required: bool
    default: str | None
    description: str
    children: tuple[FieldDoc, ...] = ()

    @property
    def name(self) -> str:
        """The last key of the path."""
        return self.path.rpartition(".")[2].removesuffix("[]")


@dataclass(frozen=True, slots=True)
class _Spot:
    """A place in the models.

    Attributes:
        path: its path.
        annotations: the types allowed there.
        field: the field that declares them; None for items and values.
        kinds: the kinds of the nearest enclosing section with several kinds.
        within: the path from that section to here.
    """

    path: str
    annotations: tuple[object, ...]
    field: FieldInfo | None
    kinds: tuple[type[Variant], ...] = ()
    within: tuple[str, ...] = ()


def describe(model: type[BaseModel], path: str = "") -> FieldDoc:
    """Return the documentation of the field at `path` of a model; of the whole file for an empty path.

    List indexes are optional: `cluster.node_groups[0].label`, `cluster.node_groups.label`.

    Raises:
        UnknownFieldError: there is no such field.
    """
    spot = _Spot("", (model,), None)
    for depth, name in enumerate(_names(path)):
        try:
            spot = _below(model, spot, name, path)
        except UnknownFieldError as error:
            error.depth = depth
            raise
    children = [_document(child) for child in _children(spot)]
    return _document(spot, tuple(children))


def fields_below(model: type[BaseModel], path: str = "") -> list[FieldDoc]:
    """Return the fields at `path`, without their children; empty if there is no such path, so that completion never
    fails."""
    try:
        return list(describe(model, path).children)
    except UnknownFieldError:
        return []


def _names(path: str) -> list[str]:
    """Return the keys of a path, without the indexes."""
    path = path.strip().replace("[]", "")
    if not path:
        return []
    try:
        steps, _ = parse_path(path)
    except NotationError as error:
        raise UnknownFieldError(f"`{path}` is not a path: {error.message}", help=error.help) from None
    return [step.segment for step in steps if isinstance(step.segment, str)]


def _below(model: type[BaseModel], spot: _Spot, name: str, requested: str) -> _Spot:
    by_name = {child.path.rpartition(".")[2]: child for child in _children(spot)}
    spot_below = by_name.get(name) or by_name.get("NAME")
    if spot_below is not None:
        return spot_below

    where = f"in `{spot.path}`" if spot.path else "at the top of the file"
    elsewhere = [f"{place}.{name}" if place else name for place in places_of(model, name)]
    names = names_at(spot.annotations)
    ours = names.names.get(name)
    help_text = f"it is `{ours}` here" if ours in by_name else did_you_mean(name, by_name)
    if name in names.unavailable:
        help_text = names.unavailable[name]
    elif name in names.former:
        help_text = f"it is now `{names.former[name]}`"
    elif elsewhere:
        help_text = f"there is {quoted(elsewhere[:4])}"
    known = () if help_text else tuple(by_name)
    if help_text is None:
        help_text = f"known keys: {quoted(by_name)}" if by_name else "it has no fields"
    error = UnknownFieldError(
        f"there is no `{name}` {where}", where=None if name == requested else requested, help=help_text
    )
    error.known = known
    raise error


def _children(spot: _Spot) -> list[_Spot]:
    """Return the fields of the sections allowed here, or in the items of a list here."""
    children: dict[str, _Spot] = {}
    kinds, within = spot.kinds, spot.within
    if len(variants := variants_of(spot.annotations)) > 1:
        kinds, within = tuple(variants), ()
    pending = [(spot.path, annotation) for annotation in spot.annotations]
    while pending:
        path, annotation = pending.pop(0)
        for part in (part for member in _members(annotation) for part in parts(member)):
            below = join(path, part.key)
            if part.key == ITEM:
                pending.append((below, part.annotation))
                continue
            types = tuple(alternatives(part.annotation))
            known = children.get(part.key)
            if known is None:
                children[part.key] = _Spot(below, types, part.field, kinds, (*within, part.key))
            elif kinds:
                types = tuple(dict.fromkeys((*known.annotations, *types)))
                children[part.key] = replace(known, annotations=types)
    return list(children.values())


def _by_kind(spot: _Spot) -> tuple[str, str]:
    """Return the meaning of a key, and sentences on its differences between the kinds of the enclosing section.

    Only some of the kinds may have the key, with other defaults or descriptions.
    """
    field, at = spot.field, spot.within
    text = field.description or "" if field is not None else ""
    if not spot.kinds or not at or field is None or (at == (spot.kinds[0].chosen_by,)):
        return text, ""
    holders = [kind for kind in spot.kinds if types_at(kind, at[:-1])]
    fields = {kind: fields_at(kind, at[:-1]).get(at[-1]) for kind in holders}
    words: dict[str, list[str]] = {}
    defaults: dict[str, list[str]] = {}
    for kind, own in fields.items():
        if own is not None:
            names = [f"`{name}`" for name in (*kind.names(), *kind.others)]
            words.setdefault(own.description or "", []).extend(names)
            if (default := _default(own)) is not None:
                defaults.setdefault(default, []).extend(names)
    only = ""
    if len(words) > 1:
        text = " ".join(f"{', '.join(names)}: {said}" for said, names in words.items())
    elif None in fields.values():
        only = f" Only with `{spot.kinds[0].chosen_by}`: {', '.join(next(iter(words.values())))}."
    others = [(default, names) for default, names in defaults.items() if default != _default(field)]
    return text, only + "".join(f" Default with {', '.join(names)}: `{default}`." for default, names in others)


def _members(annotation: object) -> Iterator[object]:
    """Yield the members of a type; for `RobotUnit`, the models of all hardware types."""
    for member in alternatives(annotation):
        yield from hardware_models().values() if member is RobotUnit else [member]


def _document(spot: _Spot, children: tuple[FieldDoc, ...] = ()) -> FieldDoc:
    field = spot.field
    type_text = " or ".join(
        dict.fromkeys(type_in_words(annotation) for annotation in spot.annotations if annotation is not type(None))
    )
    if field is None:
        return FieldDoc(spot.path, type_text, not spot.path, None, _section_text(spot.annotations), children)
    bounds = _bounds(field.metadata)
    text, differences = _by_kind(spot)
    return FieldDoc(
        spot.path,
        f"{type_text}, {bounds}" if bounds else type_text,
        field.is_required(),
        _default(field),
        (text or _section_text(spot.annotations)) + differences,
        children,
    )


def _section_text(annotations: Iterable[object]) -> str:
    """Return the first paragraph of the section model's docstring."""
    for annotation in annotations:
        section = model_of(annotation)
        if section is not None and section.__doc__:
            return " ".join(section.__doc__.split("\n\n")[0].split())
    return ""


def type_in_words(annotation: object) -> str:
    """Return a type in words, as in `list of text`, `integer or text`, `one of `a`, `b``."""
    members = [member for member in alternatives(annotation) if member is not types.NoneType]
    if len(members) > 1:
        return " or ".join(dict.fromkeys(map(type_in_words, members)))
    member = members[0] if members else None
    if get_origin(member) is Literal:
        choices = [f"`{choice}`" for choice in get_args(member)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if model_of(member) is not None:
        return "section"
    item = item_type(member)
    if item == tuple[str, str]:
        return "list of one-key maps, or a map"
    if item is not None:
        return f"list of {_plural(type_in_words(item))}"
    arguments = get_args(member)
    if get_origin(member) is tuple and len(set(arguments)) == 1:
        return f"list of {len(arguments)} {_plural(type_in_words(arguments[0]))}"
    value = value_type(member)
    if value is not None:
        return f"map of names to {_plural(type_in_words(value))}"
    return _WORDS.get(member) or ("anything" if not isinstance(member, type) else member.__name__)


def _plural(words: str) -> str:
    first, space, rest = words.partition(" ")
    plural = {"section": "sections", "integer": "integers", "number": "numbers", "list": "lists"}.get(first)
    return f"{plural}{space}{rest}" if plural and (not rest or first == "list") else words


def _bounds(metadata: Iterable[object]) -> str:
    constraints = [
        f"{words} {_as_written(getattr(limit, attribute))}"
        for limit in metadata
        for kind, attribute, words in _BOUNDS
        if isinstance(limit, kind)
    ]
    constraints += [f"a multiple of {limit.multiple_of}" for limit in metadata if isinstance(limit, MultipleOf)]
    return ", ".join(constraints)


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    # A default that depends on other fields cannot be shown.
    depends = bool(field.default_factory_takes_validated_data)
    value: object = field.get_default(call_default_factory=not depends)
    return None if value is None or value is PydanticUndefined else _as_written(value)


def _as_written(value: object) -> str | None:
    if isinstance(value, BaseModel):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, range):
        return format_range(value)
    if isinstance(value, list | tuple):
        items = (_as_written(item) or "" for item in cast("Iterable[object]", value))
        return f"[{', '.join(items)}]"
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value).items()
        return "{" + ", ".join(f"{key}: {_as_written(item)}" for key, item in entries) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def hardware_models() -> dict[str, type[RobotUnit]]:
    """Return the models of all hardware types by name, except those whose packages cannot be loaded."""
    robot_models: dict[str, type[RobotUnit]] = {}
    for name in hardware_types():
        with suppress(PydanticCustomError):
            robot_models[name] = hardware_model(name)
    return robot_models
