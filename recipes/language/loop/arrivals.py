"""Groups of answers as they arrive: counts of failed answers, and answers for people to read, by step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from recipes.language.prompts.prompt_messages import GroupReport, ScoredGroup
from recipes.language.prompts.prompt_plan import PromptPlan
from rlinf_core.config.secrets import environment_secrets
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import make_folder
from rlinf_core.foreign.write_fault import write_fault
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners.storage import durable


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


FOLDER: Final = "samples"
_TEXTS: Final = frozenset({"prompt", "text", "answer", "reason"})
_TOKENS: Final = frozenset({"tokens", "pieces", "logprobs", "versions"})


def write_samples(run_folder: Path, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write the samples of a step, aside and renamed; secret values are masked.

    Args:
        run_folder: the folder of the run.
        step: they are of.
        samples: the samples, with `prompt`, `text`, `answer` and `reason`; their `tokens`, `pieces`, `logprobs` and
            `versions`; and `turns`, each with `text`.

    Raises:
        RunError: the folder cannot be written.
    """
    remember(environment_secrets())
    folder = run_folder / FOLDER
    lines = [json.dumps(_masked(sample), ensure_ascii=False) + "\n" for sample in samples]
    try:
        make_folder(folder)
        durable.write_whole(folder / f"step_{step}.jsonl", "".join(lines))
    except OSError as error:
        raise RunError("samples cannot be written", where=str(folder), why=write_fault(folder, error)) from None


def _masked(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without secrets; the tokens of a text that held one are left out, for they spell it."""
    masked: dict[str, Any] = {name: hidden(value) if name in _TEXTS else value for name, value in sample.items()}
    if "turns" in masked:
        masked["turns"] = [{**turn, "text": hidden(turn["text"])} for turn in masked["turns"]]
    texts = [(record.get("text"), [turn["text"] for turn in record.get("turns", ())]) for record in (masked, sample)]
    if texts[0] != texts[1]:
        masked |= dict.fromkeys(_TOKENS & masked.keys(), ())
    return masked


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
                code="reward-fails",
            )

    def __str__(self) -> str:
        counts = f"{self.failed} of {self.answers} answers failed and were dropped: {self.causes}"
        return f"{counts}; the first: {self.first}"
