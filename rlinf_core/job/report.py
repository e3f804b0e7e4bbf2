"""The reporting of findings by a recipe's rules, and the rules of placement and of elastic components."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.ranks import format_ranks, nodes_text
from rlinf_core.config.reading import COMPONENT_PLACEMENT
from rlinf_core.config.reading import COMPONENT_PLACEMENT as PLACEMENT
from rlinf_core.config.sections.cluster import RESERVED_LABELS, ClusterConfig, NodeGroup, has_robots
from rlinf_core.config.sections.values import hub_paths
from rlinf_core.config.tree import (
    MappingNode,
    Path,
    ScalarNode,
    SequenceNode,
    Span,
    find,
    key_span,
    name_pieces,
    naming,
    part,
    place,
)
from rlinf_core.config.validating.model_fields import Validated
from rlinf_core.placement.component import nodes_of_components
from rlinf_core.placement.resolve import Resolution, resolve
from rlinf_core.placement.selection import PlacementProblem
from rlinf_core.suggest import quoted
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology

GROUPS: Path = ("cluster", "node_groups")


def component_paths(tree: MappingNode) -> dict[str, Path]:
    """Return the path of each component's entry."""
    section = find(tree, PLACEMENT)
    entries = section.entries if isinstance(section, MappingNode) else ()
    return {entry.key.raw: (*PLACEMENT, entry.key.raw) for entry in entries}


def map_path(tree: MappingNode, entry: Path) -> Path:
    """Return the path of the rank map in a component's entry, or of the entry if that is a bare rank map."""
    return (*entry, "placement") if isinstance(find(tree, entry), MappingNode) else entry


def problem_span(tree: MappingNode, entry: Path, problem: PlacementProblem) -> Span:
    """Return the span to underline for a problem of the component entry at `entry`."""
    if problem.label is not None:
        return _label_span(tree, entry, problem.label)
    path = map_path(tree, entry)
    if problem.part is None:
        return place(tree, path)
    if problem.part.item is not None:
        path = (*path, problem.part.item)
    return part(find(tree, path), problem.part.start, problem.part.end) or place(tree, path)


def _label_span(tree: MappingNode, entry: Path, index: int) -> Span:
    path = (*entry, "node_group")
    node = find(tree, path)
    if isinstance(node, SequenceNode):
        return place(tree, (*path, index))
    if isinstance(node, ScalarNode):
        _, start, end = name_pieces(node.raw)[index]
        return part(node, start, end) or node.span
    return place(tree, map_path(tree, entry))


# The fields that determine a group's units.
_UNITS_FOLLOW_FROM: tuple[Path, ...] = (
    *(("label",), ("node_ranks",), ("hardware", "configs"), ("accelerators",), ("ignore_hardware",)),
)


def check_placement(
    view: Validated[Any], cluster: ClusterConfig, topology: ClusterTopology, diagnostics: Diagnostics
) -> dict[str, Resolution]:
    """Report every mistake in `cluster.component_placement`.

    Args:
        view: the whole file. Entries that depend on wrong values are not checked.
        cluster: the model of its `cluster` section, without wrong values.
        topology: the hardware to place on; of unknown accelerators only the form of the map is checked.
        diagnostics: receives the findings.

    Returns:
        The resolution of each rank map that could be checked, by component.
    """
    if view.damaged(("cluster", "num_nodes")):
        return {}
    doubtful = _doubtful_labels(view, cluster)
    resolutions: dict[str, Resolution] = {}
    for name, path in component_paths(view.whole).items():
        entry = cluster.component_placement.get(name)
        if entry is None or view.damaged(path) or doubtful.intersection(entry.node_group or (CLUSTER_LABEL,)):
            continue
        resolutions[name] = resolution = resolve(name, entry.rank_map, entry.node_group, topology)
        for problem in resolution.problems:
            help = problem.help
            if help and problem.code == "placement-out-of-range" and cluster.spare_nodes:
                help += f" No process is placed on spares (`cluster.spare_nodes`): {nodes_text(cluster.spare_ranks)}."
            diagnostics.error(problem.code, problem.message, problem_span(view.whole, path, problem), path, help)
    return resolutions


def _doubtful_labels(view: Validated[Any], cluster: ClusterConfig) -> set[str]:
    """Return the labels of groups whose units may be wrong because of reported mistakes."""
    doubtful: set[str] = set()
    groups = find(view.whole, GROUPS)
    if view.damaged(GROUPS) and not isinstance(groups, SequenceNode):
        return set(_all_labels(cluster))
    for index, group in enumerate(groups.items if isinstance(groups, SequenceNode) else ()):
        path: Path = (*GROUPS, index)
        if not any(view.damaged((*path, *below)) for below in _UNITS_FOLLOW_FROM):
            continue
        label = find(group, ("label",))
        if not isinstance(label, ScalarNode):
            return set(_all_labels(cluster)) | doubtful
        doubtful |= {label.raw, CLUSTER_LABEL} if view.damaged((*path, "accelerators")) else {label.raw}
    label_counts = Counter(group.label for group in cluster.node_groups)
    return doubtful | {
        group.label
        for group in cluster.node_groups
        if label_counts[group.label] > 1 or _contradictory(group, cluster.num_nodes)
    }


def _all_labels(cluster: ClusterConfig) -> Iterator[str]:
    """Yield the labels that components name, except reserved ones, and the labels of the groups."""
    for entry in cluster.component_placement.values():
        yield from (label for label in entry.node_group if label not in RESERVED_LABELS)
    yield from (group.label for group in cluster.node_groups)


def _contradictory(group: NodeGroup, num_nodes: int) -> bool:
    """Return whether the cluster rules report a mistake in the units of the group."""
    ranks = group.node_ranks
    beyond = any(piece.stop > num_nodes for piece in ranks.ranges or ())
    units = group.hardware.configs if group.hardware else ()
    return beyond or any(unit.node_rank not in ranks or unit.node_rank >= num_nodes for unit in units)


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
