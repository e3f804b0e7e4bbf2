"""`rlinf validate`: report all errors of one or more files, without connecting to a machine."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Assume, Live, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.file.job_file import split_files
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from rlinf_core.config.diagnostics import Diagnostic, Diagnostics


class ReportForm(StrEnum):
    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def validate(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE|KEY=VALUE", hidden=True, autocompletion=completion.files_and_overrides),
    ],
    output: Annotated[
        ReportForm, typer.Option("--output", "-o", help="Format of the findings.", metavar="text|json|github")
    ] = ReportForm.TEXT,
    assume: Assume = None,
    live: Live = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Report every error in a file; with --live, also check it against its nodes.

    FILE is a path, the name of a shipped config such as `hetero18`, or `-` for standard input; several are checked one
    after another. `recipe=NAME` alone checks the recipe's own config. KEY=VALUE replaces a value, as in `actor.seed=7`,
    and ~KEY deletes one.
    """
    from rlinf_cli.file.job_file import load

    files, overrides = split_files(arguments)
    if not files:
        raise typer.BadParameter("name a file to check, or `-` for standard input")
    if files.count("-") > 1:
        raise typer.BadParameter("standard input can be read only once")
    reports = [(file, load(file, overrides, assume, live=live).diagnostics) for file in files]
    _print(reports, output)
    if any(not diagnostics.ok for _, diagnostics in reports):
        raise typer.Exit(ExitCode.INVALID)


app = command(
    validate,
    examples=(
        "rlinf validate job.yaml",
        "rlinf validate hetero18 actor.seed=7",
        "rlinf validate *.yaml --output github",
    ),
    no_args_is_help=True,
)


def _print(reports: list[tuple[str, Diagnostics]], form: ReportForm) -> None:
    findings: list[Diagnostic] = [diagnostic for _, diagnostics in reports for diagnostic in diagnostics]
    if form is ReportForm.JSON:
        from rlinf_cli.file.findings import to_json

        console.result_json(to_json(findings) | {"files": [file for file, _ in reports]})
        return
    if findings and form is ReportForm.GITHUB:
        from rlinf_cli.file.findings import to_github

        console.results(to_github(diagnostic) for diagnostic in findings)
    elif findings:
        from rlinf_cli.file.findings import finding_blocks

        console.results(finding_blocks(findings, sys.stdout), gap=True)
    verdicts = [f"{_shown(file)}: {_summary(diagnostics)}" for file, diagnostics in reports]
    if form is ReportForm.GITHUB:
        # Every line on standard output is an annotation.
        console.message("\n".join(verdicts))
    elif not console.verbosity.quiet:
        console.results(["", *verdicts] if findings else verdicts)


def _shown(file: str) -> str:
    if file == "-":
        return "standard input"
    if file.isprintable():
        return file
    from rlinf_core.config.render import visible

    return visible(file)


def _summary(diagnostics: Diagnostics) -> str:
    """Return `no mistakes`, `2 errors, 1 warning`, `valid, with 1 warning, 2 notes`."""
    from rlinf_core.config.diagnostics import Severity

    counts = [(severity, diagnostics.count(severity)) for severity in Severity]
    listed = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts if count)
    if not diagnostics.ok:
        return listed
    return f"valid, with {listed}" if listed else "valid"
