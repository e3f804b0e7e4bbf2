"""The choice of training problems: those that were too easy or too hard when last asked are skipped for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data.problems import training_order
from recipes.language.prompts.prompt_messages import GroupReport
from rlinf_core.statistics import mean


class _Measured(NamedTuple):
    """The share of right answers to a problem, and how often the problem was skipped since."""

    rate: float
    passed_over: int = 0


class Curriculum:
    """A filter that skips training problems that were too easy or too hard for the policy when last asked.

    A problem that was never asked is asked. A problem whose share of right answers was outside the bounds is skipped
    `rests` times, and then asked again, as the policy has changed. If all problems would be skipped, the next one is
    asked.

    Args:
        low, high: inclusive bounds of the share of right answers.
        problems: the number of problems.
        seed, shuffle: the seed and shuffle of the order of problems.
        rests: how often a problem is skipped before it is asked again.

    Attributes:
        passed_over: the number of skips so far, for metrics.
    """

    def __init__(self, *, low: float, high: float, problems: int, seed: int, shuffle: bool, rests: int = 3) -> None:
        self._bounds = low, high
        self._rests = rests
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._measured: dict[int, _Measured] = {}
        self.passed_over = 0

    def next_position(self, start: int) -> int:
        """Return the first position from `start` on whose problem is to be asked."""
        for position in range(start, start + self._problems):
            (problem,) = training_order(self._problems, position, 1, seed=self._seed, shuffle=self._shuffle)
            measured = self._measured.get(problem)
            low, high = self._bounds
            if measured is None or low <= measured.rate <= high or measured.passed_over >= self._rests:
                return position
            self._measured[problem] = measured._replace(passed_over=measured.passed_over + 1)
            self.passed_over += 1
        return start

    def observe(self, report: GroupReport) -> None:
        """Record the share of right answers of a training group."""
        if report.step and report.corrects:
            self._measured[report.problem] = _Measured(mean([float(right) for right in report.corrects]))

    def state(self) -> dict[str, Any]:
        """Return the state as plain data for JSON."""
        return {
            "passed_over": self.passed_over,
            "measured": [[problem, *measured] for problem, measured in self._measured.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`."""
        self.passed_over = int(state["passed_over"])
        self._measured = {
            int(problem): _Measured(float(rate), int(rests)) for problem, rate, rests in state["measured"]
        }


def make_curriculum(data: LanguageDataConfig, problems: int) -> Curriculum | None:
    """Return the curriculum for this number of training problems; None if `data.curriculum` is not set."""
    settings = data.curriculum
    if settings is None or not problems:
        return None
    return Curriculum(
        low=settings.low,
        high=settings.high,
        problems=problems,
        seed=data.seed,
        shuffle=data.reshuffles,
    )
