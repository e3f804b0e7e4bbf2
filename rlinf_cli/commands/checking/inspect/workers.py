"""`rlinf inspect workers`: what each process of the running job does, and whom it waits for."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console


def workers(
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME", help="By default the youngest.", show_default=False)
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show the Python stack of each thread, too.", show_default=False)
    ] = False,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what each process of the running job does, since when, and whom it waits for.

    Run it on the machine of the job's driver, or on any node of its cluster. A process that does not answer may hold
    Python's lock in native code.
    """
    from rlinf_cli.bootstrap.inspection import find_job, inspect_job
    from rlinf_cli.render.worker_table import workers_record, workers_text

    snapshot = inspect_job(find_job(job), stacks=stacks)
    if output is Output.JSON:
        console.result_json(workers_record(snapshot))
    else:
        console.result(workers_text(snapshot))
