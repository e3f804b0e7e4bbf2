"""The steps of a run that are profiled, by `runner.profiler`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlinf_core.config.sections.runner import ProfilerConfig
from rlinf_core.errors import ConfigError
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.worker.group.handle import wait_together

LOGGER = logging.getLogger("rlinf")


class Profiled(Protocol):
    """The interface of a group whose workers are profiled, such as `WorkerGroup`."""

    def start_profile(self, kind: str, folder: str, name: str) -> Any: ...
    def stop_profile(self) -> Any: ...


class ProfiledSteps:
    """The profiles of a run.

    Args:
        config: `runner.profiler`, or None.
        folder: where they are written.
        groups: the worker groups by component.

    Raises:
        ConfigError: a component to be profiled has no group.
    """

    def __init__(self, config: ProfilerConfig | None, folder: Path, groups: Mapping[str, Profiled]) -> None:
        self._config, self._folder = config, folder
        chosen = config.components if config is not None else ()
        self._groups = {name: group for name, group in groups.items() if not chosen or name in chosen}
        self._running = False
        for name in chosen:
            if name not in groups:
                raise ConfigError(
                    f"`runner.profiler.components` names `{name}`, which this run does not have",
                    help=did_you_mean(name, groups) or f"its components are {quoted(list(groups))}",
                )

    def begin(self, step: int) -> None:
        """Start the profilers before the first of the steps, or of those that are left of them after a restart."""
        config = self._config
        if config is not None and not self._running and config.first_step <= step <= config.last_step:
            self._running = True
            kind, folder = config.kind, str(self._folder)
            wait_together(*(group.start_profile(kind, folder, name) for name, group in self._groups.items()))

    def end(self, step: int, *, last: bool) -> None:
        """Write the profiles after the last of the steps, or of the run."""
        if self._config is not None and self._running and (last or step >= self._config.last_step):
            self._running = False
            wait_together(*(group.stop_profile() for group in self._groups.values()))
            LOGGER.info("profiles of workers are in %s, on the node of each", self._folder)
