"""The interface of a service that gets the metrics of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_core.process.tracing import TraceSpan


class BackendSettings(NamedTuple):
    """The facts about a run for a backend.

    Attributes:
        folder: the run folder, for files of the backend.
        project, name: the project and name of the run in the service.
        config: the resolved configuration without secrets, as plain data.
        resumed: whether the run resumes an earlier one.
        known: the last step that an earlier process of the run logged; -1: none.
    """

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    resumed: bool = False
    known: int = -1


class MetricsBackend(ABC):
    """A metric service."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step`, numbers by name. A step may be logged in several parts."""

    def rewind(self, step: int) -> None:  # noqa: B027 - most services keep logged steps
        """Go back to `step`: later steps will be logged again."""

    def add_spans(self, process: str, spans: Sequence[TraceSpan]) -> None:  # noqa: B027 - most services take none
        """Take the spans of a process, named as in `actor:0`, of a traced run. Must not block."""

    @abstractmethod
    def close(self) -> None:
        """Flush pending data. Called once."""
