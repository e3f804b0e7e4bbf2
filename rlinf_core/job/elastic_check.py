"""The rules for components that go on with fewer processes while nodes are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.machines.spares import has_robots
from rlinf_core.config.ranks import format_ranks
from rlinf_core.placement.elastic import nodes_of_components
from rlinf_core.suggest import quoted

if TYPE_CHECKING:
    from rlinf_core.job.recipe import Recipe
    from rlinf_core.job.report import Report


def check_elastic(recipe: Recipe, config: Any, report: Report) -> None:
    """Report components that are marked `elastic` and cannot do without any of their nodes."""
    cluster: ClusterConfig = config.cluster
    marked = [name for name, entry in cluster.component_placement.items() if entry.elastic]
    if not marked:
        return
    used = nodes_of_components(cluster)
    for name in marked:
        reason, remedy = _reason(recipe, cluster, name, used[name])
        if reason:
            report(
                ("cluster", "component_placement", name),
                "component-not-elastic",
                f"component `{name}` cannot go on with fewer processes: {reason}",
                remedy,
            )


def _reason(recipe: Recipe, cluster: ClusterConfig, name: str, nodes: frozenset[int]) -> tuple[str, str]:
    if name not in recipe.elastic:
        able = [other for other in recipe.elastic if other in cluster.component_placement]
        which = f"only {quoted(able)} can" if able else f"no component of recipe `{recipe.name}` can"
        return f"in recipe `{recipe.name}` {which}", f"remove `elastic` from `{name}`; {_SPARES}"
    if any(has_robots(cluster, rank) for rank in nodes):
        return "each robot is driven by its own", "remove `elastic` from it"
    if len(nodes - {0}) == 0:
        return "all of them are on node 0, the head, with which the whole cluster ends", "remove `elastic` from it"
    if len(nodes) == 1:
        return f"all of them are on node {format_ranks(nodes)}", f"place it on several nodes; {_SPARES}"
    return "", ""


_SPARES = "`cluster.spare_nodes` keeps nodes for the place of a lost one"
