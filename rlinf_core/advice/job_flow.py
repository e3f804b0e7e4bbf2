"""The flow of a recipe's work, as advice asks for it: legal counts, what must be recorded, what a file changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from rlinf_core.advice.arrangements import Arrangement
from rlinf_core.advice.durations import CallRow, Durations
from rlinf_core.advice.search import Flow

Sizes: TypeAlias = Mapping[str, Sequence[tuple[float, int]]]
"""Sizes of what has no duration, as answers have tokens: a size and how many had about that one, by phase."""


class Recorded(Protocol):
    """A run, as far as a recipe looks at it as a whole.

    Attributes:
        arrangement: where its components were.
        models: the model of the accelerators of each kind.
        phases: median seconds of the phases of its steps, by metric, as `time/step`.
        sizes: the sizes of what has no duration.
    """

    @property
    def arrangement(self) -> Arrangement: ...
    @property
    def models(self) -> Mapping[str, str]: ...
    @property
    def phases(self) -> Mapping[str, float]: ...
    @property
    def sizes(self) -> Sizes: ...


class JobFlow(Protocol):
    """The flow of one job, before its durations are known.

    Attributes:
        components: those that are placed, in the order in which a step needs them; the one that trains is the last.
        phases: the phases of each component that must have been recorded.
        stages: numbers of pipeline stages worth trying.
        stages_now: the pipeline stages of the file.
    """

    @property
    def components(self) -> tuple[str, ...]: ...
    @property
    def phases(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def stages(self) -> tuple[int, ...]: ...

    @property
    def stages_now(self) -> int: ...

    def legal(self, arrangement: Arrangement) -> bool:
        """Return whether the recipe takes an arrangement, as far as arithmetic says."""
        ...

    def flow(self, durations: Durations, models: Mapping[str, str], sizes: Sizes) -> Flow:
        """Return the flow with durations; `models` are the accelerators of each kind, `sizes` as in `Recorded`."""
        ...

    def constants(self, run: Recorded, durations: Durations) -> list[CallRow]:
        """Return what no call says and a whole run does, such as the seconds of a message, as calls of the driver."""
        ...

    def rows(self, arrangement: Arrangement) -> Mapping[str, float]:
        """Return the rows that a call of each phase has in an arrangement."""
        ...

    def changes(self, arrangement: Arrangement) -> Mapping[str, Any]:
        """Return the values besides the placement that a file needs for an arrangement, by key."""
        ...
