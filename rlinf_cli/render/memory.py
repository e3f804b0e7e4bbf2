"""The forecast of memory as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from recipes.training.memory import ProcessForecast
    from rlinf_core.memory import Peak


class MemoryView(NamedTuple):
    """The view of `rlinf inspect memory`.

    Attributes:
        forecasts: by component.
        peaks: that processes of a run had, by component and rank, by phase.
        nodes: bytes that the processes of each node hold at most, by its rank.
        available: bytes of a node; None: not known.
        fits: whether every node has enough.
        change: overrides with which it would fit; None: none is known, or none is needed.
    """

    forecasts: Sequence[ProcessForecast]
    peaks: Mapping[tuple[str, int], Mapping[str, Peak]]
    nodes: Mapping[int, int]
    available: int | None
    fits: bool
    change: Sequence[str] | None


def memory_text(view: MemoryView) -> str:
    """Return a table with a line for each phase of each component, the sums of nodes, and what would fit."""
    header = ("component", "processes", "phase", "forecast", "measured", "of which")
    rows = [header if view.peaks else tuple(each for each in header if each != "measured")]
    for each in view.forecasts:
        for number, phase in enumerate(each.phases):
            parts = ", ".join(f"{name} {_mib(size)}" for name, size in phase.parts.items() if size >= 2**19)
            first = (each.component, str(each.processes)) if not number else ("", "")
            measured = (_measured(view, each.component, phase.phase),) if view.peaks else ()
            rows.append((*first, phase.phase, f"{_mib(phase.total)} MiB", *measured, parts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    shared = sum(each.shared for each in view.forecasts)
    lines += [f"messages in shared memory (/dev/shm): up to {_mib(shared)} MiB"]
    for rank, size in sorted(view.nodes.items()):
        has = "" if view.available is None else f" of {_mib(view.available)} MiB"
        lines.append(f"node {rank}: {_mib(size)} MiB{has}")
    lines += [f"note: {note}" for note in dict.fromkeys(note for each in view.forecasts for note in each.notes)]
    if not view.fits:
        lines.append("it does not fit" if view.change is None else f"it would fit with: {' '.join(view.change)}")
    return "\n".join(lines)


def memory_record(view: MemoryView) -> dict[str, Any]:
    """Return the same for `--output json`, sizes in bytes."""
    return {
        "schema": "rlinf.memory_forecast/1",
        "components": {
            each.component: {
                "processes": each.processes,
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
        "nodes": [{"node_rank": rank, "forecast": size} for rank, size in sorted(view.nodes.items())],
        "available": view.available,
        "fits": view.fits,
        "change": None if view.change is None else list(view.change),
    }


def _measured(view: MemoryView, component: str, phase: str) -> str:
    found = _peak(view, component, phase)
    return "-" if found is None else f"{_mib(found)} MiB"


def _peak(view: MemoryView, component: str, phase: str) -> int | None:
    """Return the largest peak of the ranks of a component in a phase; None where none is known."""
    found = [peaks[phase].rss for (name, _), peaks in view.peaks.items() if name == component and phase in peaks]
    return max(found, default=None)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
