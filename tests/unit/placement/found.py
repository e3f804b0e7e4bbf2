"""Findings about the placement of a file, as `rlinf validate` has them: the rules' and the linter's."""

from __future__ import annotations

from rlinf_cli.codes import CLOSE, OPEN
from rlinf_cli.job.placement_rules import lint
from rlinf_core.config.composing.compose import with_bases
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.model import ConfigModel
from rlinf_core.config.reading import decode
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.tree import Composed
from rlinf_core.config.validating.validation import validate
from rlinf_core.job.load import Job
from rlinf_core.job.report import check_placement
from rlinf_core.topology import ClusterTopology, NodeInfo


class File(ConfigModel):
    """A file that is only about machines."""

    cluster: ClusterConfig


def findings(text: str, assume: tuple[str, ...] = (), accelerators: int | None = None) -> list[Diagnostic]:
    """Return what is found about the placement of a file; markers are taken out first.

    With `accelerators` every node was asked, and turned out to have so many.
    """
    result, ours = Diagnostics(), Diagnostics()
    source = decode("file.yaml", text.replace(OPEN, "").replace(CLOSE, "").encode(), result)
    assert source is not None
    composed = with_bases(source, ours)
    assert composed is not None
    tree, _ = composed
    validated = validate(File, Composed(tree), result, stand_ins={("cluster", "num_nodes"): 1})
    assert validated.model is not None, list(result)
    cluster = validated.model.cluster
    topology = ClusterTopology.from_config(cluster, assume)
    if accelerators is not None:
        nodes = [NodeInfo(rank, accelerators) for rank in range(cluster.num_nodes)]
        topology = ClusterTopology.from_nodes(nodes, cluster)
    resolutions = check_placement(validated, cluster, topology, ours)
    ours.extend(lint(Job("file.yaml", ours, tree, cluster=cluster, topology=topology, resolutions=resolutions)))
    return list(ours)


def one(text: str, code: str, assume: tuple[str, ...] = ()) -> Diagnostic:
    """Return the only finding, which has this code and underlines the marked text."""
    diagnostics = findings(text, assume)
    assert [diagnostic.code for diagnostic in diagnostics] == [code], diagnostics
    start = text.index(OPEN)
    assert (diagnostics[0].span.start, diagnostics[0].span.end) == (start, text.index(CLOSE) - 1)
    return diagnostics[0]


EIGHT_NODES = """
cluster:
  num_nodes: 8
  component_placement:
    actor:
      node_group: a800
      placement: {map}
  node_groups:
    - label: a800
      node_ranks: 0-7
      accelerators: {{model: A800, per_node: 8}}
"""
