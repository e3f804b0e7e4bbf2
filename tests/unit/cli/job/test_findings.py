"""Findings as JSON and as GitHub annotations."""

from __future__ import annotations

import json

from rlinf_cli.job.findings import to_github, to_json
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.source import SourceText, Span
from tests.unit.config.found import LINES, finding


def test_json_counts_from_one_and_ends_after_the_last_character() -> None:
    diagnostic = finding(LINES, "0-64", help="help")
    report = to_json([diagnostic, finding(LINES, "8", severity=Severity.WARNING)])
    assert json.loads(json.dumps(report)) == report
    assert (report["schema"], report["ok"], report["errors"], report["warnings"]) == ("rlinf.validate/1", False, 1, 1)
    assert report["diagnostics"][0] == {
        "code": "placement-out-of-range",
        "severity": "error",
        "message": diagnostic.message,
        "file": "configs/hetero.yaml",
        "line": 9,
        "column": 18,
        "end_line": 9,
        "end_column": 22,
        "path": "cluster[0]",
        "help": "help",
        "related": [],
    }


def test_json_is_ok_with_warnings_only() -> None:
    assert to_json([finding(LINES, "8", severity=Severity.WARNING)])["ok"] is True
    assert to_json([])["diagnostics"] == []


def test_github_annotation_is_escaped() -> None:
    diagnostic = finding("a: 5\n", "5", name="a,b:c%.yaml", message="100%\nsure: yes", help="do")
    assert to_github(diagnostic) == (
        "::error title=rlinf (placement-out-of-range),file=a%2Cb%3Ac%25.yaml,line=1,col=4,endLine=1,endColumn=5"
        "::a,b:c%25.yaml:1:4: 100%25%0Asure: yes%0Ado"
    )


def test_github_annotation_without_a_file_names_none() -> None:
    span = Span(SourceText("<overrides>", "a=1", "overrides"), 0, 1)
    shown = to_github(Diagnostic("unknown-key", Severity.NOTE, "m", span))
    assert shown == "::notice title=rlinf (unknown-key)::<overrides>:1:1: m"
