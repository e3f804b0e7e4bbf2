"""The origin of each value of a composed configuration, for `rlinf inspect config`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rlinf_core.config.composing.references import escape_references
from rlinf_core.config.ranks import format_range
from rlinf_core.config.secrets import MASK, is_secret, mask_text, mask_urls
from rlinf_core.config.tree import MappingNode, Node, Path, SequenceNode, Span, is_null, resolve_plain, to_data
from rlinf_core.suggest import escape_of

Plain: TypeAlias = "None | bool | int | float | str | Sequence[Plain] | Mapping[str, Plain]"
"""Plain data, or the result of `to_data`."""
_UNQUOTED: Final = re.compile(r"[A-Za-z0-9_/][\w/.@%+=:,~$()-]*( [\w/.@%+=,~$()-][\w/.@%+=:,~$()-]*)*", re.ASCII)
# Text that YAML 1.1 reads as a boolean, a number in base 60, base 2 or with underscores, or a date.
_OLD_YAML: Final = re.compile(
    r"(?i:y|n|yes|no|on|off)|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|0b[01_]+|[0-9][0-9_.]*([eE][-+]?[0-9]+)?"
    r"|0x[0-9a-fA-F_]+|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*"
)
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

Kind: TypeAlias = Literal["file", "override", "default"]


class Origin(NamedTuple):
    """One value as YAML text, with its origin.

    Attributes:
        span: where the value, or the reference to it, is written; None for a default.
        is_text: whether the model read it as text, even if it looks like a number.
        value: the value as data.
    """

    path: Path
    text: str
    kind: Kind
    span: Span | None = None
    is_text: bool = False
    value: Plain = None

    @property
    def where(self) -> str:
        """`job.yaml:9:18`, the override as it was typed (secrets masked), or `default`."""
        if self.span is None:
            return "default"
        if self.kind == "override":
            return f"override {mask_text(self.span.source.line(self.span.begin.line))}"
        return str(self.span)


# A mapping has text keys; a list has its indices as keys.
Nested: TypeAlias = "Origin | dict[str | int, Nested]"


def plain_data(value: object) -> Any:
    """Return a model as plain data in the form of a file."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        return {field.alias or name: plain_data(getattr(value, name)) for name, field in fields}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        # Environment variables are pairs of a name and a value; a file may write them as a map.
        if items and all(isinstance(item, tuple) for item in items):
            return {str(name): plain_data(item) for name, item in cast("Sequence[tuple[object, object]]", items)}
        return [plain_data(item) for item in cast("Sequence[object]", value)]
    if value is None or isinstance(value, str | int | float):
        return value
    return _as_written(value)


def origins(node: Node, model: object = None, path: Path = ()) -> Iterator[Origin]:
    """Yield every scalar (and every empty mapping and list) of the tree at a path, in order.

    With the validated model, its defaults follow the written values of the same section. Defaults are masked; written
    values are not (`secrets.mask`).
    """
    if isinstance(node, MappingNode) and node.entries:
        for entry in node.entries:
            name = entry.key.raw
            if isinstance(model, BaseModel) and _stands_for_default(entry.value, model, name):
                continue
            inner = list(origins(entry.value, _model_below(model, name), (*path, name)))
            # An empty value has no position, but its key has.
            yield from (_at_key(origin, entry.key.span) if len(inner) == 1 else origin for origin in inner)
        if isinstance(model, BaseModel):
            yield from _defaults(node, model, path)
    elif isinstance(node, SequenceNode) and node.items:
        items = cast("Sequence[object]", model) if isinstance(model, list | tuple) else ()
        for index, item in enumerate(node.items):
            below = items[index] if len(items) == len(node.items) else None
            yield from origins(item, below, (*path, index))
    else:
        value = _as_absolute(cast(Plain, to_data(node)), model)
        kind: Kind = "override" if node.span.source.kind == "overrides" else "file"
        yield Origin(path, _leaf_text(value), kind, node.span, _is_text(model), value)


def _as_absolute(written: Plain, validated: object) -> Plain:
    """Return a relative path as its model made it absolute, and any other value as written."""
    # A list of one may be written as its only item.
    if isinstance(validated, list | tuple) and len(items := cast("Sequence[object]", validated)) == 1:
        validated = items[0]
    if isinstance(written, str) and isinstance(validated, str) and os.path.isabs(validated):
        return validated if validated == os.path.abspath(os.path.expanduser(written)) else written
    return written


def _at_key(origin: Origin, key: Span) -> Origin:
    empty = origin.span is not None and origin.span.start == origin.span.end
    return origin._replace(span=key) if empty else origin


def _model_below(model: object, name: str) -> object:
    if isinstance(model, BaseModel):
        field = _field_of(model, name)
        return None if field is None else getattr(model, field)
    if isinstance(model, Mapping):
        values = cast("Mapping[str, object]", model)
        return values.get(name)
    if isinstance(model, tuple):
        # Environment variables: pairs of a name and a value, or one such pair.
        items = cast("tuple[object, ...]", model)
        pairs = items if all(isinstance(item, tuple) for item in items) else (items,)
        return next((pair[1] for pair in cast("Any", pairs) if len(pair) == 2 and pair[0] == name), None)
    return None


def _is_text(model: object) -> bool:
    if isinstance(model, tuple):
        # A text in place of a list becomes a list of one.
        items = cast("tuple[object, ...]", model)
        return len(items) == 1 and isinstance(items[0], str)
    return isinstance(model, str)


def _field_of(model: BaseModel, key: str) -> str | None:
    for name, field in type(model).model_fields.items():
        if (field.alias or name) == key:
            return name
    return None


def _stands_for_default(value: Node, model: BaseModel, key: str) -> bool:
    """Return whether a value is a `null` that means the default."""
    return is_null(value) and (name := _field_of(model, key)) is not None and name not in model.model_fields_set


def _defaults(node: MappingNode, model: BaseModel, path: Path) -> Iterator[Origin]:
    for name, field in type(model).model_fields.items():
        key = field.alias or name
        value = node.get(key)
        content = getattr(model, name)
        # Pydantic counts a section that a rule of the model created as set.
        is_given = name in model.model_fields_set and not (value is None and isinstance(content, BaseModel))
        if not is_given and (value is None or _stands_for_default(value, model, key)):
            value = cast(Plain, to_jsonable_python(content, fallback=_as_written))
            yield from default_origins(value, (*path, key))


def _as_written(value: object) -> str:
    return format_range(value) if isinstance(value, range) else str(value)


def default_origins(value: Plain, path: Path = ()) -> Iterator[Origin]:
    """Yield every scalar of plain data as a default; values under secret-looking keys are masked."""
    if isinstance(value, Mapping) and value:
        for name, item in cast("Mapping[str, Plain]", value).items():
            yield from default_origins(item, (*path, name))
    elif isinstance(value, Sequence) and value and not isinstance(value, str):
        for index, item in enumerate(cast("Sequence[Plain]", value)):
            yield from default_origins(item, (*path, index))
    else:
        secret = value not in (None, "") and any(isinstance(name, str) and is_secret(name, value) for name in path)
        shown = MASK if secret else mask_urls(value) if isinstance(value, str) else value
        yield Origin(path, _leaf_text(shown), "default", value=shown)


def _leaf_text(value: Plain) -> str:
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return inline(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def resolved_text(tree: MappingNode, model: BaseModel | None = None) -> str:
    """Return YAML that loads to the same values, with the defaults of `model` that are neither null nor empty."""
    return yaml_of(origins(tree, model))


def yaml_of(values: Iterable[Origin]) -> str:
    """Return YAML of the values worth printing, with a final line end."""
    return "".join(f"{text}\n" for text, _ in lines_of(nested_of(filter(says_something, values))))


def says_something(origin: Origin) -> bool:
    """Return whether a value is worth printing: null and empty defaults are not."""
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
            yield f"{yaml_text(key)}: {value.text}", value
        else:
            yield f"{yaml_text(key)}:", None
            yield from ((f"  {text}", origin) for text, origin in inner)


def inline(value: None | bool | int | float | str) -> str:
    """Return a scalar as written after a key."""
    raw: object = getattr(value, "raw", None)
    if isinstance(raw, str):
        return raw
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return yaml_text(escape_references(value)) if isinstance(value, str) else repr(value)


def yaml_text(text: str) -> str:
    """Return a text as a YAML scalar, quoted if necessary."""
    a_word = _UNQUOTED.fullmatch(text) and not (text.endswith(":") or ": " in text or _OLD_YAML.fullmatch(text))
    if a_word and isinstance(resolve_plain(text), str):
        return text
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else escape_of(c)) for c in text) + '"'
