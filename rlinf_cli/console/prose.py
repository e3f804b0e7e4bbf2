"""Paragraphs, folded at the terminal's width or a readable maximum."""

from __future__ import annotations

import textwrap

from rlinf_cli.console import console

_READABLE = 100


def parts(text: str, separator: str = " · ") -> str:
    """Return a line of parts, folded between them if it is wider than the terminal."""
    columns = console.width()
    first, *others = text.split(separator)
    lines = [first]
    for part in others:
        longer = f"{lines[-1]}{separator}{part}"
        if len(longer) <= columns:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def paragraphs(text: str, indent: str = "") -> str:
    """Return `text` folded; blank lines separate paragraphs, and an indented paragraph is kept as it is."""
    columns = min(console.width(), _READABLE)
    folded: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith(" "):
            folded.append(textwrap.indent(paragraph, indent))
            continue
        folded.append(
            textwrap.fill(
                " ".join(paragraph.split()),
                columns,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n\n".join(folded)
