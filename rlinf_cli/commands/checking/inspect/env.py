"""`rlinf inspect env`: the environment and interpreter of one process."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Assume, File, Live, Output, OutputOption, Overrides, Quiet, Verbose, assumed
from rlinf_cli.console import console


def env(
    file: File,
    component: Annotated[
        str, typer.Option("--component", "-c", help="Component.", autocompletion=completion.components, metavar="NAME")
    ],
    rank: Annotated[int, typer.Option("--rank", "-r", help="Rank of the process in its component.", min=0)],
    overrides: Overrides = None,
    assume: Assume = None,
    live: Live = False,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the environment and interpreter of one process.

    Each variable is shown with its source; a part in `<...>` is known only on the node or at launch. KEY=VALUE replaces
    a value of FILE, ~KEY deletes one.
    """
    from rlinf_cli.file.job_file import load_sound
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.placement.process_env import env_record, env_text
    from rlinf_core.errors import PlacementError

    job = load_sound(file, overrides, assume, live=live)
    arguments = (*(overrides or ()), "--component", component, "--rank", str(rank), *assumed(assume))
    placements = lay_out(job, "env", file, component, arguments).placements[component]
    if rank >= len(placements):
        last = len(placements) - 1
        raise PlacementError(f"component `{component}` has no rank {rank}", help=f"its ranks are 0 to {last}")
    if output is Output.JSON:
        console.result_json(env_record(job, component, placements[rank]))
    else:
        console.result(env_text(job, component, placements[rank]))
