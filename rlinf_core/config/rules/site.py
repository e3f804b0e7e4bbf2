"""The context of the rules: the cluster, its places in the file, and the findings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.machines.cluster import ClusterConfig, NodeGroup
from rlinf_core.config.ranks import NodeRanks, subtract
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Path, child, find, naming, part, place
from rlinf_core.config.validating.pruning import Validated

V = TypeVar("V", bound=Hashable)
P = TypeVar("P")

CLUSTER: Path = ("cluster",)


class Site(NamedTuple):
    """The validated `cluster` section. Paths are those of `view.tree`, which match the model's indexes."""

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

    def place(self, path: Path) -> Span:
        return place(self.view.tree, path)

    def key(self, path: Path) -> Span:
        return naming(self.view.tree, path)

    def piece(self, path: Path, ranks: NodeRanks, index: int) -> Span:
        """Return the span of range `index` of the `node_ranks` at `path`."""
        if index >= len(ranks.places):
            return self.place(path)
        written = ranks.places[index]
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

    `claims` are in file order. Every claim that contradicts one starting at a lower or equal node is reported, paired
    with one of these; not every pair is.
    """
    claims = list(claims)
    position = {id(claim): index for index, claim in enumerate(claims)}
    pairs: list[tuple[Claim[V, P], Claim[V, P]]] = []
    # Of the earlier claims only two matter: the one reaching farthest, and the one reaching farthest among those with
    # another value.
    farthest: Claim[V, P] | None = None
    other: Claim[V, P] | None = None
    for claim in sorted(claims, key=lambda claim: claim.nodes.start):
        rival = other if farthest is not None and farthest.value == claim.value else farthest
        if rival is not None and rival.nodes.stop > claim.nodes.start:
            pairs.append((claim, rival) if position[id(claim)] > position[id(rival)] else (rival, claim))
        if farthest is None or claim.nodes.stop > farthest.nodes.stop:
            if farthest is not None and farthest.value != claim.value:
                other = farthest
            farthest = claim
        elif claim.value != farthest.value and (other is None or claim.nodes.stop > other.nodes.stop):
            other = claim
    return pairs


def outside(piece: range, inside: Sequence[range]) -> range | None:
    """Return the first numbers of `piece` missing from `inside`, merged ranges; None if there are none."""
    return next(iter(subtract((piece,), inside)), None)
