"""The output of findings: text blocks, JSON records, GitHub annotations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.exit_codes import ExitCode
from rlinf_core.config.diagnostics import Diagnostic, Severity, render_text, visible
from rlinf_core.config.secrets import mask_message, mask_text
from rlinf_core.config.tree import format_path
from rlinf_core.suggest import clipped

if TYPE_CHECKING:
    from rlinf_core.config.diagnostics import Diagnostics

VALIDATE_SCHEMA: Final = "rlinf.validate/1"


def finding_blocks(diagnostics: Sequence[Diagnostic], stream: TextIO) -> Iterator[str]:
    """Yield a text block for each finding, in the color and width of `stream`."""
    # A caret may be one column past the last character.
    color, width = console.colored(stream), console.width(stream) - 1
    for diagnostic in diagnostics:
        yield render_text(diagnostic, color=color, width=width)


def without_effect(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return the findings about keys without effect."""
    from rlinf_cli.job.no_effect import NO_EFFECT

    return [diagnostic for diagnostic in diagnostics if diagnostic.code == NO_EFFECT]


def to_record(diagnostic: Diagnostic) -> dict[str, Any]:
    """Return one finding as a record of `validate --json`.

    Lines and columns count from 1; the end is exclusive.
    """
    span = diagnostic.span
    begin, finish = span.begin, span.finish
    return {
        "code": diagnostic.code,
        "severity": str(diagnostic.severity),
        "message": mask_message(diagnostic.message),
        "file": span.source.name,
        "line": begin.line,
        "column": begin.column,
        "end_line": finish.line,
        "end_column": finish.column,
        "path": clipped(mask_text(format_path(diagnostic.path))),
        "help": diagnostic.help and mask_message(diagnostic.help),
        "related": [
            {"file": place.source.name, "line": place.begin.line, "column": place.begin.column, "message": words}
            for place, words in diagnostic.related
        ],
    }


def to_json(diagnostics: Iterable[Diagnostic]) -> dict[str, Any]:
    """Return the findings of one or more files in the format `rlinf.validate/1`, ready for `json.dumps`."""
    findings = list(diagnostics)
    errors = sum(d.findings for d in findings if d.severity is Severity.ERROR)
    return {
        "schema": VALIDATE_SCHEMA,
        "ok": errors == 0,
        "errors": errors,
        "warnings": sum(d.findings for d in findings if d.severity is Severity.WARNING),
        "diagnostics": [to_record(d) for d in findings],
    }


_GITHUB_COMMANDS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def to_github(diagnostic: Diagnostic) -> str:
    """Return a finding as a workflow command, which GitHub shows at the line of a pull request.

    A finding on standard input or in an argument has no file, so only its text names the location.
    """
    span = diagnostic.span
    begin, finish = span.begin, span.finish
    properties = {"title": f"rlinf ({diagnostic.code})"}
    if span.source.kind == "file":
        properties |= {"file": span.source.name, "line": str(begin.line), "col": str(begin.column)}
        properties |= {"endLine": str(finish.line), "endColumn": str(finish.column)}
    text = f"{span.source.name}:{begin}: {mask_message(diagnostic.message)}"
    if diagnostic.help:
        text += f"\n{mask_message(diagnostic.help)}"
    for place, words in diagnostic.related:
        text += f"\n{words}: {place}"
    listed = ",".join(f"{name}={_github_property(value)}" for name, value in properties.items())
    return f"::{_GITHUB_COMMANDS[diagnostic.severity]} {listed}::{_github_data(text)}"


def _github_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_data(text).replace(":", "%3A").replace(",", "%2C")


def validated(reports: Sequence[tuple[str, Diagnostics]], *, github: bool) -> Result:
    """Return the result of `rlinf validate`: all findings, and a verdict on each file."""
    findings = [diagnostic for _, diagnostics in reports for diagnostic in diagnostics]
    code = ExitCode.OK if all(diagnostics.ok for _, diagnostics in reports) else ExitCode.INVALID
    verdicts = [f"{_shown(file)}: {_summary(diagnostics)}" for file, diagnostics in reports]
    if github:
        # Every line on standard output is an annotation.
        return Result("\n".join(map(to_github, findings)), code=code, notes=("\n".join(verdicts),))

    def text() -> str:
        shown = "\n\n".join(finding_blocks(findings, sys.stdout))
        return "\n\n".join(part for part in (shown, "" if console.verbosity.quiet else "\n".join(verdicts)) if part)

    return Result(text, lambda: to_json(findings) | {"files": [file for file, _ in reports]}, code)


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file if file.isprintable() else visible(file)


def _summary(diagnostics: Diagnostics) -> str:
    """Return a verdict, as in `2 errors, 1 warning` or `valid, with 1 warning, 2 notes`."""
    counts = [(severity, diagnostics.count(severity)) for severity in Severity]
    listed = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts if count)
    if not diagnostics.ok:
        return listed
    return f"valid, with {listed}" if listed else "valid"
