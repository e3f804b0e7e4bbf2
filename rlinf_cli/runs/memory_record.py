"""The record of `rlinf inspect memory`: the forecast and measured memory of processes, and the memory of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlinf_core.collective import memory_budget
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.errors import RunError
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
