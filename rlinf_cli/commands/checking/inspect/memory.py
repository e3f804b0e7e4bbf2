"""`rlinf inspect memory`: forecast of a job's memory, against the measured peaks of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Assume, LogPath, Output, OutputOption, Overrides, Quiet, Verbose, assumed
from rlinf_cli.console import console
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlinf_cli.memory.memory_sums import NodeMemory
    from rlinf_core.job.load import Job
    from rlinf_core.job.process_forecast import ProcessForecast
    from rlinf_core.placement.placement import Placement


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
    """Forecast the memory of each process of a job by phase and use, and check that it fits on the nodes.

    Only one empty process of each kind is started, to measure its memory. For a RUN, its measured peaks are shown
    beside the forecast, which is saved for its report. The exit status is 1 if a node has too little memory; a change
    that fits is suggested.

    rlinf inspect memory laptop actor.model.hidden_dim=4096
    rlinf inspect memory runs/embodied-20260314-101502
    """
    from rlinf_cli.exit_codes import ExitCode
    from rlinf_cli.file.job_file import load, sound
    from rlinf_cli.memory.memory_forecast import keep_forecast
    from rlinf_cli.memory.memory_peaks import machine_memory, read_peaks
    from rlinf_cli.memory.memory_sums import accelerated, fit, node_memory, sums
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.render.memory_table import MemoryView, memory_record, memory_text
    from rlinf_cli.run.policy_source import find_run_folder
    from rlinf_core.errors import RLinfError

    run = find_run_folder(file, log_path)
    name = file if run is None else str(run.config_file)
    job = load(name, overrides, assume)
    parts = sound(job)
    if job.recipe is None or job.recipe.memory is None:
        what = "a file without a recipe" if job.recipe is None else f"recipe `{job.recipe.name}`"
        raise RLinfError(f"{what} has no memory forecast")
    arguments = (*(overrides or ()), *assumed(assume))
    placements = lay_out(parts, "memory", name, arguments=arguments).placements
    sizes = {component: len(processes) for component, processes in placements.items()}
    console.message("measuring an empty process of each kind")
    forecasts = _forecasts(job, sizes)
    needs = sums(forecasts, placements)
    has = node_memory(parts.cluster, needs, host_gib=available, here=machine_memory())
    fits = fit(needs, has)
    change = None
    if not fits:
        console.message("searching for a change of the file that fits")
        changes = [(*(overrides or ()), *saving) for saving in _savings(job)]
        fitting = next((change for change in changes if _fits(name, change, assume, sizes, placements, has)), None)
        change = None if fitting is None else fitting[len(overrides or ()) :]
    view = MemoryView(
        forecasts,
        accelerated(placements),
        read_peaks(run.memory_file) if run is not None else {},
        needs,
        has,
        fits,
        change,
    )
    if run is not None and not overrides and not assume and available is None:
        try:
            keep_forecast(run.path, memory_record(view))
        except RLinfError as error:
            console.message(f"the forecast was not saved for the report: {error.why or error.message}")
    if output is Output.JSON:
        console.result_json(memory_record(view))
    else:
        console.result(memory_text(view))
    if not fits:
        raise typer.Exit(ExitCode.FAILED)


def _forecasts(job: Job, sizes: Mapping[str, int]) -> Sequence[ProcessForecast]:
    function = job.recipe.load(job.recipe.memory) if job.recipe is not None else None
    return [] if function is None else function(job.config, sizes)


def _savings(job: Job) -> Sequence[tuple[str, ...]]:
    function = job.recipe.load(job.recipe.savings) if job.recipe is not None else None
    return [] if function is None else function(job.config)


def _fits(
    name: str,
    overrides: Sequence[str],
    assume: Sequence[str] | None,
    sizes: Mapping[str, int],
    placements: Mapping[str, Sequence[Placement]],
    has: Mapping[int, NodeMemory],
) -> bool:
    """Return whether a changed file is valid and fits."""
    from rlinf_cli.lint.load import load_with_lint
    from rlinf_cli.memory.memory_sums import fit, sums

    job = load_with_lint(name, overrides, assume=assume or ())
    if not job.ok:
        return False
    return fit(sums(_forecasts(job, sizes), placements), has)
