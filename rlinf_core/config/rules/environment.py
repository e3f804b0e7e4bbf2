"""`env_configs`: the software environment of the nodes of a group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rlinf_core.config.cluster import EnvConfig, NodeGroup
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.ranks import NodeRanks, common, format_range
from rlinf_core.config.rules.groups import bounds, group_ranges, order, ranges_of
from rlinf_core.config.rules.site import CLUSTER, Claim, Site, contradictions, outside
from rlinf_core.config.secrets import is_secret
from rlinf_core.config.tree import MappingNode, Path, ScalarNode, SequenceNode, find
from rlinf_core.hardware.accelerators.registry import accelerator_names, get_accelerator

# What rlinf gives every process a value of its own for; one value for a whole node would break them.
PROCESS_VARIABLES: Final = frozenset(
    ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
) | {"NODE_RANK", "NODE_LOCAL_RANK", "RLINF_NODE_RANK"}
_SHELL: Final = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*|^~/|:~/")


def check(site: Site) -> None:
    taken = PROCESS_VARIABLES | _visibility_variables()
    for path, group in site.groups():
        _group(site, path, group)
        for index, config in enumerate(group.env_configs):
            _contents(site, (*path, "env_configs", index), config, taken)
    _forwarded(site, taken)


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
            many = len(strangers) > 1
            site.report(
                "env-config-outside-group",
                f"node{'s' if many else ''} {format_range(strangers)} {'are' if many else 'is'} not in group `{label}`",
                path,
                span=site.piece(path, ranks, index),
                help=f"the group's node_ranks are {','.join(map(format_range, nodes))}",
                related=[(site.place((*path[:-3], "node_ranks")), "they are given at")],
            )


def _overlaps(site: Site, label: str, pieces: Iterable[Claim[int, tuple[Path, NodeRanks, int]]]) -> None:
    for later, earlier in contradictions(pieces):
        shared = common(later.nodes, earlier.nodes)
        path, ranks, index = later.place
        many = len(shared) > 1
        site.report(
            "env-config-overlap",
            f"node{'s' if many else ''} {format_range(shared)} {'have' if many else 'has'} two `env_configs` in"
            f" group `{label}`",
            path,
            span=site.piece(path, ranks, index),
            help="let each node stand in one entry of a group's `env_configs`",
            related=[(site.piece(*earlier.place), "the other one begins at")],
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


def _contents(site: Site, at: Path, config: EnvConfig, taken: frozenset[str]) -> None:
    if not config.env_vars and config.python_interpreter_path is None and not site.damaged(at):
        site.report(
            "env-config-empty",
            "this entry of `env_configs` sets nothing",
            at,
            help="give it `env_vars` or `python_interpreter_path`, or remove it",
            severity=Severity.WARNING,
        )
    first: dict[str, Path] = {}
    for (name, value), path in zip(config.env_vars, variable_paths(site, at), strict=False):
        if name in first:
            site.report(
                "duplicate-env-var",
                f"`{name}` is set twice for the same nodes",
                path,
                span=site.key(path),
                help="keep one of them",
                related=[(site.key(first[name]), "first set at")],
            )
        else:
            first[name] = path
        _variable(site, path, name, value, taken)


def _variable(site: Site, path: Path, name: str, value: str, taken: frozenset[str]) -> None:
    if name in taken:
        site.report(
            "env-var-of-process",
            f"rlinf gives every process its own `{name}`; this would give all processes of these nodes the same",
            path,
            span=site.key(path),
            help="remove it; `component_placement` decides who has which rank and sees which device",
            severity=Severity.WARNING,
        )
    written = _SHELL.search(value)
    if written:
        site.report(
            "env-var-not-expanded",
            f"no shell reads `{name}`: `{written[0].lstrip(':')}` stays as it is",
            path,
            help="write the whole value; PATH and its like are put before the node's own anyway",
            severity=Severity.WARNING,
        )
    node = find(site.view.tree, path)
    if is_secret(name) and value and isinstance(node, ScalarNode) and "${" not in node.span.text:
        site.report(
            "secret-in-file",
            f"the value of `{name}` stands in the file for everyone to read",
            path,
            span=site.key(path),
            help=f"write `${{env:{name}}}`, or name it in `cluster.forward_env`",
            severity=Severity.WARNING,
        )


def _visibility_variables() -> frozenset[str]:
    found = (get_accelerator(name).visibility_variable for name in accelerator_names())
    return frozenset(name for name in found if name)


def _forwarded(site: Site, taken: frozenset[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(site.cluster.forward_env):
        path = (*CLUSTER, "forward_env", index)
        if name in taken:
            site.report(
                "env-var-of-process",
                f"rlinf gives every process its own `{name}`; this machine's value would be wrong everywhere else",
                path,
                help="remove it",
                severity=Severity.WARNING,
            )
        elif name in seen:
            site.report(
                "duplicate-env-var",
                f"`{name}` is named twice",
                path,
                help="keep one of them",
            )
        seen.add(name)
