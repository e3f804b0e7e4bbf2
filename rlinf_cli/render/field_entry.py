"""A field of the file as `rlinf explain` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_cli.console import console
from rlinf_cli.console.prose import paragraphs
from rlinf_cli.file.field_docs import FieldDoc


def field_text(doc: FieldDoc, recipes: Sequence[str] = ()) -> str:
    """Return the entry for people.

    Args:
        recipes: the recipes that this field entry applies to; empty for all.
    """
    head = f"{console.style(doc.path or 'the file', 'bold')}: {doc.type}"
    if recipes:
        head += console.style(f"  (recipe {', '.join(recipes)})", "dim")
    blocks = [f"{head}\n{_holds(doc)}", paragraphs(doc.description), *map(_child, doc.children)]
    return "\n\n".join(block for block in blocks if block)


def _child(doc: FieldDoc) -> str:
    head = f"  {console.style(doc.name, 'bold')}: {doc.type} ({_holds(doc)})"
    return f"{head}\n{paragraphs(doc.description, '      ')}" if doc.description else head


def _holds(doc: FieldDoc) -> str:
    if doc.required:
        return "required"
    return "optional" if doc.default is None else f"default: {doc.default}"


def field_record(doc: FieldDoc, recipes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entry for programs."""
    return {
        "path": doc.path,
        "type": doc.type,
        "required": doc.required,
        "default": doc.default,
        "description": doc.description,
        "recipes": list(recipes),
        "children": [field_record(child) for child in doc.children],
    }
