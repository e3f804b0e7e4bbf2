"""Rules for spare nodes: some node is left for the job, and each spare can replace one."""

from __future__ import annotations

from rlinf_core.config.machines.spares import groups_of, has_robots, replaceable
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.rules.site import CLUSTER, Site
from rlinf_core.config.tree import Path
from rlinf_core.suggest import quoted

_PATH: Path = (*CLUSTER, "spare_nodes")


def check(site: Site) -> None:
    cluster, count = site.cluster, site.num_nodes
    if not cluster.spare_nodes or count is None or site.damaged(_PATH):
        return
    if cluster.spare_nodes >= count:
        site.report(
            "spare-nodes-count",
            f"{cluster.spare_nodes} of {count} nodes are spares: none is left for the job",
            _PATH,
            help=f"`num_nodes` includes the spares: did you mean `num_nodes: {count + cluster.spare_nodes}`?",
            related=[(site.place((*CLUSTER, "num_nodes")), "`num_nodes` is set at")],
        )
        return
    if any(site.damaged(path) or site.damaged((*path, "node_ranks")) for path, _ in site.groups()):
        return
    useless = [rank for rank in cluster.spare_ranks if not replaceable(cluster, rank)]
    if useless:
        several = len(useless) > 1
        site.report(
            "spare-cannot-serve",
            f"node{'s' * several} {format_ranks(useless)} {'are spares' if several else 'is a spare'}, and can replace"
            f" no node: {_reason(site, useless[0])}",
            _PATH,
            help=_help(site, useless),
        )


def _reason(site: Site, spare: int) -> str:
    cluster, labels = site.cluster, groups_of(site.cluster, spare)
    if has_robots(cluster, spare):
        return "a robot is on it"
    alike = [rank for rank in range(cluster.num_active_nodes) if groups_of(cluster, rank) == labels]
    where = f"in {quoted(sorted(labels))}" if labels else "without a group"
    if not alike:
        return f"no other node is {where}"
    if alike == [0]:
        return f"the only other node {where} is 0, the head, with which the whole cluster ends"
    return f"the other nodes {where} have robots"


def _help(site: Site, useless: list[int]) -> str:
    cluster = site.cluster
    last = cluster.num_nodes - 1
    spares = f"{cluster.spare_ranks[0]}-{last}" if len(cluster.spare_ranks) > 1 else str(last)
    taken = f"the spares are the last ranks, {spares}"
    able = [rank for rank in range(1, cluster.num_active_nodes) if not has_robots(cluster, rank)]
    labels = groups_of(cluster, able[0]) if able else frozenset[str]()
    if labels:
        return f"{taken}; list it in `node_ranks` of {quoted(sorted(labels))}, and there only, as node {able[0]} is"
    if able:
        return f"{taken}; leave it out of all groups, as node {able[0]} is"
    return f"{taken}, and only a node other than 0 and without robots can be replaced: remove `spare_nodes`"
