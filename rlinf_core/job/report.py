"""The reporting of findings by a recipe's rules, and the rules for elastic components."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.machines.cluster import ClusterConfig, has_robots
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.reading import COMPONENT_PLACEMENT
from rlinf_core.config.sections.hub_names import hub_paths
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Path, key_span, naming, place
from rlinf_core.config.validating.pruning import Validated
from rlinf_core.placement.component import nodes_of_components
from rlinf_core.suggest import quoted


class FindingPlace(NamedTuple):
    """The location of a finding: the underlined key `path`, and the keys `about`, on whose values it depends."""

    path: Path
    about: tuple[Path, ...]


class Report:
    """A reporter, passed to a recipe's `check(config, world_sizes, report)`, that adds findings at paths of the file.

    An invalid value has its default in `config`; findings at or about such a value are dropped.
    """

    def __init__(self, view: Validated[Any], diagnostics: Diagnostics) -> None:
        self._view = view
        self._diagnostics = diagnostics
        # Names that a run fetches when it starts are checked then.
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
            at: the key to underline, or its nearest existing parent if the file omits it.
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

    def conflict(
        self, at: str, message: str, help: str | None = None, *, about: str = "", severity: Severity = Severity.ERROR
    ) -> None:
        """Report settings that contradict each other: `conflicting-settings`.

        Args:
            at: the keys, with dots, and blanks between several: the first that the file sets is underlined, or the last
                if it sets none.
            message, help: the mistake and the remedy.
            about: further keys whose values the finding depends on, written likewise.
            severity: its severity.
        """
        paths = _paths(at)
        where = next((path for path in paths if is_given(self._view.model, path)), paths[-1])
        place = FindingPlace(where, paths)
        self(place, "conflicting-settings", message, help, about=_paths(about), severity=severity)

    def _lost(self, path: Path) -> bool:
        """Return whether the value at `path` or a parent was invalid or written under a misspelt name."""
        whole, wrong = self._view.original(path), self._view.pruned | self._view.misspelt
        return any(whole[:size] in wrong for size in range(1, len(whole) + 1))

    def _find(self, path: Path) -> tuple[Path, Span]:
        """Return the path and the span to underline: for a component its name, else the value."""
        tree = self._view.tree
        is_component = path[:-1] == COMPONENT_PLACEMENT and key_span(tree, path) is not None
        return path, naming(tree, path) if is_component else place(tree, path)


def _paths(keys: str) -> tuple[Path, ...]:
    """Return the paths of keys that are written with dots, and blanks between them."""
    return tuple(tuple(int(name) if name.isdecimal() else name for name in key.split(".")) for key in keys.split())


def is_given(config: object, path: Path) -> bool:
    """Return whether the value at `path` was written by the user, rather than taken from the defaults."""
    value = config
    for segment in path:
        if isinstance(value, Mapping) and segment in value:
            value = cast("Mapping[object, object]", value)[segment]
        elif isinstance(value, BaseModel) and str(segment) in value.model_fields_set:
            value = getattr(value, str(segment))
        else:
            return False
    return True


def check_elastic(recipe: str, able: tuple[str, ...], config: Any, report: Report) -> None:
    """Report components that are marked `elastic` but cannot continue with fewer nodes."""
    cluster: ClusterConfig = config.cluster
    marked = [name for name, entry in cluster.component_placement.items() if entry.elastic]
    if not marked:
        return
    used = nodes_of_components(cluster)
    for name in marked:
        reason, remedy = _reason(recipe, able, cluster, name, used[name])
        if reason:
            report(
                ("cluster", "component_placement", name),
                "component-not-elastic",
                f"component `{name}` cannot go on with fewer processes: {reason}",
                remedy,
            )


def _reason(
    recipe: str, able: tuple[str, ...], cluster: ClusterConfig, name: str, nodes: frozenset[int]
) -> tuple[str, str]:
    if name not in able:
        placed = [other for other in able if other in cluster.component_placement]
        which = f"only {quoted(placed)} can" if placed else f"no component of recipe `{recipe}` can"
        return f"in recipe `{recipe}` {which}", f"remove `elastic` from `{name}`; {_SPARES}"
    if any(has_robots(cluster, rank) for rank in nodes):
        return "each robot is driven by its own", "remove `elastic` from it"
    if len(nodes - {0}) == 0:
        return "all of them are on node 0, the head, with which the whole cluster ends", "remove `elastic` from it"
    if len(nodes) == 1:
        return f"all of them are on node {format_ranks(nodes)}", f"place it on several nodes; {_SPARES}"
    return "", ""


_SPARES = "`cluster.spare_nodes` keeps nodes for the place of a lost one"
