"""The common axes for results and curves of different runs, since a step of one run may equal four of another."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlinf_cli.runs.metric_columns import RunSeries


class XAxis(StrEnum):
    """A quantity for the horizontal axis."""

    STEP = "step"
    ENV_STEPS = "env_steps"
    TIME = "time"
    TOKENS = "tokens"

    @property
    def words(self) -> str:
        """The counted quantity, in the plural."""
        return {XAxis.STEP: "steps", XAxis.ENV_STEPS: "environment steps", XAxis.TIME: "seconds"}.get(self, self.value)

    @property
    def label(self) -> str:
        """The title of the axis."""
        return "step" if self is XAxis.STEP else self.words

    @property
    def metric(self) -> str:
        """The metric whose values are summed over the steps; empty for `STEP`."""
        counted = {XAxis.ENV_STEPS: "env/steps", XAxis.TIME: "time/step", XAxis.TOKENS: "train/actor/tokens"}
        return counted.get(self, "")

    def of(self, series: RunSeries) -> Mapping[int, float]:
        """Return the position of each step of a run: its number, or the quantity summed up to its end.

        Raises:
            KeyError: the run does not count this quantity.
        """
        if not self.metric:
            return {step: float(step) for step in series.steps}
        column = series.columns[self.metric].finite()
        added = dict(zip(column.steps, column.values, strict=True))
        places: dict[int, float] = {}
        total = 0.0
        for step in series.steps:
            total += added.get(step, 0.0)
            places[step] = total
        return places
