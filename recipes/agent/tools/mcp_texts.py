"""Texts of MCP for a model: the arguments of tools, by their JSON Schemas, and the results of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

# References within a schema that are followed one after another.
_MOST_REFERENCES: Final = 8


def only_text(schema: Mapping[str, Any]) -> str | None:
    """Return the name of the argument where a tool takes one, a text; None elsewhere."""
    properties = _mapping(schema.get("properties"))
    if len(properties) != 1:
        return None
    ((name, property_schema),) = properties.items()
    kinds = _kind(property_schema, schema).split(" | ")
    # What may be anything may be a text; so may what is left out, as an optional argument of Python is described.
    takes_text = property_schema is True or property_schema == {} or set(kinds) in ({"string"}, {"string", "null"})
    return name if takes_text else None


def written_schema(schema: Mapping[str, Any]) -> str:
    """Return a signature of the arguments for the model: `{"path": string, "lines"?: integer}`."""
    required: Any = schema.get("required")
    needed = cast("list[Any]", required) if isinstance(required, list) else []
    listed = (
        f"{json.dumps(name)}{'' if name in needed else '?'}: {_kind(property_schema, schema)}"
        for name, property_schema in _mapping(schema.get("properties")).items()
    )
    return "{" + ", ".join(listed) + "}"


def result_text(result: Any) -> str:
    """Return the result of a call as text: its texts, the texts of resources, and placeholders for other content.

    Args:
        result: a `CallToolResult` of the package mcp.
    """
    parts = [_part(part) for part in result.content]
    # A server need not write again as text what it gives as an object.
    if result.structured_content is not None and not any(part.type == "text" for part in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _part(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        kind = part.resource.mime_type or "binary data"
        return text if isinstance(text, str) else f"[resource {part.resource.uri}: {kind} is not shown]"
    if part.type == "resource_link":
        return f"[resource {part.uri}: {part.name}]"
    return f"[{part.type}: {getattr(part, 'mime_type', None) or 'this'} is not shown]"


def _kind(schema: Any, root: Mapping[str, Any], references: int = 0) -> str:
    """Return a short description of the values that a JSON Schema accepts; `any` if it is too complex."""
    fields = _mapping(schema)
    target = fields.get("$ref")
    if isinstance(target, str):
        return _kind(_found(target, root), root, references + 1) if references < _MOST_REFERENCES else "any"
    for name in ("enum", "const"):
        if name in fields:
            values: Any = fields[name] if name == "enum" and isinstance(fields[name], list) else [fields[name]]
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(fields.get(name), list) and references < _MOST_REFERENCES:
            kinds = [_kind(alternative, root, references + 1) for alternative in fields[name]]
            return "any" if "any" in kinds else " | ".join(dict.fromkeys(kinds)) or "any"
    kind = fields.get("type")
    if isinstance(kind, list):
        return " | ".join(map(str, cast("list[Any]", kind))) or "any"
    return kind if isinstance(kind, str) else "any"


def _found(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within a schema; None if it does not exist."""
    value: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        value = _mapping(value).get(part.replace("~1", "/").replace("~0", "~"))
    return value


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
