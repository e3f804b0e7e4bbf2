"""The forecast of memory as text and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from recipes.training.memory.process_forecast import PhaseForecast, ProcessForecast
    from rlinf_cli.memory.memory_sums import NodeMemory, NodeNeed
    from rlinf_core.process.process_memory import Peak


# Said of a node whose memory nobody has declared.
_WHOSE: Final = ", the memory of this machine; `memory_gib` of a node group or `--available GIB` says that of another"


class MemoryView(NamedTuple):
    """The view of `rlinf inspect memory`.

    Attributes:
        forecasts: by component.
        accelerated: components whose processes have accelerators.
        peaks: that processes of a run had, by component and rank, by phase.
        needs: what the processes of each node hold at most, by its rank.
        nodes: what these nodes have.
        fits: whether every node has enough.
        change: overrides with which it would fit; None: none is known, or none is needed.
    """

    forecasts: Sequence[ProcessForecast]
    accelerated: Collection[str]
    peaks: Mapping[tuple[str, int], Mapping[str, Peak]]
    needs: Mapping[int, NodeNeed]
    nodes: Mapping[int, NodeMemory]
    fits: bool
    change: Sequence[str] | None


def memory_text(view: MemoryView) -> str:
    """Return a table with a line for each phase of each component, the sums of nodes, and what would fit."""
    header = ("component", "processes", "phase", "forecast", "measured", "of which")
    rows = [header if view.peaks else tuple(each for each in header if each != "measured")]
    for each in view.forecasts:
        for number, phase in enumerate(each.phases):
            parts = ", ".join(f"{name} {_size(size)}" for name, size in phase.parts.items() if size >= 2**19)
            first = (each.component, str(each.processes)) if not number else ("", "")
            measured = (_measured(view, each.component, phase.phase),) if view.peaks else ()
            rows.append((*first, phase.phase, _size(phase.total), *measured, parts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"messages in shared memory (/dev/shm): up to {_size(sum(each.shared for each in view.forecasts))}"]
    for rank, need in view.needs.items():
        has = view.nodes[rank]
        lines.append(f"node {rank}: {_size(need.host)}{_of(has.host)}{_WHOSE if has.is_here else ''}")
        if need.accelerator:
            on_device = f"{_size(need.accelerator)}{_of(has.accelerator)}: {_on_device(view)}"
            lines.append(f"node {rank}, its fullest accelerator: {on_device}")
    lines += [f"note: {note}" for note in dict.fromkeys(note for each in view.forecasts for note in each.notes)]
    if not view.fits:
        lines.append(_remedy(view))
    return "\n".join(lines)


def _of(available: int | None) -> str:
    return "" if available is None else f" of {_size(available)}"


def _on_device(view: MemoryView) -> str:
    """Return the names of what lies in the memory of accelerators, in the order of the table."""
    phases = [phase for each in view.forecasts if each.component in view.accelerated for phase in each.phases]
    return ", ".join(dict.fromkeys(name for phase in phases for name in phase.parts if name in phase.on_device))


def _remedy(view: MemoryView) -> str:
    """Return what would fit, or what there is most of."""
    if view.change is not None:
        return f"it would fit with: {' '.join(view.change)}"
    hosts_fit = all(need._replace(accelerator=0).fits(view.nodes[rank]) for rank, need in view.needs.items())
    sizes = [
        (size * each.processes, name, each, size)
        for each in view.forecasts
        for phase in each.phases
        for name, size in phase.parts.items()
        if _is_short(phase, name, accelerated=each.component in view.accelerated, on_device=hosts_fit)
    ]
    _, name, each, size = max(sizes, key=lambda found: found[0])
    whose_memory = "an accelerator" if hosts_fit else "a node"
    whose = "the process" if each.processes == 1 else f"each of {each.processes} processes"
    return (
        f"{whose_memory} does not have enough memory, and no change of the file is known that fits:"
        f" most is `{name}`, {_size(size)} in {whose} of `{each.component}`"
    )


def _is_short(phase: PhaseForecast, name: str, *, accelerated: bool, on_device: bool) -> bool:
    """Return whether a part lies in the memory that there is too little of: the accelerator's, or the host's."""
    if on_device:
        return accelerated and name in phase.on_device
    return not accelerated or name not in phase.on_device | phase.host_only


def memory_record(view: MemoryView) -> dict[str, Any]:
    """Return the same for `--output json`, sizes in bytes."""
    return {
        "schema": "rlinf.memory_forecast/2",
        "components": {
            each.component: {
                "processes": each.processes,
                "accelerated": each.component in view.accelerated,
                "peak": each.peak,
                "shared_memory": each.shared,
                "notes": list(each.notes),
                "phases": [
                    {
                        "phase": phase.phase,
                        "total": phase.total,
                        "parts": dict(phase.parts),
                        "on_device": sorted(phase.on_device),
                        "measured": _peak(view, each.component, phase.phase),
                    }
                    for phase in each.phases
                ],
            }
            for each in view.forecasts
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
    found = _peak(view, component, phase)
    return "-" if found is None else _size(found)


def _peak(view: MemoryView, component: str, phase: str) -> int | None:
    """Return the largest peak of the ranks of a component in a phase; None where none is known."""
    found = [peaks[phase].rss for (name, _), peaks in view.peaks.items() if name == component and phase in peaks]
    return max(found, default=None)


def _size(size: int) -> str:
    """Return a size in MiB, from 10 GiB on in GiB."""
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
