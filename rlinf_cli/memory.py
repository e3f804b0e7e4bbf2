"""The answer of `rlinf inspect memory`: the memory forecast of a file or a run, with the run's measured peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.job.job_file import load, sound
from rlinf_cli.job.job_layout import lay_out
from rlinf_cli.runs.documents import PLACEMENT, recorded_places
from rlinf_cli.runs.run_lookup import find_run_folder
from rlinf_core.collective import memory_budget
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.foreign.files import Bytes, FileModel, Rank, read_model
from rlinf_core.job.recipe import DEVICE_PARTS, ProcessForecast
from rlinf_core.process.proc import Peak


class HasPlace(Protocol):
    """A placed process: its node, and its first accelerator there (None without accelerators)."""

    @property
    def cluster_node_rank(self) -> int: ...
    @property
    def local_accelerator_rank(self) -> int | None: ...


class NodeMemory(NamedTuple):
    """The bytes of a node's host memory and of each accelerator, None if unknown; `is_here` tells whether the host
    memory is that of this machine, because the node's memory is not declared.
    """

    host: int | None = None
    accelerator: int | None = None
    is_here: bool = False

    def holds(self, host: int, accelerator: int) -> bool:
        """Return whether the node has these bytes; unknown memory counts as enough."""
        return (self.host is None or host <= self.host) and (
            self.accelerator is None or accelerator <= self.accelerator
        )


def node_memory(cluster: ClusterConfig, rank: int, *, available: float | None, here: int | None) -> NodeMemory:
    """Return the memory of a node: `available` GiB if given, else the least that a node group of the file declares,
    else the bytes of this machine, `here`.
    """
    groups = [group for group in cluster.node_groups if rank in group.node_ranks]
    host = _least([available] if available is not None else [group.memory_gib for group in groups])
    accelerator = _least([group.accelerators.memory_gib for group in groups if group.accelerators is not None])
    return NodeMemory(here if host is None else host, accelerator, host is None and here is not None)


def _least(sizes: Sequence[float | None]) -> int | None:
    """Return the least of the known sizes, converted from GiB to bytes; None if no size is known."""
    return min((int(size * 2**30) for size in sizes if size is not None), default=None)


def node_needs(
    forecasts: Sequence[ProcessForecast], placements: Mapping[str, Sequence[HasPlace]], *, in_turns: bool = True
) -> dict[int, tuple[int, int]]:
    """Return by node rank the most bytes that processes hold of the host and of the fullest accelerator.

    Processes that offload take turns on an accelerator, so only the largest one counts. Without `in_turns`, when
    rollouts run ahead (`runner.max_staleness`), all of them are there at once.
    """
    hosts, devices, largest = Counter[int](), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for forecast in forecasts:
        for placement in placements[forecast.component]:
            node, index = placement.cluster_node_rank, placement.local_accelerator_rank
            host, device = forecast.held(accelerated=index is not None)
            hosts[node] += host
            if index is not None and forecast.offloads and in_turns:
                largest[node, index] = max(largest[node, index], device)
            elif index is not None:
                devices[node, index] += device
    held = devices + largest
    return {node: (hosts[node], max((held[at] for at in held if at[0] == node), default=0)) for node in sorted(hosts)}


def memory_record(
    forecasts: Sequence[ProcessForecast],
    placements: Mapping[str, Sequence[HasPlace]],
    nodes: Mapping[int, NodeMemory],
    peaks: Mapping[tuple[str, int], Mapping[str, Peak]],
    *,
    in_turns: bool = True,
) -> dict[str, Any]:
    """Return the record for `--json`, with sizes in bytes.

    `peaks` has a run's peaks by component and rank, then by phase; `in_turns` is the argument of `node_needs`.
    """
    components: dict[str, Any] = {}
    for forecast in forecasts:
        processes = placements[forecast.component]
        accelerated = any(process.local_accelerator_rank is not None for process in processes)
        host, accelerator = forecast.held(accelerated=accelerated)
        parts = forecast.parts_of(accelerated=accelerated)
        phases = [peak for (name, _), phase in peaks.items() if name == forecast.component for peak in phase.values()]
        components[forecast.component] = {
            "processes": len(processes),
            "host": host,
            "accelerator": accelerator,
            "host_measured": max((peak.rss for peak in phases), default=None),
            "accelerator_measured": max((peak.device for peak in phases), default=None),
            "shared_memory": forecast.shared,
            "on_device": [part for part in parts if accelerated and part in DEVICE_PARTS],
            "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
            "notes": list(forecast.notes),
        }
    rows = [
        {
            "node_rank": rank,
            "host": need[0],
            "host_available": nodes[rank].host,
            "host_is_this_machine": nodes[rank].is_here,
            "accelerator": need[1],
            "accelerator_available": nodes[rank].accelerator,
            "fits": nodes[rank].holds(*need),
        }
        for rank, need in node_needs(forecasts, placements, in_turns=in_turns).items()
    ]
    fits = all(row["fits"] for row in rows)
    return {"schema": "rlinf.memory_forecast/3", "components": components, "nodes": rows, "fits": fits}


class _Peak(FileModel):
    rss: Bytes
    device: Bytes = 0


class _Process(FileModel):
    component: str
    rank: Rank
    phases: dict[str, _Peak]


class _Peaks(FileModel):
    processes: list[_Process]


def machine_memory() -> int | None:
    """Return the bytes of memory that processes here may use (in a container, its limit); None if unknown."""
    allowed = memory_budget.allowed_bytes()
    return allowed if allowed < memory_budget.UNLIMITED else None


def read_peaks(file: Path) -> dict[tuple[str, int], dict[str, Peak]]:
    """Return the peaks in a run's `memory.json` by component and rank; empty if the file does not exist.

    Raises:
        RunError: the file is malformed.
    """
    try:
        processes = read_model(file, _Peaks).processes
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError("the memory of the run cannot be read", where=str(file), why=error.strerror) from error
    return {
        (process.component, process.rank): {
            phase: Peak(peak.rss, peak.device) for phase, peak in process.phases.items()
        }
        for process in processes
    }


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
