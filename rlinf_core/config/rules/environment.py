"""`env_configs`: the software environment of the nodes of a group."""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_core.config.machines.cluster import EnvConfig, NodeGroup
from rlinf_core.config.ranks import NodeRanks, common, format_range
from rlinf_core.config.rules.groups import bounds, group_ranges, order, ranges_of
from rlinf_core.config.rules.site import Claim, Site, contradictions, outside
from rlinf_core.config.tree import MappingNode, Path, SequenceNode, find


def check(site: Site) -> None:
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
