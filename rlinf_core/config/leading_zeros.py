"""Warnings about integers such as `010`: ten in YAML 1.2, eight to YAML 1.1 loaders."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.pruning import Validated
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import scalars

# No tree is searched unless a source holds something like it.
_LIKELY = re.compile(r"(?<![\w.])0[0-9]")
_LEADING_ZERO = re.compile(r"[-+]?0+[0-9]+", re.ASCII)


def warn_of_leading_zeros(
    model: type[BaseModel], view: Validated[Any], sources: Iterable[SourceText], diagnostics: Diagnostics
) -> None:
    """Warn of leading zeros where the model wants an integer; elsewhere such a number is text, kept as written."""
    if not any(_LIKELY.search(source.text) for source in sources):
        return
    from rlinf_core.config.model_fields import types_at

    for path, scalar in scalars(view.tree):
        whole = type(scalar.value) is int and _LEADING_ZERO.fullmatch(scalar.raw)
        if whole and int in types_at(model, path):
            message = f"`{scalar.raw}` is read as {scalar.value}; other YAML loaders read it as octal"
            help = f"write `{scalar.value}`"
            where = view.original(path)
            diagnostics.add(Diagnostic("leading-zero", Severity.WARNING, message, scalar.span, where, help))
