"""Warnings about slow tools, once per tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

_SECONDS: Final = "agent/tool_seconds/"
# Thresholds of a warning: share of a run's time, and seconds.
_SHARE: Final = 0.5
_LEAST: Final = 0.1


class SlowTools:
    """Warns of tools that take more than half of the time of agent runs.

    Args:
        emit: receives one line per slow tool.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._warned: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step."""
        whole = metrics.get("agent/seconds", 0.0)
        by_tool = {name.removeprefix(_SECONDS): value for name, value in metrics.items() if name.startswith(_SECONDS)}
        for name, seconds in by_tool.items():
            if name not in self._warned and seconds >= _LEAST and seconds > _SHARE * whole > 0:
                self._warned.add(name)
                self._emit(f"agents spend {seconds:.2g} s of the {whole:.2g} s of a run in the tool `{name}`")
