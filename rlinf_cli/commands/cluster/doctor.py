"""`rlinf doctor`: preflight checks of a file's machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.cluster_options import NameOption, Parallel
from rlinf_cli.arguments.options import File, Output, OutputOption, Overrides, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from rlinf_cli.bootstrap.preflight import DoctorReport


def doctor(
    file: File,
    overrides: Overrides = None,
    name: NameOption = None,
    link_seconds: Annotated[
        float,
        typer.Option(
            "--link-seconds", metavar="SECONDS", help="Time limit for measuring links, in seconds; 0 skips it.", min=0
        ),
    ] = 60.0,
    parallel: Parallel = 128,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check the machines of a file before a job starts on them.

    Checks interpreters, Ray, clocks, ports, disks, accelerators, robots, cameras, and the links between nodes that the
    job will use. Nothing is started or changed. KEY=VALUE replaces a value of FILE, ~KEY deletes one.
    """
    from rlinf_cli.machines.probing import examine
    from rlinf_cli.render.doctor_findings import doctor_record, doctor_text

    report = examine(file, overrides, name, link_seconds=link_seconds, parallel=parallel)
    if output is Output.JSON:
        console.result_json(doctor_record(report))
    else:
        console.result(doctor_text(report, every_node=verbose))
    code = _code(report)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


app = command(doctor, examples=("rlinf doctor cluster.yaml",), no_args_is_help=True)


def _code(report: DoctorReport) -> ExitCode:
    if not report.reached:
        return ExitCode.UNREACHABLE
    return ExitCode.OK if report.ok else ExitCode.FAILED
