"""Accounting of arriving groups: metrics of a step, counts of failed answers, and samples for people to read."""

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
from rlinf_core.foreign.files import make_folder, write_fault
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners.storage import durable
from rlinf_core.statistics import mean


class Arrivals:
    """The accounts of arrived groups, which also report each group to the plan.

    Args:
        plan: the plan of the run.
        answers: the number of answers of a step.
        most_failed: the share of a step's answers that may fail.

    Attributes:
        all_failures: the failed answers of the whole run.
    """

    def __init__(self, plan: PromptPlan, answers: int, most_failed: float) -> None:
        self._plan, self._answers, self._most_failed = plan, answers, most_failed
        # Failures and samples of steps that are not trained on yet.
        self._failures: dict[int, Failures] = {}
        self._samples: dict[int, list[Mapping[str, Any]]] = {}
        self.all_failures = Failures()

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        """Count training groups, and keep their samples."""
        for report, samples in groups:
            self._plan.arrived(report)
            self._failures.setdefault(report.step, Failures()).count(report)
            self.all_failures.count(report)
            if samples:
                self._samples.setdefault(report.step, []).extend(samples)

    def check(self, step: int) -> None:
        """Raise RunError if too many answers of a step have failed."""
        if step in self._failures:
            self._failures[step].check(f"step {step}", self._answers, self._most_failed)

    def check_evaluation(self, groups: Sequence[GroupReport]) -> None:
        """Count groups of an evaluation; raise RunError if it has no answers, or too many of them have failed."""
        require_asked(groups)
        failures = Failures()
        for group in groups:
            failures.count(group)
            self.all_failures.count(group)
        failures.check("the evaluation", failures.answers, self._most_failed)

    def close(self, step: int, run_folder: Path, most_samples: int) -> None:
        """Write the samples of a step, and drop its counts."""
        self._failures.pop(step, None)
        samples = self._samples.pop(step, [])
        if samples:
            write_samples(run_folder, step, samples[:most_samples])


FOLDER: Final = "samples"
_TEXTS: Final = frozenset({"prompt", "text", "answer", "reason"})
_TOKENS: Final = frozenset({"tokens", "pieces", "logprobs", "versions"})


def write_samples(run_folder: Path, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write the samples of a step atomically, with secret values masked.

    Args:
        run_folder: the folder of the run.
        step: the step of the samples.
        samples: the samples, with `prompt`, `text`, `answer` and `reason`; their `tokens`, `pieces`, `logprobs` and
            `versions`; and `turns`, each with `text`.

    Raises:
        RunError: the folder cannot be written.
    """
    folder = run_folder / FOLDER
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in without_secrets(samples)]
    try:
        make_folder(folder)
        durable.write_whole(folder / f"step_{step}.jsonl", "".join(lines))
    except OSError as error:
        raise RunError("samples cannot be written", where=str(folder), why=write_fault(folder, error)) from None


def without_secrets(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return samples with secret values masked, see `write_samples`."""
    remember(environment_secrets())
    return [_masked(sample) for sample in samples]


def _masked(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without secrets; if a text had one, tokens are left out, too, as they spell it."""
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
        answers: the number of all answers.
        by_cause: the number of failures, by cause.
        first: the reason of the first failure.
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
        """The number of failed answers."""
        return self.by_cause.total()

    @property
    def causes(self) -> str:
        """The causes with their counts, the most frequent first."""
        return ", ".join(f"{cause} {count}" for cause, count in self.by_cause.most_common())

    def check(self, where: str, whole: int, most: float) -> None:
        """End the run if too many answers failed.

        Args:
            where: the step or evaluation of the answers, for messages.
            whole: the final number of answers, so that a few early failures do not end the run.
            most: the share that may fail.

        Raises:
            RunError: more answers failed.
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


def group_metrics(groups: Sequence[GroupReport]) -> dict[str, float]:
    """Return metrics of the scored answers of a step, and counts of the others."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [length for group in groups for length in group.lengths]
    count = max(1, len(rewards))
    average = mean(rewards)
    metrics = {
        "rollout/reward": average,
        "rollout/correct": mean([float(right) for group in groups for right in group.corrects]),
        "rollout/reward_std": mean([(reward - average) ** 2 for reward in rewards]) ** 0.5,
        "rollout/groups_equal": mean([float(len(set(group.rewards)) < 2) for group in groups if group.rewards]),
        "rollout/response_length": mean(lengths),
        "rollout/truncated": sum(group.truncated for group in groups) / count,
        "rollout/prompts_skipped": float(sum(group.skipped for group in groups)),
    }
    tokens = sum(group.tokens for group in groups)
    if rewards:
        metrics["rollout/prompt_length"] = (tokens - sum(lengths)) / count
    for group in groups:
        for kind, number in group.failures.items():
            key = f"failed/{kind}"
            metrics[key] = metrics.get(key, 0.0) + number
        for status, number in group.exits.items():
            key = f"exit/{status}"
            metrics[key] = metrics.get(key, 0.0) + number / count
        for name, total in group.parts.items():
            key = f"reward/{name}"
            metrics[key] = metrics.get(key, 0.0) + total / count
        for key, total in group.figures.items():
            metrics[key] = metrics.get(key, 0.0) + total / count
    return metrics


def nothing_to_learn(step: int, groups: Sequence[GroupReport]) -> RunError:
    """Return the error for a step without a group to train on."""
    skipped, spoiled = (sum(getattr(group, name) for group in groups) for name in ("skipped", "spoiled"))
    help = "use other problems, a larger `algorithm.group_size`, or `filter_groups: false`"
    if skipped == len(groups):
        return _all_skipped(f"step {step} has no samples to learn from", skipped)
    if spoiled + skipped == len(groups):
        first = next(group.failure for group in groups if group.spoiled)
        code, why = "reward-fails", f"too few answers to {spoiled} prompts could be scored; the first: {first}"
    else:
        equal = len(groups) - skipped - spoiled
        code, why = "groups-equal", f"the answers to {equal} prompts have equal rewards within their group"
    help = "fix the scoring or generation" if spoiled else help
    return RunError(f"step {step} has no samples to learn from", why=why, help=help, code=code)


def require_asked(problems: Sequence[GroupReport]) -> None:
    """Raise RunError if all problems of an evaluation were skipped, so that it would measure nothing."""
    if problems and all(problem.skipped for problem in problems):
        raise _all_skipped("the evaluation has no answers", len(problems))


def _all_skipped(message: str, count: int) -> RunError:
    return RunError(
        message,
        why=f"all {count} prompts are longer than `data.max_prompt_length`, too long for the engine, empty, or refused"
        " by the chat template",
        help="raise `data.max_prompt_length`, lower `max_new_tokens`, or use other problems",
        code="prompts-skipped",
    )


def rank_figures(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the ranks that have it; of names in `_max`, the maximum."""
    names = dict.fromkeys(name for metrics in by_rank for name in metrics)
    columns = {name: [metrics[name] for metrics in by_rank if name in metrics] for name in names}
    return {name: max(values) if name.endswith("_max") else mean(values) for name, values in columns.items()}
