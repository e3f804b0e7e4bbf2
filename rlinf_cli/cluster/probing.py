"""The nodes of a file or of the recorded cluster, for commands that connect to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from rlinf_cli import console
from rlinf_core.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from rlinf_cli.cluster.inventory import NodeTarget
    from rlinf_core.config.machines.cluster import ClusterConfig
    from rlinf_core.job.load import Probe
    from rlinf_core.node.cluster_records import ClusterRecord
    from rlinf_core.topology import NodeInfo


def reachable(cluster: ClusterConfig) -> tuple[NodeTarget, ...]:
    """Return the machines of a cluster, by rank.

    Raises:
        ConfigError: the cluster has several nodes but no hosts.
    """
    from rlinf_cli.cluster.inventory import targets

    nodes = targets(cluster)
    if len(nodes) > 1 and nodes[0].host is None:
        raise ConfigError(
            f"the file has {len(nodes)} nodes and no hosts",
            why="there is no way to reach them",
            help="give `hosts` in its node groups, or `cluster.hosts`",
        )
    return nodes


def prober(file: str, assume: Sequence[str] | None = None, *, live: bool = True) -> Probe | None:
    """Return a function that probes the nodes of a file for their accelerators, or None without `live`.

    The function raises `ClusterError` if a node cannot be probed.

    Raises:
        typer.BadParameter: `live` and `assume` are both given.
    """
    if not live:
        return None
    if assume:
        raise typer.BadParameter("`--assume` and `--live` exclude each other: give one of them")

    def probe(cluster: ClusterConfig) -> Sequence[NodeInfo]:
        from rlinf_cli.cluster import doctor, identity
        from rlinf_cli.cluster.checks.devices import node_info
        from rlinf_cli.cluster.transports.transport import Transport, run

        nodes, cluster_id = reachable(cluster), identity.cluster_id(identity.cluster_name(file, None))
        probed, unanswered = run(doctor.look_at(nodes, cluster_id, Transport(), console.message))
        if unanswered:
            lines = [f"{finding.where}: {finding.what}" for finding in unanswered]
            missing = f"{len(lines)} of {len(nodes)} nodes could not be probed"
            raise ClusterError(missing, why="\n".join(lines), help=unanswered[0].help or None)
        return [node_info(machine) for machine in probed]

    return probe


def recorded_cluster(name: str | None) -> ClusterRecord:
    """Return the record of the cluster of this name, or without a name of the only one.

    Raises:
        ClusterError: there is no such cluster.
    """
    from rlinf_core import env_vars
    from rlinf_core.node import cluster_records

    record = cluster_records.recorded(name)
    if record is not None:
        return record
    recorded, name = cluster_records.names(), name or env_vars.CLUSTER.get()
    what = f"no cluster `{name}` is known on this machine" if name else "no cluster is known on this machine"
    others = f"known clusters: {', '.join(f'`{known_name}`' for known_name in recorded)}" if recorded else ""
    hint = f"bring one up with `rlinf up FILE`, or set `{env_vars.ADDRESS.name}` to one started by hand"
    raise ClusterError(what, why=others or None, help=hint)
