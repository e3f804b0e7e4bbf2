"""The input and output types of the checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_core.config.ranks import format_ranks

MIB: Final = 1 << 20
GIB: Final = 1 << 30


class CheckVerdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """It works, but is slow or surprising."""
    FAULT = "fault"
    """A job would not start, or would not run as configured."""
    UNREACHABLE = "unreachable"
    """The node could not be probed."""
    SKIPPED = "not checked"


OK, WARNING, FAULT, SKIPPED = CheckVerdict.OK, CheckVerdict.WARNING, CheckVerdict.FAULT, CheckVerdict.SKIPPED


class Said(NamedTuple):
    """A rule's result for a node: the verdict, the observation, the remedy, and figures for programs."""

    verdict: CheckVerdict
    what: str
    help: str = ""
    data: Mapping[str, Any] = {}


class Finding(NamedTuple):
    """A finding, one line of the report.

    Attributes:
        check: the check, as in `clock`.
        rank: the node, or None for the whole cluster or a pair of nodes.
        help: the remedy; may be empty.
        data: figures, for programs.
    """

    check: str
    verdict: CheckVerdict
    what: str
    rank: int | None = None
    where: str = "cluster"
    help: str = ""
    data: Mapping[str, Any] = {}


class ProbedNode(NamedTuple):
    """A node that answered.

    Attributes:
        facts: its facts; see `node_probe.inspect`.
        asked, heard: the times of the request and the reply, by this machine's clock.
    """

    node: NodeTarget
    facts: Mapping[str, Any]
    asked: float
    heard: float

    def finding(self, check: str, said: Said) -> Finding:
        """Return a finding about this node."""
        return Finding(check, said.verdict, said.what, self.node.rank, self.node.name, said.help, said.data)


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings without duplicates, which several interpreters of a node may cause."""
    return list({finding[:6]: finding for finding in findings}.values())


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings shared by several nodes, as of `nodes 0-7`; the order of the checks is kept."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for item in findings:
        place = "" if item.rank is not None else item.where
        groups.setdefault((item.check, item.verdict, item.what, item.help, place), []).append(item)
    return [_of_all(group) for group in groups.values()]


def _of_all(group: Sequence[Finding]) -> Finding:
    ranks = sorted(item.rank for item in group if item.rank is not None)
    return group[0] if len(ranks) < 2 else group[0]._replace(where=f"nodes {format_ranks(ranks)}")


def size(count: float) -> str:
    """Return a number of bytes in words, as in `512 MiB` or `3.2 GiB`."""
    return f"{count / MIB:.0f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"
