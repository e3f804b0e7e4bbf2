"""Assumed accelerators of nodes that are not probed: `--assume a800=8`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlinf_core.config.machines.cluster import MAX_ACCELERATORS_PER_NODE, ClusterConfig, NodeGroup
from rlinf_core.errors import ConfigError
from rlinf_core.suggest import did_you_mean, quoted

_ASSUMPTION = re.compile(r"(?:(?P<label>[^:,\s]+)=)?(?P<count>[0-9]+)(?:x(?P<model>\S.*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Assumption:
    """`--assume a800=8xA800`: assumed accelerators of a group's nodes (None: every node)."""

    label: str | None
    count: int
    model: str | None = None


def parse_assumption(text: str) -> Assumption:
    """Read `8`, `a800=8` or `a800=8xA800`.

    Raises:
        ConfigError: `text` has none of these forms, or exceeds the maximum per node.
    """
    match = _ASSUMPTION.fullmatch(text.strip())
    if match is None:
        help = "write `8` (on every node), `a800=8` (on the nodes of group `a800`) or `a800=8xA800` (with the model)"
        raise ConfigError(f"`{text}` does not give a number of accelerators per node", where="--assume", help=help)
    digits = match["count"].lstrip("0") or "0"
    if len(digits) > len(str(MAX_ACCELERATORS_PER_NODE)) or int(digits) > MAX_ACCELERATORS_PER_NODE:
        raise ConfigError(f"a node has at most {MAX_ACCELERATORS_PER_NODE} accelerators", where="--assume")
    label = None if match["label"] == "cluster" else match["label"]
    return Assumption(label, int(digits), match["model"])


def assumed(text: str, cluster: ClusterConfig) -> Assumption:
    """Read an assumption about a cluster; see `parse_assumption`.

    Raises:
        ConfigError: the assumption is invalid or names no group of the cluster.
    """
    assumption, labels = parse_assumption(text), [group.label for group in cluster.node_groups]
    if assumption.label is not None and assumption.label not in labels:
        known = f"the groups are {quoted(labels)}" if labels else "the file has no node groups: write only the number"
        help = did_you_mean(assumption.label, labels) or known
        raise ConfigError(f"node group `{assumption.label}` does not exist", where="--assume", help=help)
    return assumption


def accelerator_claims(
    cluster: ClusterConfig, assume: Sequence[str]
) -> Iterator[tuple[NodeGroup | None, int, str | None]]:
    """Yield the claims on the accelerators of nodes (None: all nodes), in order of precedence.

    An assumed number keeps the declared model of a group.

    Raises:
        ConfigError: an assumption is invalid or names no group of the cluster.
    """
    assumptions = [assumed(text, cluster) for text in assume][::-1]
    for assumption in assumptions:
        for group in cluster.node_groups:
            if group.label == assumption.label:
                declared = group.accelerators.model if group.accelerators else None
                yield group, assumption.count, assumption.model or declared
    for group in cluster.node_groups:
        if group.accelerators is not None:
            yield group, group.accelerators.per_node, group.accelerators.model
    for assumption in assumptions:
        if assumption.label is None:
            yield None, assumption.count, assumption.model
