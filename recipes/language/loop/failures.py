"""Counts of answers that could not be scored, or made, for no fault of the policy's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from recipes.language.prompts.prompt_messages import GroupReport
from rlinf_core import RunError


@dataclass(slots=True)
class Failures:
    """Failed answers out of all answers.

    Attributes:
        answers: all of them.
        by_cause: the number of failures, by cause.
        first: why the first one did.
    """

    answers: int = 0
    by_cause: Counter[str] = field(default_factory=Counter[str])
    first: str = ""

    def count(self, report: GroupReport) -> None:
        """Count the answers of a group."""
        self.answers += len(report.rewards) + report.failed
        self.by_cause.update(report.failures)
        self.first = self.first or report.failure

    @property
    def failed(self) -> int:
        """The number of those that failed."""
        return self.by_cause.total()

    @property
    def causes(self) -> str:
        """The causes with their counts, the most frequent first."""
        return ", ".join(f"{cause} {count}" for cause, count in self.by_cause.most_common())

    def check(self, where: str, whole: int, most: float) -> None:
        """End the run where too many answers failed.

        Args:
            where: what they are of, for messages.
            whole: how many there will be, so that the first few alone end nothing.
            most: share that may fail.

        Raises:
            RunError: more did.
        """
        if self.failed > most * max(whole, self.answers):
            raise RunError(
                f"{self.failed} of {self.answers} answers of {where} failed: {self.causes}",
                why=f"the first: {self.first}",
                help="fix the scoring or generation; `runner.max_failed_fraction` of a step may fail",
            )

    def __str__(self) -> str:
        counts = f"{self.failed} of {self.answers} answers failed and were dropped: {self.causes}"
        return f"{counts}; the first: {self.first}"
