"""Groups of answers as they arrive: counts of failed answers, and answers for people to read, by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recipes.language.loop.answer_samples import write_samples
from recipes.language.loop.failures import Failures
from recipes.language.prompts.prompt_messages import GroupReport, ScoredGroup
from recipes.language.prompts.prompt_plan import PromptPlan


class Arrivals:
    """The accounts of arrived groups, of which the plan takes a report.

    Args:
        plan: the plan of the run.
        answers: the number of answers of a step.
        most_failed: the share of them that may fail.

    Attributes:
        all_failures: the failed answers of the whole run.
    """

    def __init__(self, plan: PromptPlan, answers: int, most_failed: float) -> None:
        self._plan, self._answers, self._most_failed = plan, answers, most_failed
        # Of steps that are not trained on yet.
        self._failures: dict[int, Failures] = {}
        self._samples: dict[int, list[Any]] = {}
        self.all_failures = Failures()

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        """Count groups that training learns from, and keep their samples."""
        for report, samples in groups:
            self._plan.arrived(report)
            self._failures.setdefault(report.step, Failures()).count(report)
            self.all_failures.count(report)
            if samples:
                self._samples.setdefault(report.step, []).extend(samples)

    def check(self, step: int) -> None:
        """Raise RunError where too many answers of a step have failed."""
        if step in self._failures:
            self._failures[step].check(f"step {step}", self._answers, self._most_failed)

    def check_evaluation(self, groups: Iterable[GroupReport]) -> None:
        """Count groups of an evaluation; raise RunError where too many of their answers have failed."""
        failures = Failures()
        for group in groups:
            failures.count(group)
            self.all_failures.count(group)
        failures.check("the evaluation", failures.answers, self._most_failed)

    def close(self, step: int, run_folder: Path, most_samples: int) -> None:
        """Write the samples of a step, and forget what was counted for it."""
        self._failures.pop(step, None)
        samples = self._samples.pop(step, [])
        if samples:
            write_samples(run_folder, step, [sample._asdict() for sample in samples[:most_samples]])
