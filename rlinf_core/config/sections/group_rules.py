"""The rules of node groups, and the context of all rules: the cluster, its places in the file, and the findings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partialmethod
from typing import Any, Generic, NamedTuple, TypeVar

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.ranks import NodeRanks, common, format_range, merge_ranges, subtract
from rlinf_core.config.sections.cluster import (
    CLUSTER_LABEL,
    MAX_NODES,
    RESERVED_LABELS,
    ClusterConfig,
    DeclaredAccelerators,
    EnvConfig,
    NodeGroup,
)
from rlinf_core.config.tree import MappingNode, Path, SequenceNode, Span, child, find, naming, part, place
from rlinf_core.config.validating.model_fields import Validated

V = TypeVar("V", bound=Hashable)
P = TypeVar("P")

CLUSTER: Path = ("cluster",)


class Site(NamedTuple):
    """The validated `cluster` section. Paths refer to `view.tree`, whose indexes match the model's."""

    cluster: ClusterConfig
    view: Validated[Any]
    diagnostics: Diagnostics

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes, or None if the file does not set a valid one."""
        return None if self.damaged(("cluster", "num_nodes")) else self.cluster.num_nodes

    def groups(self) -> Iterable[tuple[Path, NodeGroup]]:
        return ((("cluster", "node_groups", index), group) for index, group in enumerate(self.cluster.node_groups))

    def damaged(self, path: Path) -> bool:
        """Return whether the value at `path` was invalid, in which case the model's value may be a stand-in."""
        return self.view.damaged(self.view.original(path))

    def report(
        self,
        code: str,
        message: str,
        path: Path,
        *,
        span: Span | None = None,
        help: str | None = None,
        related: Iterable[tuple[Span, str]] = (),
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Add a finding about the value at `path`, underlining `span` or else that value."""
        where = span or self.place(path)
        self.diagnostics.add(Diagnostic(code, severity, message, where, self.view.original(path), help, tuple(related)))

    warn = partialmethod(report, severity=Severity.WARNING)

    def place(self, path: Path) -> Span:
        return place(self.view.tree, path)

    def key(self, path: Path) -> Span:
        return naming(self.view.tree, path)

    def piece(self, path: Path, ranks: NodeRanks, index: int) -> Span:
        """Return the span of range `index` of the `node_ranks` at `path`."""
        if index >= len(ranks.parts):
            return self.place(path)
        written = ranks.parts[index]
        node = find(self.view.tree, path)
        if node is not None and written.item is not None:
            node = child(node, written.item)
            path = (*path, written.item)
        return part(node, written.start, written.end) or self.place(path)


class Claim(NamedTuple, Generic[V, P]):
    """A claim that `nodes` have `value`, made at `place` of the file. Claims with equal values agree."""

    nodes: range
    value: V
    place: P


def contradictions(claims: Iterable[Claim[V, P]]) -> list[tuple[Claim[V, P], Claim[V, P]]]:
    """Return pairs of claims with different values for a common node: the later one in the file, then the earlier.

    `claims` are in file order. Every claim that contradicts a claim starting at a lower or equal node is in one pair
    with such a claim; not every contradicting pair is returned.
    """
    claims = list(claims)
    position = {id(claim): index for index, claim in enumerate(claims)}
    pairs: list[tuple[Claim[V, P], Claim[V, P]]] = []
    # Only two earlier claims matter: the one that reaches farthest, and the farthest with another value.
    reaching: list[Claim[V, P]] = []
    for claim in sorted(claims, key=lambda claim: claim.nodes.start):
        rival = next((other for other in reaching if other.value != claim.value), None)
        if rival is not None and rival.nodes.stop > claim.nodes.start:
            pairs.append((claim, rival) if position[id(claim)] > position[id(rival)] else (rival, claim))
        farthest, *others = sorted((*reaching, claim), key=lambda claim: -claim.nodes.stop)
        reaching = [farthest, *(other for other in others if other.value != farthest.value)][:2]
    return pairs


def outside(piece: range, inside: Sequence[range]) -> range | None:
    """Return the first range of numbers of `piece` missing from the merged ranges `inside`, or None."""
    return next(iter(subtract((piece,), inside)), None)


def check(site: Site) -> None:
    _labels(site)
    _from_one(site)
    for path, group in site.groups():
        node_ranks = (*path, "node_ranks")
        if not site.damaged(node_ranks):
            bounds(site, node_ranks, group.node_ranks)
            order(site, node_ranks, group.node_ranks)
        if group.hardware is not None and group.ignore_hardware:
            message = f"group `{group.label}` declares hardware and ignores it"
            help = "remove `ignore_hardware`, or `hardware`"
            related = [(site.key((*path, "hardware")), "the hardware is declared at")]
            site.report("hardware-and-ignore", message, (*path, "ignore_hardware"), help=help, related=related)
        _environments(site, path, group)
    _accelerators(site)


def _labels(site: Site) -> None:
    first: dict[str, Path] = {}
    for path, group in site.groups():
        label = (*path, "label")
        if site.damaged(label):
            continue
        if group.label in RESERVED_LABELS:
            meaning = "every node" if group.label == CLUSTER_LABEL else "every node without its hardware"
            message = f"the label `{group.label}` is reserved: it always means {meaning}"
            site.report("reserved-label", message, label, help="choose another label for the group")
        elif group.label in first:
            help = "choose another label for one of them, or merge the groups"
            related = [(site.place(first[group.label]), "first given at")]
            site.report(
                "duplicate-label", f"two node groups have the label `{group.label}`", label, help=help, related=related
            )
        else:
            first[group.label] = label


def bounds(site: Site, path: Path, ranks: NodeRanks) -> bool:
    """Return whether all of `ranks` exist; report missing ones."""
    count = site.num_nodes
    if count is None or ranks.ranges is None:
        return True
    sound = True
    for index, piece in enumerate(ranks.ranges):
        if piece.stop > count:
            sound = False
            out_of_range(site, path, piece, site.piece(path, ranks, index))
    return sound


def out_of_range(site: Site, path: Path, piece: range, span: Span) -> None:
    """Report a range of node ranks beyond the last node."""
    count = site.cluster.num_nodes
    if counts_from_one(site):
        return  # reported once, at the first group
    beyond = range(max(piece.start, count), piece.stop)
    help_text = (
        f"{count} nodes have the ranks {format_range(range(count))}" if count > 1 else "the only node has rank 0"
    )
    if piece.stop == count + 1 and len(piece) > 1:
        help_text += f"; did you mean `{format_range(range(piece.start, count))}`?"
    site.report(
        "node-rank-out-of-range",
        f"there {'is' if len(beyond) == 1 else 'are'} no node{'' if len(beyond) == 1 else 's'} {format_range(beyond)}:"
        f" `num_nodes` is {count}",
        path,
        span=span,
        help=help_text,
        related=[(site.place((*CLUSTER, "num_nodes")), "`num_nodes` is set at")],
    )


def counts_from_one(site: Site) -> bool:
    """Return whether the groups name the nodes 1 to `num_nodes` instead of 0 to `num_nodes` - 1."""
    named = merge_ranges(piece for _, group in site.groups() for piece in ranges_of(group.node_ranks))
    count = site.num_nodes
    return count is not None and count > 1 and named == (range(1, count + 1),)


def _from_one(site: Site) -> None:
    if not counts_from_one(site):
        return
    count = site.cluster.num_nodes
    path, group = min(site.groups(), key=lambda pair: min(piece.start for piece in ranges_of(pair[1].node_ranks)))
    less = ",".join(format_range(range(piece.start - 1, piece.stop - 1)) for piece in ranges_of(group.node_ranks))
    site.report(
        "node-rank-out-of-range",
        f"ranks begin at 0: {count} nodes have the ranks {format_range(range(count))}, and the groups name 1-{count}",
        (*path, "node_ranks"),
        help=f"write each rank one lower, here `{less}`",
        related=[(site.place((*CLUSTER, "num_nodes")), "`num_nodes` is set at")],
    )


def order(site: Site, path: Path, ranks: NodeRanks) -> None:
    """Report the first range that is out of order or repeats a rank."""
    ranges = ranges_of(ranks)
    reach = -1
    for index, piece in enumerate(ranges):
        if piece.start <= reach:
            again = any(piece.start in earlier for earlier in ranges[:index])
            site.report(
                "node-ranks-order",
                f"node {piece.start} {'is listed twice' if again else f'is listed after node {reach}'}",
                path,
                span=site.piece(path, ranks, index),
                help="list node ranks in ascending order, each once: "
                f" `{','.join(map(format_range, merge_ranges(ranges)))}`",
            )
            return
        reach = piece.stop - 1


def ranges_of(ranks: NodeRanks) -> tuple[range, ...]:
    return ranks.ranges or ()


def _accelerators(site: Site) -> None:
    counts: list[Claim[int, tuple[Path, DeclaredAccelerators]]] = []
    models: list[Claim[str, tuple[Path, DeclaredAccelerators]]] = []
    for path, group in site.groups():
        own, at = group.accelerators, (*path, "accelerators")
        if own is None or site.damaged(at) or site.damaged((*path, "node_ranks")):
            continue
        for piece in group_ranges(site, group.node_ranks):
            counts.append(Claim(piece, own.per_node, (at, own)))
            if own.model is not None:
                models.append(Claim(piece, own.model, (at, own)))
    pairs = (*contradictions(models), *contradictions(counts))
    for later, earlier in {later.place[0]: (later, earlier) for later, earlier in pairs}.values():
        (at, own), (first, other) = later.place, earlier.place
        site.report(
            "accelerators-conflict",
            f"node {common(later.nodes, earlier.nodes).start} has {_accelerator_text(own)} here and"
            f" {_accelerator_text(other)} in another group",
            at,
            help="groups that share a node must declare the same accelerators for it",
            related=[(site.key(first), "declared differently at")],
        )


def _accelerator_text(declared: DeclaredAccelerators) -> str:
    model, count = declared.model, declared.per_node
    return f"{count} x {model}" if model else f"{count} accelerator{'' if count == 1 else 's'}"


def group_ranges(site: Site, ranks: NodeRanks) -> tuple[range, ...]:
    """Return the node ranges of a group, ascending and joined; `all` is every node."""
    if ranks.ranges is None:
        return (range(site.num_nodes or MAX_NODES),)
    return merge_ranges(ranks.ranges)


def _environments(site: Site, path: Path, group: NodeGroup) -> None:
    sound_group = not site.damaged((*path, "node_ranks"))
    nodes = group_ranges(site, group.node_ranks)
    pieces: list[Claim[int, tuple[Path, NodeRanks, int]]] = []
    for index, config in enumerate(group.env_configs):
        at: Path = (*path, "env_configs", index)
        ranks_at = (*at, "node_ranks")
        _twice(site, at, config)
        if site.damaged(ranks_at):
            continue
        order(site, ranks_at, config.node_ranks)
        if bounds(site, ranks_at, config.node_ranks) and sound_group:
            _within(site, ranks_at, config.node_ranks, nodes, group.label)
        spans = nodes if config.node_ranks.ranges is None else ranges_of(config.node_ranks)
        pieces += [Claim(piece, index, (ranks_at, config.node_ranks, i)) for i, piece in enumerate(spans)]
    _overlaps(site, group.label, pieces)


def _within(site: Site, path: Path, ranks: NodeRanks, nodes: tuple[range, ...], label: str) -> None:
    for index, piece in enumerate(ranges_of(ranks)):
        strangers = outside(piece, nodes)
        if strangers is not None:
            plural = len(strangers) > 1
            site.report(
                "env-config-outside-group",
                f"node{'s' if plural else ''} {format_range(strangers)} {'are' if plural else 'is'} not in group"
                f" `{label}`",
                path,
                span=site.piece(path, ranks, index),
                help=f"the group's node_ranks are {','.join(map(format_range, nodes))}",
                related=[(site.place((*path[:-3], "node_ranks")), "they are set at")],
            )


def _overlaps(site: Site, label: str, pieces: Iterable[Claim[int, tuple[Path, NodeRanks, int]]]) -> None:
    for later, earlier in contradictions(pieces):
        shared = common(later.nodes, earlier.nodes)
        path, ranks, index = later.place
        plural = len(shared) > 1
        site.report(
            "env-config-overlap",
            f"node{'s' if plural else ''} {format_range(shared)} {'have' if plural else 'has'} two `env_configs` in"
            f" group `{label}`",
            path,
            span=site.piece(path, ranks, index),
            help="list each node in only one entry of a group's `env_configs`",
            related=[(site.piece(*earlier.place), "the other one starts at")],
        )


def variable_paths(tree: MappingNode, at: Path) -> list[Path]:
    """Return the paths of the `env_vars` values of the entry at `at`, in the order of the model's pairs."""
    path = (*at, "env_vars")
    node = find(tree, path)
    items = [((*path, index), item) for index, item in enumerate(node.items)] if isinstance(node, SequenceNode) else []
    maps = items or [(path, node)]
    return [(*path, entry.key.raw) for path, item in maps if isinstance(item, MappingNode) for entry in item.entries]


def _twice(site: Site, at: Path, config: EnvConfig) -> None:
    first: dict[str, Path] = {}
    for (name, _), path in zip(config.env_vars, variable_paths(site.view.tree, at), strict=False):
        if first.setdefault(name, path) != path:
            message = f"`{name}` is set twice for the same nodes"
            help = "keep one of them"
            related = [(site.key(first[name]), "first set at")]
            site.report("duplicate-env-var", message, path, span=site.key(path), help=help, related=related)
