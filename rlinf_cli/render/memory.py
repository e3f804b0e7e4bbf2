"""The forecast of memory as text and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from recipes.training.memory import ProcessForecast
    from rlinf_core.memory import Peak


class MemoryView(NamedTuple):
    """The view of `rlinf inspect memory`.

    Attributes:
        forecasts: by component.
        accelerated: components whose processes have accelerators.
        peaks: that processes of a run had, by component and rank, by phase.
        nodes: bytes of the host's memory that the processes of each node hold at most, by its rank.
        devices: bytes of the accelerator that is used most, by the node's rank.
        available: bytes of a node; None: not known.
        is_here: `available` is the memory of this machine.
        fits: whether every node has enough.
        change: overrides with which it would fit; None: none is known, or none is needed.
    """

    forecasts: Sequence[ProcessForecast]
    accelerated: Collection[str]
    peaks: Mapping[tuple[str, int], Mapping[str, Peak]]
    nodes: Mapping[int, int]
    devices: Mapping[int, int]
    available: int | None
    is_here: bool
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
    for rank, size in sorted(view.nodes.items()):
        lines.append(f"node {rank}: {_size(size)}{_of_available(view)}")
        if rank in view.devices:
            lines.append(f"node {rank}, its fullest accelerator: {_size(view.devices[rank])} of {_on_device(view)}")
    lines += [f"note: {note}" for note in dict.fromkeys(note for each in view.forecasts for note in each.notes)]
    if not view.fits:
        lines.append(_remedy(view))
    return "\n".join(lines)


def _of_available(view: MemoryView) -> str:
    if view.available is None:
        return ""
    whose = ", the memory of this machine; `--available GIB` says that of another" if view.is_here else ""
    return f" of {_size(view.available)}{whose}"


def _on_device(view: MemoryView) -> str:
    """Return the names of what lies in the memory of accelerators, in the order of the table."""
    phases = [phase for each in view.forecasts if each.component in view.accelerated for phase in each.phases]
    return ", ".join(dict.fromkeys(name for phase in phases for name in phase.parts if name in phase.on_device))


def _remedy(view: MemoryView) -> str:
    """Return what would fit, or what there is most of."""
    if view.change is not None:
        return f"it would fit with: {' '.join(view.change)}"
    sizes = [
        (size * each.processes, name, each, size)
        for each in view.forecasts
        for phase in each.phases
        for name, size in phase.parts.items()
        if each.component not in view.accelerated or name not in phase.on_device | phase.host_only
    ]
    _, name, each, size = max(sizes, key=lambda found: found[0])
    whose = "the process" if each.processes == 1 else f"each of {each.processes} processes"
    return (
        "it does not fit, and no smaller batch or number of environments is known that would;"
        f" most of it is `{name}`: {_size(size)} in {whose} of `{each.component}`"
    )


def memory_record(view: MemoryView) -> dict[str, Any]:
    """Return the same for `--output json`, sizes in bytes."""
    return {
        "schema": "rlinf.memory_forecast/1",
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
            {"node_rank": rank, "forecast": size, "accelerator": view.devices.get(rank, 0)}
            for rank, size in sorted(view.nodes.items())
        ],
        "available": view.available,
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
