"""Reporting of findings by a recipe's rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from rlinf_core.config.composing.merge import COMPONENT_PLACEMENT
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.places import naming, place
from rlinf_core.config.sections.hub_names import hub_paths
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Path, key_span
from rlinf_core.config.validating.pruning import Validated


class FindingPlace(NamedTuple):
    """The location of a finding: the key at `path` is underlined; the finding depends on the values of the keys
    `about`.
    """

    path: Path
    about: tuple[Path, ...]


class Report:
    """Passed to a recipe's `check(config, world_sizes, report)`; adds a finding at a path of the configuration.

    An invalid value has its default in `config`; findings at such a value, or about one, are dropped.
    """

    def __init__(self, view: Validated[Any], diagnostics: Diagnostics) -> None:
        self._view = view
        self._diagnostics = diagnostics
        # What a run fetches when it starts is checked then.
        self._unfetched = [at for at, path in hub_paths(view.model) if not path.is_here]

    def __call__(
        self,
        at: Path | FindingPlace,
        code: str,
        message: str,
        help: str | None = None,
        *,
        about: Collection[Path] = (),
        severity: Severity = Severity.ERROR,
        related: Iterable[tuple[Path, str]] = (),
    ) -> None:
        """Report a finding.

        Args:
            at: the key to underline; its nearest existing parent if the file omits it.
            code: the diagnostic code.
            message, help: the mistake and the remedy.
            about: further keys whose values the finding depends on.
            severity: its severity.
            related: further keys to point out, each with a short explanation.
        """
        where, keys = at if isinstance(at, FindingPlace) else (at, (at,))
        path, span = self._find(where)
        whole = self._view.original(path)
        depths = [(at, min(len(at), len(where))) for at in self._unfetched]
        if code == "unusable-path" and any(at[:depth] == where[:depth] for at, depth in depths):
            return
        if self._view.damaged(whole) or any(self._lost(key) for key in (*keys, *about)):
            return
        places = tuple((self._find(other)[1], words) for other, words in related)
        self._diagnostics.add(Diagnostic(code, severity, message, span, whole, help, places))

    def _lost(self, path: Path) -> bool:
        """Return whether the value at `path` or its parent was invalid, or is given under a misspelt name."""
        whole, wrong = self._view.original(path), self._view.pruned | self._view.misspelt
        return any(whole[:size] in wrong for size in range(1, len(whole) + 1))

    def _find(self, path: Path) -> tuple[Path, Span]:
        """Return the path in the file and the span to underline: of a component its name."""
        tree = self._view.tree
        is_component = path[:-1] == COMPONENT_PLACEMENT and key_span(tree, path) is not None
        return path, naming(tree, path) if is_component else place(tree, path)
