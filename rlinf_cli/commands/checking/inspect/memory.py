"""`rlinf inspect memory`: forecast of a job's memory, against the measured peaks of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Assume, LogPath, Output, OutputOption, Overrides, Quiet, Verbose, assumed
from rlinf_cli.console import console
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from rlinf_cli.runs.memory_record import HasPlace


def memory(
    file: Annotated[str, typer.Argument(metavar="FILE|RUN", hidden=True, autocompletion=completion.files)],
    overrides: Overrides = None,
    available: Annotated[
        float | None,
        typer.Option(
            "--available",
            metavar="GIB",
            min=0.001,
            help="Memory of each node in GiB; by default as the file declares, else that of this machine.",
            show_default=False,
        ),
    ] = None,
    assume: Assume = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Forecast the memory of each process of a job by use, and check that it fits on the nodes.

    Nothing is started, and no weights are read. For a RUN, its processes are taken to be where they
    were, and their measured peaks are shown beside the forecast. The exit status is 1 if a node has too little memory;
    what reduces it is suggested.
    """
    from rlinf_cli.exit_codes import ExitCode
    from rlinf_cli.file.job_file import load, sound
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.render.memory_table import memory_text
    from rlinf_cli.report.documents import PLACEMENT, recorded_places
    from rlinf_cli.run.policy_source import find_run_folder
    from rlinf_cli.runs.memory_record import machine_memory, memory_record, node_memory, read_peaks
    from rlinf_core.errors import RLinfError

    run = find_run_folder(file, log_path)
    name = file if run is None else str(run.config_file)
    job = load(name, overrides, assume)
    parts = sound(job)
    forecast = None if job.recipe is None else job.recipe.load(job.recipe.memory)
    if forecast is None:
        what = "a file without a recipe" if job.recipe is None else f"recipe `{job.recipe.name}`"
        raise RLinfError(f"{what} has no memory forecast")
    placements: Mapping[str, Sequence[HasPlace]] = {}
    if run is not None and not overrides and not assume:
        placements = recorded_places(run.path / PLACEMENT)
    if not placements:
        placements = lay_out(parts, "memory", file, arguments=(*(overrides or ()), *assumed(assume))).placements
    forecasts = forecast(job.config, {component: len(processes) for component, processes in placements.items()})
    ranks = {process.cluster_node_rank for processes in placements.values() for process in processes}
    here = machine_memory()
    nodes = {rank: node_memory(parts.cluster, rank, available=available, here=here) for rank in ranks}
    record = memory_record(forecasts, placements, nodes, {} if run is None else read_peaks(run.memory_file))
    if output is Output.JSON:
        console.result_json(record)
    else:
        console.result(memory_text(record))
    if not record["fits"]:
        raise typer.Exit(ExitCode.FAILED)
