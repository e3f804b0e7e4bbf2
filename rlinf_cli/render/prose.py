"""Paragraphs for people: folded at the terminal's width, and never wider than is pleasant to read."""

from __future__ import annotations

import textwrap

from rlinf_cli import console

_READABLE = 100


def paragraphs(text: str, indent: str = "") -> str:
    """Return `text` folded; blank lines part its paragraphs, and an indented paragraph stays as it is."""
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
