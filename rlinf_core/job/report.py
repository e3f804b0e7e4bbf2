"""Where the findings of a recipe's own rules go."""

from __future__ import annotations

import re
from typing import Any

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.merge import COMPONENT_PLACEMENT, find_components
from rlinf_core.config.places import part, place
from rlinf_core.config.pruning import Validated
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Mapping, Path, find


class Report:
    """Passed to a recipe's `check(config, world_sizes, report)`; adds a finding at a path of the configuration.

    A value that was wrong in itself has its default in `config`, and what follows from that default is no finding: one
    that stands at such a value or speaks of it is dropped.
    """

    def __init__(self, view: Validated[Any], diagnostics: Diagnostics) -> None:
        self._view = view
        self._diagnostics = diagnostics
        names = sorted({re.escape(str(path[-1])) for path in view.pruned if path and isinstance(path[-1], str)})
        self._doubtful = re.compile(rf"\b({'|'.join(names)})\b") if names else None

    def __call__(
        self, path: Path, code: str, message: str, help: str | None = None, *, severity: Severity = Severity.ERROR
    ) -> None:
        """Report what is wrong at `path`, or at the nearest place above it when the file leaves the key out."""
        path, span = self._find(path)
        whole = self._view.original(path)
        if self._view.damaged(whole) or (self._doubtful and self._doubtful.search(f"{message} {help or ''}")):
            return
        self._diagnostics.add(Diagnostic(code, severity, message, span, whole, help))

    def _find(self, path: Path) -> tuple[Path, Span]:
        """Return what `path` is in the file and what to underline: a component may stand with others in one key."""
        tree = self._view.tree
        section = find(tree, COMPONENT_PLACEMENT)
        if path[:-1] == COMPONENT_PLACEMENT and isinstance(section, Mapping):
            name = str(path[-1])
            entry = find_components(section, name)
            if entry is not None:
                start = entry.key.raw.find(name)
                return (*COMPONENT_PLACEMENT, entry.key.raw), part(
                    entry.key, start, start + len(name)
                ) or entry.key.span
        return path, place(tree, path)
