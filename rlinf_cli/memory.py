"""The answer of `rlinf inspect memory`: the memory forecast of a file or a run, with the run's measured peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.job.job_file import load, sound
from rlinf_cli.placement.job_layout import lay_out
from rlinf_cli.run.policies import find_run_folder
from rlinf_cli.runs.documents import PLACEMENT, recorded_places
from rlinf_cli.runs.memory_record import HasPlace, machine_memory, memory_record, node_memory, read_peaks
from rlinf_core.errors import RLinfError

_COLUMNS: Final = ("host", "host measured", "accelerator", "accelerator measured")
# The change that makes a part smaller.
_REMEDIES: Final = {
    "activations": "lower `micro_batch_size` or `max_tokens_per_micro_batch`, or set `gradient_checkpointing: true`",
    "optimizer": "set `model.lora: {rank: 16}`, or let more actors share it (`sharding_strategy: full_shard`)",
    "keys and values": "lower `rollout.max_running_tokens`",
    "replay": "lower `algorithm.replay.capacity`, or write `storage`",
    "simulators": "lower `env.train.num_processes`",
    "trajectories": "lower `env.train.total_num_envs`",
    "answers": "lower `data.rollout_batch_size`",
}
# The remark on a node whose memory is not declared.
_WHOSE: Final = " (this machine; override: `--available GIB`, or `memory_gib` of a node group)"


def forecast_of(
    file: str, overrides: Sequence[str], assume: Sequence[str] | None, available: float | None, words: Sequence[str]
) -> Result:
    """Return the forecast of a file or a run.

    Args:
        file: a file, a run folder, or the name of a run.
        overrides, assume: the arguments of the command line.
        available: the memory of each node in GiB; None for the declared memory, or else the memory of this machine.
        words: the command line after the file, for the remedy of an error.

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


def memory_text(record: dict[str, Any]) -> str:
    """Return a line for each component, the sums of nodes, notes and, if the job does not fit, its largest part.

    Args:
        record: the record of `memory_record`.
    """
    components: dict[str, Any] = record["components"]
    columns = [name for name in _COLUMNS if any(sizes[name.replace(" ", "_")] for sizes in components.values())]
    rows: list[tuple[str, ...]] = []
    for name, sizes in components.items():
        parts = ", ".join(f"{part} {_size(size)}" for part, size in sizes["parts"].items() if size >= 2**19)
        cells = (sizes[column.replace(" ", "_")] for column in columns)
        rows.append((name, str(sizes["processes"]), *(_size(cell) if cell else "-" for cell in cells), parts))
    lines = [console.table(("component", "processes", *columns, "of which"), rows, keep=(0, 1))]
    shared = sum(sizes["shared_memory"] for sizes in components.values())
    lines.append(f"messages in shared memory (/dev/shm): up to {_size(shared)}")
    for node in record["nodes"]:
        name, whose = f"node {node['node_rank']}", _WHOSE if node["host_is_this_machine"] else ""
        lines.append(f"{name}: {_size(node['host'])}{_of(node['host_available'])}{whose}")
        if node["accelerator"]:
            fullest = f"{_size(node['accelerator'])}{_of(node['accelerator_available'])}"
            lines.append(f"{name}, its fullest accelerator: {fullest}")
    notes = dict.fromkeys(note for sizes in components.values() for note in sizes["notes"])
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines if record["fits"] else [*lines, *_remedies(record)])


def _remedies(record: dict[str, Any]) -> list[str]:
    """Return lines on the component that takes most of the scarce memory, and on settings that reduce its parts."""
    short = [node for node in record["nodes"] if not node["fits"]]
    host = any(node["host_available"] is not None and node["host"] > node["host_available"] for node in short)
    kind, what = ("host", "a node") if host else ("accelerator", "an accelerator")
    name, most = max(record["components"].items(), key=lambda item: item[1]["processes"] * item[1][kind])
    whose = "its process" if most["processes"] == 1 else f"each of {most['processes']} processes"
    remedies = [
        f"  to reduce `{part}` ({_size(most['parts'][part])}): {change}"
        for part, change in _REMEDIES.items()
        if 20 * most["parts"].get(part, 0) >= most[kind]
        and (not most["accelerator"] or host != (part in most["on_device"]))
    ]
    return [f"{what} has too little memory; `{name}` takes the most, {_size(most[kind])} in {whose}", *remedies]


def _of(available: int | None) -> str:
    return "" if available is None else f" of {_size(available)}"


def _size(size: int) -> str:
    """Return a size in MiB, or in GiB from 10 GiB on."""
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
