"""The tool that agents wait for, told once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

_SECONDS: Final = "agent/tool_seconds/"
# Share of the time of a run, and seconds of it, from which a tool is told of.
_SHARE: Final = 0.5
_LEAST: Final = 0.1


class SlowTools:
    """Tells of each tool in which runs of agents spend more than half of their time.

    Args:
        tell: is given a line about the tool.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step."""
        whole = metrics.get("agent/seconds", 0.0)
        by_tool = {name.removeprefix(_SECONDS): value for name, value in metrics.items() if name.startswith(_SECONDS)}
        for name, seconds in by_tool.items():
            if name not in self._told and seconds >= _LEAST and seconds > _SHARE * whole > 0:
                self._told.add(name)
                self._tell(f"agents wait for the tool `{name}`: {seconds:.2g} s of the {whole:.2g} s of a run")
