"""Text of the templates: values on one line, and plain data as YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def one_line(text: str) -> str:
    """Return a text for a comment, without line breaks and control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def yaml(value: Any, indent: str = "") -> list[str]:
    """Return plain data as lines of YAML. Every text is quoted as in JSON, so that it cannot be taken for another
    type."""
    lines: list[str] = []
    if isinstance(value, Mapping):
        items: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        for key, item in items.items():
            lines += _entry(f"{indent}{_key(key)}:", item, f"{indent}  ")
    else:
        for item in value:
            first, *rest = yaml(item, f"{indent}  ")
            lines += [f"{indent}- {first.lstrip()}", *rest]
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", key) else json.dumps(key)


def _entry(start: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping | list) and value:
        return [start, *yaml(value, indent)]
    return [f"{start} {json.dumps(value)}"]
