"""The findings of `doctor`: one line each, in a table or as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, Merged, merged
from rlinf_cli.cluster.doctor import DoctorReport
from rlinf_cli.cluster.links import figures
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode

SCHEMA = "rlinf.doctor/1"
# More good links than this are summarised in one line.
_MOST_LINKS = 8


def doctor_result(report: DoctorReport) -> Result:
    """Return what `rlinf doctor` answers."""
    code = ExitCode.OK if report.ok else ExitCode.FAILED
    return Result(
        lambda: doctor_text(report, every_node=console.verbosity.verbose),
        lambda: doctor_record(report),
        code if report.reached else ExitCode.UNREACHABLE,
    )


def doctor_text(report: DoctorReport, *, every_node: bool = False) -> str:
    """Return the table and a summary.

    Args:
        report: what was found.
        every_node: whether nodes with equal findings have a line each.
    """
    if every_node:
        lines = [Merged(finding, () if finding.rank is None else (finding.rank,)) for finding in report.findings]
    else:
        lines = merged(_short(report.findings))
    rows = [
        (str(line.finding.verdict), line.finding.check, line.where, line.finding.what, line.finding.help)
        for line in lines
    ]
    headers = ("verdict", "check", "where", "what", "do")
    if not any(help for *_, help in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    shown = console.table(headers, rows, keep=(0, 1))
    return f"{shown}\n\n{_summary(report)}"


def _short(findings: Sequence[Finding]) -> list[Finding]:
    fine = [finding for finding in findings if finding.check == "link" and finding.verdict is CheckVerdict.OK]
    if len(fine) <= _MOST_LINKS:
        return list(findings)
    ranges = figures(
        [finding.data["latency_seconds"] for finding in fine], [finding.data["bytes_per_second"] for finding in fine]
    )
    line = Finding("link", CheckVerdict.OK, f"{len(fine)} links: {ranges}", data={"links": len(fine)})
    first = fine[0]
    return [line if finding is first else finding for finding in findings if finding is first or finding not in fine]


def _summary(report: DoctorReport) -> str:
    nodes = f"{report.num_reached} of {report.num_nodes} node{'' if report.num_nodes == 1 else 's'} asked"
    counted = [
        (report.count(CheckVerdict.FAULT), "fault", "faults"),
        (report.count(CheckVerdict.UNREACHABLE), "node not reached", "nodes not reached"),
        (report.count(CheckVerdict.WARNING), "warning", "warnings"),
        (report.count(CheckVerdict.SKIPPED), "not checked", "not checked"),
    ]
    listed = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counted if count)
    return f"{nodes}: {listed or 'all checks passed'}, {report.seconds:.1f} s"


def doctor_record(report: DoctorReport) -> dict[str, Any]:
    """Return the report as data."""
    return {
        "schema": SCHEMA,
        "ok": report.ok,
        "nodes": report.num_nodes,
        "reached": report.num_reached,
        "seconds": round(report.seconds, 3),
        "findings": [finding_record(finding) for finding in report.findings],
    }


def finding_record(finding: Finding) -> dict[str, Any]:
    """Return a finding as data."""
    return {
        "check": finding.check,
        "verdict": str(finding.verdict),
        "where": finding.where,
        "rank": finding.rank,
        "what": finding.what,
        "help": finding.help or None,
        "data": dict(finding.data),
    }
