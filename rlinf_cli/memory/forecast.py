"""The answer of `rlinf inspect memory`: the forecast of a file, or that of a run beside its measured peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlinf_cli.command import Result
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.file.job_file import load, sound
from rlinf_cli.memory.memory_table import memory_text
from rlinf_cli.placement.job_layout import lay_out
from rlinf_cli.report.documents import PLACEMENT, recorded_places
from rlinf_cli.run.policy_source import find_run_folder
from rlinf_cli.runs.memory_record import machine_memory, memory_record, node_memory, read_peaks
from rlinf_core.errors import RLinfError

if TYPE_CHECKING:
    from rlinf_cli.runs.memory_record import HasPlace


def forecast_of(
    file: str, overrides: Sequence[str], assume: Sequence[str] | None, available: float | None, words: Sequence[str]
) -> Result:
    """Return the forecast of a file or a run.

    Args:
        file: a file, a run folder, or the name of a run.
        overrides, assume: the arguments of the command line.
        available: the memory of each node in GiB; None for what the file declares, else that of this machine.
        words: the command line behind the file, for the remedy of an error.

    Raises:
        RLinfError: the recipe has no forecast.
    """
    run = find_run_folder(file)
    job = load(file if run is None else str(run.config_file), overrides, assume)
    parts = sound(job)
    forecast = None if job.recipe is None else job.recipe.load(job.recipe.memory)
    if forecast is None:
        what = "a file without a recipe" if job.recipe is None else f"recipe `{job.recipe.name}`"
        raise RLinfError(f"{what} has no memory forecast")
    placements: Mapping[str, Sequence[HasPlace]] = {}
    if run is not None and not overrides and not assume:
        placements = recorded_places(run.path / PLACEMENT)
    if not placements:
        placements = lay_out(parts, "memory", file, arguments=words).placements
    forecasts = forecast(job.config, {component: len(processes) for component, processes in placements.items()})
    ranks = {process.cluster_node_rank for processes in placements.values() for process in processes}
    here = machine_memory()
    nodes = {rank: node_memory(parts.cluster, rank, available=available, here=here) for rank in ranks}
    peaks = {} if run is None else read_peaks(run.memory_file)
    # Rollouts that run ahead are computed while the actor trains.
    in_turns = not getattr(getattr(job.config, "runner", None), "staleness", 0)
    record = memory_record(forecasts, placements, nodes, peaks, in_turns=in_turns)
    return Result(partial(memory_text, record), record, ExitCode.OK if record["fits"] else ExitCode.FAILED)
