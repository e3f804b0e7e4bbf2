"""The forecast of memory as text and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from rlinf_cli.memory.memory_sums import NodeMemory, NodeNeed
    from rlinf_core.job.process_forecast import PhaseForecast, ProcessForecast
    from rlinf_core.process.process_memory import Peak


# For a node without declared memory.
_WHOSE: Final = ", this machine's memory; for others set `memory_gib` of the node group or `--available GIB`"


class MemoryView(NamedTuple):
    """The view of `rlinf inspect memory`.

    Attributes:
        forecasts: by component.
        accelerated: components whose processes have accelerators.
        peaks: measured peaks of a run, by component and rank, by phase.
        needs: the peak demand of each node, by rank.
        nodes: the memory of these nodes.
        fits: whether every node has enough.
        change: overrides with which the job fits; None if unknown or not needed.
    """

    forecasts: Sequence[ProcessForecast]
    accelerated: Collection[str]
    peaks: Mapping[tuple[str, int], Mapping[str, Peak]]
    needs: Mapping[int, NodeNeed]
    nodes: Mapping[int, NodeMemory]
    fits: bool
    change: Sequence[str] | None


def memory_text(view: MemoryView) -> str:
    """Return a table with a line for each phase of each component, sums per node, and a change that fits."""
    header = ("component", "processes", "phase", "forecast", "measured", "of which")
    rows = [header if view.peaks else tuple(column for column in header if column != "measured")]
    for forecast in view.forecasts:
        for number, phase in enumerate(forecast.phases):
            parts = ", ".join(f"{name} {_size(size)}" for name, size in phase.parts.items() if size >= 2**19)
            first = (forecast.component, str(forecast.processes)) if not number else ("", "")
            measured = (_measured(view, forecast.component, phase.phase),) if view.peaks else ()
            rows.append((*first, phase.phase, _size(phase.total), *measured, parts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [
        f"messages in shared memory (/dev/shm): up to {_size(sum(forecast.shared for forecast in view.forecasts))}"
    ]
    for rank, need in view.needs.items():
        has = view.nodes[rank]
        lines.append(f"node {rank}: {_size(need.host)}{_of(has.host)}{_WHOSE if has.is_here else ''}")
        if need.accelerator:
            on_device = f"{_size(need.accelerator)}{_of(has.accelerator)}: {_on_device(view)}"
            lines.append(f"node {rank}, its fullest accelerator: {on_device}")
    lines += [f"note: {note}" for note in dict.fromkeys(note for forecast in view.forecasts for note in forecast.notes)]
    if not view.fits:
        lines.append(_remedy(view))
    return "\n".join(lines)


def _of(available: int | None) -> str:
    return "" if available is None else f" of {_size(available)}"


def _on_device(view: MemoryView) -> str:
    """Return the names of the parts in accelerator memory, in the order of the table."""
    phases = [
        phase for forecast in view.forecasts if forecast.component in view.accelerated for phase in forecast.phases
    ]
    return ", ".join(dict.fromkeys(name for phase in phases for name in phase.parts if name in phase.on_device))


def _remedy(view: MemoryView) -> str:
    """Return a change that fits, or else the largest part."""
    if view.change is not None:
        return f"fits with: {' '.join(view.change)}"
    hosts_fit = all(need._replace(accelerator=0).fits(view.nodes[rank]) for rank, need in view.needs.items())
    sizes = [
        (size * forecast.processes, name, forecast, size)
        for forecast in view.forecasts
        for phase in forecast.phases
        for name, size in phase.parts.items()
        if _is_short(phase, name, accelerated=forecast.component in view.accelerated, on_device=hosts_fit)
    ]
    _, name, largest, size = max(sizes, key=lambda entry: entry[0])
    whose_memory = "an accelerator" if hosts_fit else "a node"
    holder = "the process" if largest.processes == 1 else f"each of {largest.processes} processes"
    return (
        f"{whose_memory} does not have enough memory, and no known change of the file fits; the largest part is"
        f" `{name}`, {_size(size)} in {holder} of `{largest.component}`"
    )


def _is_short(phase: PhaseForecast, name: str, *, accelerated: bool, on_device: bool) -> bool:
    """Return whether a part is in the memory that is short: the accelerator's or the host's."""
    if on_device:
        return accelerated and name in phase.on_device
    return not accelerated or name not in phase.on_device | phase.host_only


def memory_record(view: MemoryView) -> dict[str, Any]:
    """Return the same for `--output json`, sizes in bytes."""
    return {
        "schema": "rlinf.memory_forecast/2",
        "components": {
            forecast.component: {
                "processes": forecast.processes,
                "accelerated": forecast.component in view.accelerated,
                "peak": forecast.peak,
                "shared_memory": forecast.shared,
                "notes": list(forecast.notes),
                "phases": [
                    {
                        "phase": phase.phase,
                        "total": phase.total,
                        "parts": dict(phase.parts),
                        "on_device": sorted(phase.on_device),
                        "measured": _peak(view, forecast.component, phase.phase),
                    }
                    for phase in forecast.phases
                ],
            }
            for forecast in view.forecasts
        },
        "nodes": [
            {
                "node_rank": rank,
                "forecast": need.host,
                "available": view.nodes[rank].host,
                "accelerator": need.accelerator,
                "accelerator_available": view.nodes[rank].accelerator,
                "fits": need.fits(view.nodes[rank]),
            }
            for rank, need in view.needs.items()
        ],
        "fits": view.fits,
        "change": None if view.change is None else list(view.change),
    }


def _measured(view: MemoryView, component: str, phase: str) -> str:
    peak = _peak(view, component, phase)
    return "-" if peak is None else _size(peak)


def _peak(view: MemoryView, component: str, phase: str) -> int | None:
    """Return the largest peak over the ranks of a component in a phase; None if unknown."""
    sizes = [peaks[phase].rss for (name, _), peaks in view.peaks.items() if name == component and phase in peaks]
    return max(sizes, default=None)


def _size(size: int) -> str:
    """Return a size in MiB, from 10 GiB on in GiB."""
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
