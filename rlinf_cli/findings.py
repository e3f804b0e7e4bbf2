"""Findings as blocks for people: as many as anyone reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rlinf_cli import console
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.render import render_text

_MOST = 100


def finding_blocks(found: Sequence[Diagnostic], stream: TextIO) -> Iterator[str]:
    """Return a block for each finding, and under `--verbose` for all; else the gravest, and a line that counts the
    rest.

    They are coloured and cropped as `stream` shows them.
    """
    shown = found if console.verbosity.verbose else _gravest(found)
    # A caret may stand one column behind the last character.
    color, width = console.colored(stream), console.width(stream) - 1
    for diagnostic in shown:
        yield render_text(diagnostic, color=color, width=width)
    if len(shown) < len(found):
        yield f"and {len(found) - len(shown)} more; `rlinf validate --verbose` shows all of them"


def without_effect(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return the findings about keys that change nothing."""
    from rlinf_core.job.no_effect import NO_EFFECT

    return [each for each in found if each.code == NO_EFFECT]


def _gravest(found: Sequence[Diagnostic]) -> Sequence[Diagnostic]:
    """Return the first hundred, errors before warnings before notes, in the order of `found`."""
    if len(found) <= _MOST:
        return found
    grave = list(Severity)
    kept = sorted(range(len(found)), key=lambda index: grave.index(found[index].severity))[:_MOST]
    return [found[index] for index in sorted(kept)]
