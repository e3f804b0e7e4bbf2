"""Entries of `rlinf explain`: a diagnostic code with its examples, a field of the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_cli.codes import CLOSE, OPEN, Code, Example
from rlinf_cli.console import console
from rlinf_cli.console.prose import paragraphs
from rlinf_cli.file.field_docs import FieldDoc
from rlinf_core.config.diagnostics import Severity

_COLORS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def code_text(code: Code) -> str:
    """Return the entry for people."""
    color = _COLORS[code.severity]
    blocks = [
        f"{console.style(f'{code.severity}[{code.name}]', color)}\n{paragraphs(code.title)}",
        paragraphs(code.meaning),
        f"{console.style('Wrong', 'red')}\n{_example(code.wrong, color)}",
        f"{console.style('Right', 'green')}\n{_example(code.right, color)}",
    ]
    return "\n\n".join(blocks)


def code_record(code: Code) -> dict[str, Any]:
    """Return the entry for programs; examples without their markers."""
    return {
        "name": code.name,
        "severity": str(code.severity),
        "title": code.title,
        "meaning": code.meaning,
        "wrong": _record(code.wrong),
        "right": _record(code.right),
    }


def _record(example: Example) -> dict[str, Any]:
    return {
        "text": _unmarked(example.text),
        "overrides": [_unmarked(override) for override in example.overrides],
        "files": {name: _unmarked(text) for name, text in example.files},
        "environ": dict(example.environ),
        "assume": list(example.assume),
        "found": example.found,
    }


def _example(example: Example, color: str) -> str:
    blocks: list[str] = []
    if example.text:
        blocks.append(_numbered(example.text, color))
    for name, text in example.files:
        blocks.append(f"    {name}:\n{_numbered(text, color)}")
    settings = [f"{name}={value}" for name, value in example.environ]
    arguments = [*example.overrides, *(f"--assume {value}" for value in example.assume)]
    if example.found is not None:
        arguments.append(f"--live    # each node has {example.found} accelerators")
    if settings or arguments:
        command = " ".join([*settings, "rlinf validate FILE", *arguments])
        blocks.append("\n".join(f"    {line}" for line in _with_caret(f"$ {command}", color)))
    return "\n".join(blocks)


def _numbered(text: str, color: str) -> str:
    lines: list[str] = []
    for number, line in enumerate(text.rstrip("\n").split("\n"), start=1):
        shown, *caret = _with_caret(line, color)
        lines.append(f"{console.style(f'{number:>5} |', 'dim')} {shown}".rstrip())
        lines.extend(f"{console.style('      |', 'dim')} {mark}" for mark in caret)
    return "\n".join(lines)


def _with_caret(line: str, color: str) -> list[str]:
    """Return the line without markers and, if it had any, a line of carets beneath the marked text."""
    start = line.find(OPEN)
    shown = _unmarked(line)
    if start < 0:
        return [shown]
    end = line.find(CLOSE, start)
    length = (end if end >= 0 else len(line)) - start - len(OPEN)
    before = "".join(c if c == "\t" else " " for c in line[:start])
    return [shown, before + console.style("^" * max(1, length), color)]


def _unmarked(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


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
