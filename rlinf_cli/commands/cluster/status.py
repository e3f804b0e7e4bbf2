"""`rlinf status`: which nodes of the cluster are there, and which jobs run."""

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
    """Show which nodes of the cluster are up, their versions, and the jobs that run.

    Without FILE and --name it is the one cluster that is up. Each node is asked over ssh; where RLINF_ADDRESS names a
    Ray that was started by other means, that Ray is. The exit status is 3 while a node is missing.
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


app = command(status)
