"""`rlinf status`: nodes and jobs of a cluster."""

from __future__ import annotations

import typer

from rlinf_cli.arguments.cluster_options import FileIfAny, Parallel, RecordedName
from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.lazy import command


def status(
    file: FileIfAny = None,
    name: RecordedName = None,
    parallel: Parallel = 128,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the nodes of the cluster with their versions, and the running jobs.

    By default the only running cluster. Each node is probed over ssh; a Ray started by other means is queried at
    RLINF_ADDRESS. The exit status is 3 while a node is missing.
    """
    from rlinf_cli.bootstrap import cluster_identity
    from rlinf_cli.machines.probing import ask_status
    from rlinf_cli.render.cluster_status import status_record, status_text

    if file is not None:
        name = cluster_identity.cluster_name(file, name)
    report = ask_status(name, parallel=parallel)
    if output is Output.JSON:
        console.result_json(status_record(report))
    else:
        console.result(status_text(report))
    if not report.all_up:
        raise typer.Exit(ExitCode.UNREACHABLE)


app = command(status, examples=("rlinf status", "rlinf status cluster.yaml"))
