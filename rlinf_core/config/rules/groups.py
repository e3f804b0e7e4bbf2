"""Rules for node groups: their labels, their node ranks, and the software environment of their nodes."""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_core.config.machines.cluster import CLUSTER_LABEL, MAX_NODES, RESERVED_LABELS, EnvConfig, NodeGroup
from rlinf_core.config.ranks import NodeRanks, common, format_range, merge_ranges
from rlinf_core.config.rules.site import CLUSTER, Claim, Site, contradictions, outside
from rlinf_core.config.source import Span
from rlinf_core.config.tree import MappingNode, Path, SequenceNode, find


def check(site: Site) -> None:
    _labels(site)
    _from_one(site)
    for path, group in site.groups():
        node_ranks = (*path, "node_ranks")
        if not site.damaged(node_ranks):
            bounds(site, node_ranks, group.node_ranks)
            order(site, node_ranks, group.node_ranks)
        if group.hardware is not None and group.ignore_hardware:
            site.report(
                "hardware-and-ignore",
                f"group `{group.label}` declares hardware and ignores it",
                (*path, "ignore_hardware"),
                help="remove `ignore_hardware`, or `hardware`",
                related=[(site.key((*path, "hardware")), "the hardware is declared at")],
            )
    _accelerators(site)
    _check_environments(site)


def _labels(site: Site) -> None:
    first: dict[str, Path] = {}
    for path, group in site.groups():
        label = (*path, "label")
        if site.damaged(label):
            continue
        if group.label in RESERVED_LABELS:
            meaning = "every node" if group.label == CLUSTER_LABEL else "every node without its hardware"
            site.report(
                "reserved-label",
                f"the label `{group.label}` is reserved: it always means {meaning}",
                label,
                help="choose another label for the group",
            )
        elif group.label in first:
            site.report(
                "duplicate-label",
                f"two node groups have the label `{group.label}`",
                label,
                help="choose another label for one of them, or merge the groups",
                related=[(site.place(first[group.label]), "first given at")],
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
    """Return whether the groups have the nodes 1 to `num_nodes`, which are 0 to `num_nodes` - 1."""
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
    claims: list[Claim[tuple[str | None, int], Path]] = []
    for path, group in site.groups():
        declared = (*path, "accelerators")
        if group.accelerators is None or site.damaged(declared) or site.damaged((*path, "node_ranks")):
            continue
        value = (group.accelerators.model, group.accelerators.per_node)
        claims += [Claim(piece, value, declared) for piece in group_ranges(site, group.node_ranks)]
    for later, earlier in contradictions(claims):
        site.report(
            "accelerators-conflict",
            f"node {common(later.nodes, earlier.nodes).start} has {_accelerator_text(later.value)} here and"
            f" {_accelerator_text(earlier.value)} in another group",
            later.place,
            help="groups that share a node must declare the same accelerators for it",
            related=[(site.key(earlier.place), "declared differently at")],
        )


def _accelerator_text(value: tuple[str | None, int]) -> str:
    model, count = value
    return f"{count} x {model}" if model else f"{count} accelerator{'' if count == 1 else 's'}"


def group_ranges(site: Site, ranks: NodeRanks) -> tuple[range, ...]:
    """Return the node ranges of a group, ascending and joined; `all` is every node."""
    if ranks.ranges is None:
        return (range(site.num_nodes or MAX_NODES),)
    return merge_ranges(ranks.ranges)


def _check_environments(site: Site) -> None:
    for path, group in site.groups():
        _group(site, path, group)
        for index, config in enumerate(group.env_configs):
            _twice(site, (*path, "env_configs", index), config)


def _group(site: Site, path: Path, group: NodeGroup) -> None:
    sound_group = not site.damaged((*path, "node_ranks"))
    nodes = group_ranges(site, group.node_ranks)
    pieces: list[Claim[int, tuple[Path, NodeRanks, int]]] = []
    for index, config in enumerate(group.env_configs):
        at: Path = (*path, "env_configs", index)
        ranks_at = (*at, "node_ranks")
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


def variable_paths(site: Site, at: Path) -> list[Path]:
    """Return the paths of the values of `env_vars` of the entry at `at`, in the order of the model's pairs."""
    path = (*at, "env_vars")
    node = find(site.view.tree, path)
    if isinstance(node, MappingNode):
        return [(*path, entry.key.raw) for entry in node.entries]
    if isinstance(node, SequenceNode):
        return [
            (*path, index, entry.key.raw)
            for index, item in enumerate(node.items)
            if isinstance(item, MappingNode)
            for entry in item.entries
        ]
    return []


def _twice(site: Site, at: Path, config: EnvConfig) -> None:
    first: dict[str, Path] = {}
    for (name, _), path in zip(config.env_vars, variable_paths(site, at), strict=False):
        if first.setdefault(name, path) != path:
            site.report(
                "duplicate-env-var",
                f"`{name}` is set twice for the same nodes",
                path,
                span=site.key(path),
                help="keep one of them",
                related=[(site.key(first[name]), "first set at")],
            )
