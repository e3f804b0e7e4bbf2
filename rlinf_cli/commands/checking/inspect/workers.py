"""`rlinf inspect workers`: the activity of each process of a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console


def workers(
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME", help="Job name; by default the newest.", show_default=False)
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also show the Python stack of each thread.", show_default=False)
    ] = False,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show each process of the running job: its activity, since when, and which peers it waits for.

    Run it on the machine of the job's driver, or on any node of its cluster. A process that does not answer may hold
    the GIL in native code.
    """
    from rlinf_cli.bootstrap.inspection import find_job, inspect_job
    from rlinf_cli.render.worker_table import workers_record, workers_text

    snapshot = inspect_job(find_job(job), stacks=stacks)
    if output is Output.JSON:
        console.result_json(workers_record(snapshot))
    else:
        console.result(workers_text(snapshot))
