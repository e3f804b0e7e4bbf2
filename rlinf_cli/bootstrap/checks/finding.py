"""The input of a check, and its findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rlinf_cli.bootstrap.inventory import NodeTarget
from rlinf_core.config.ranks import format_ranks

MIB: Final = 1 << 20
GIB: Final = 1 << 30


class CheckVerdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """It works, and will cost time or surprise somebody."""
    FAULT = "fault"
    """A job would not start, or not run as the file says."""
    UNREACHABLE = "unreachable"
    """The node could not be asked."""
    SKIPPED = "not checked"


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        check: what was looked at, as in `clock`.
        verdict: how it ended.
        what: what was seen.
        rank: the node, or None for what concerns the whole cluster or two nodes.
        where: the place in words.
        help: what to do; empty where there is nothing to do.
        data: figures, for programs.
    """

    check: str
    verdict: CheckVerdict
    what: str
    rank: int | None = None
    where: str = "cluster"
    help: str = ""
    data: Mapping[str, Any] = {}


class Seen(NamedTuple):
    """A node that answered.

    Attributes:
        node: which.
        facts: what it says; see `node_inspect`.
        asked, heard: when it was asked and its answer had come, by this machine's clock.
    """

    node: NodeTarget
    facts: Mapping[str, Any]
    asked: float
    heard: float

    def finding(
        self, check: str, verdict: CheckVerdict, what: str, help: str = "", data: Mapping[str, Any] | None = None
    ) -> Finding:
        """Return a finding about this node."""
        return Finding(check, verdict, what, self.node.rank, self.node.name, help, data or {})

    def ok(self, check: str, what: str, data: Mapping[str, Any] | None = None) -> Finding:
        return self.finding(check, CheckVerdict.OK, what, data=data)


class Merged(NamedTuple):
    """The same finding on several nodes."""

    finding: Finding
    ranks: tuple[int, ...]

    @property
    def where(self) -> str:
        """`node 3 (trainer3)`, `nodes 0-7`, `cluster`."""
        if len(self.ranks) < 2:
            return self.finding.where
        return f"nodes {format_ranks(self.ranks)}"


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once: several interpreters of a node may say the same."""
    return list({each[:6]: each for each in findings}.values())


def merged(findings: Sequence[Finding]) -> list[Merged]:
    """Return the findings, those that several nodes share as one; the order of the checks stays."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for each in findings:
        place = "" if each.rank is not None else each.where
        groups.setdefault((each.check, each.verdict, each.what, each.help, place), []).append(each)
    return [
        Merged(group[0], tuple(sorted(each.rank for each in group if each.rank is not None)))
        for group in groups.values()
    ]


def size(count: float) -> str:
    """Return `512 MiB`, `3.2 GiB`."""
    return f"{count / MIB:.0f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"
