"""The axes that results and curves of different runs share: a step of one run may be four of another."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlinf_cli.runs.metric_columns import RunSeries


class XAxis(StrEnum):
    """A quantity that is counted along the horizontal axis."""

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
        """The metric of a step that is summed up; empty for the number of the step."""
        counted = {XAxis.ENV_STEPS: "env/steps", XAxis.TIME: "time/step", XAxis.TOKENS: "train/actor/tokens"}
        return counted.get(self, "")

    def of(self, series: RunSeries) -> Mapping[int, float]:
        """Return the place of each step of a run: its number, or how much was counted up to its end.

        Raises:
            KeyError: the run does not count it.
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
