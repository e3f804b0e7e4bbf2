"""Accounts of groups of answers: metrics of steps and evaluations, failed answers, and samples for people to read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Any, Final

from recipes.language.answers.prompt_messages import GroupReport, ScoredGroup
from recipes.language.loop.prompt_plan import PromptPlan
from rlinf_core.config.secrets import environment_secrets
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import make_folder, write_fault
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners.metrics import mean, wilson_interval
from rlinf_core.runners.storage import durable


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


# A data set with more difficulty labels gets no metrics per label, as they would be too many to read.
MOST_DIFFICULTIES: Final = 12
_NO_NAME: Final = re.compile(r"[^\w.@+=-]+")


def evaluation_metrics(problems: Sequence[GroupReport], samples: int) -> dict[str, float]:
    """Return accuracy with 95 % intervals, and rewards.

    Names are `eval/<metric>` over all problems, `eval/<data set>/<metric>`, and `eval/<data set>/<difficulty>/<metric>`
    for data sets with several difficulty labels. Metrics are those of `shares`, `reward` (the mean without training
    penalties), `length` (mean tokens of an answer), the numbers of answers scored (`answers`), scored but truncated
    (`cut_off`), not scored (`left_out`) and not scored for a cause (`failed/<cause>`), `prompts_skipped` if prompts
    were too long, and `exit/<status>`, the share of answers with that bad end.

    Args:
        problems: the reports of all problems; a prompt that was too long has no answers.
        samples: the number of answers to each problem.
    """
    sets = {"eval": problems, **{f"eval/{name}": part for name, part in sets_of(problems).items()}}
    return {
        f"{prefix}/{name}": value for prefix, part in sets.items() for name, value in figures_of(part, samples).items()
    }


def sets_of(problems: Sequence[GroupReport]) -> dict[str, list[GroupReport]]:
    """Return the problems of each data set, and of each difficulty label of a data set with several."""
    sets: dict[str, list[GroupReport]] = {}
    for source, part in by_label(problems, "source").items():
        sets[source] = part
        labels = by_label(part, "difficulty")
        if 1 < len(labels) <= MOST_DIFFICULTIES:
            sets |= {f"{source}/{label}": chosen for label, chosen in labels.items()}
    return sets


def progress_ends(failures: Mapping[str, int], exits: Mapping[str, int]) -> Mapping[str, int]:
    """Return the numbers of answers that could not be scored, by cause; `timeout` includes exits at a time limit."""
    return {**failures, "timeout": failures.get("timeout", 0) + exits.get("time_limit", 0)}


def progress_text(scored: int, wanted: int, failures: Mapping[str, int]) -> str:
    """Return the progress of an evaluation with its failed answers: `12 of 64 answers, 3 timed out`."""
    words = {"timeout": "timed out"}
    failed = [f"{count} {words.get(cause, f'failed ({cause})')}" for cause, count in sorted(failures.items()) if count]
    return ", ".join([f"{scored} of {wanted} answers", *failed])


def scoring_progress(
    poll: Callable[[], list[tuple[int, Mapping[str, int]]]], wanted: int, report: Callable[[str], None]
) -> Callable[[], None]:
    """Return a function that reports the progress of an evaluation if reward workers have news.

    Args:
        poll: returns the news of reward workers since the last call: answers scored, and failures by cause.
        wanted: the number of answers of the evaluation.
        report: receives the text of the progress.
    """
    failures, scored = Counter[str](), 0
    poll()  # what came after the last evaluation

    def look() -> None:
        nonlocal scored
        for count, failed in (news := poll()):
            scored += count
            failures.update(failed)
        if news:
            report(progress_text(scored, wanted, failures))

    return look


def shares(right: Sequence[int], samples: int, judged: Sequence[int] | None = None) -> dict[str, float]:
    """Return the shares of right answers to problems that were answered `samples` times each, with 95 % intervals.

    `pass@1` is the probability that an answer is right, `pass@k` that one of k is, for powers of 2 below `samples` and
    for `samples`, by the unbiased `_pass_at_k`; `mean@<samples>`, the mean over all answers, is another name of
    `pass@1`. `<name>_low` and `<name>_high` are Wilson's interval with problems as trials, as answers to one problem
    are not independent. The interval is wide enough: a problem's estimate, from 0 to 1, varies no more than a binary
    one with the same mean.

    Args:
        right: the number of right answers to each problem.
        samples: the number of answers to each problem.
        judged: the number of scored answers to each problem; None: all. Problems with fewer than k are left out of
            `pass@k`, which is left out itself if no problem has as many.
    """
    counts = list(zip(right, judged or [samples] * len(right), strict=True))
    metrics: dict[str, float] = {}
    sizes = sorted({1, samples, *(2**power for power in range(1, 31) if 2**power < samples)})
    for size in sizes:
        metrics |= _with_interval(f"pass@{size}", [_pass_at_k(of, count, size) for count, of in counts if of >= size])
    if samples > 1:
        metrics |= _with_interval(f"mean@{samples}", [count / of for count, of in counts if of])
    return metrics


def _with_interval(name: str, estimates: Sequence[float]) -> dict[str, float]:
    if not estimates:
        return {}
    share = mean(estimates)
    low, high = wilson_interval(share * len(estimates), len(estimates))
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def figures_of(problems: Sequence[GroupReport], samples: int) -> dict[str, float]:
    """Return the metrics of `evaluation_metrics` of one set of problems; without scored answers, only the counts."""
    asked = [problem for problem in problems if not problem.skipped]
    counts = [len(problem.corrects) for problem in asked]
    figures = shares([sum(problem.corrects) for problem in asked], samples, counts)
    if any(counts):
        figures["reward"] = mean([reward for problem in asked for reward in problem.rewards])
        figures["length"] = mean([length for problem in asked for length in problem.lengths])
    figures["answers"] = float(sum(counts))
    figures["cut_off"] = float(sum(problem.truncated for problem in asked))
    figures["left_out"] = float(sum(sum(problem.failures.values()) for problem in asked))
    if len(asked) < len(problems):
        figures["prompts_skipped"] = float(len(problems) - len(asked))
    for problem in asked:
        for cause, count in problem.failures.items():
            figures[f"failed/{cause}"] = figures.get(f"failed/{cause}", 0.0) + count
        for status, count in problem.exits.items():
            share = count / sum(len(one.rewards) for one in asked)
            figures[f"exit/{status}"] = figures.get(f"exit/{status}", 0.0) + share
    return figures


def by_label(problems: Sequence[GroupReport], attribute: str) -> Mapping[str, list[GroupReport]]:
    """Return problems by label, in the form for metric names; unlabelled problems are left out."""
    labels: dict[str, list[GroupReport]] = {}
    for problem in problems:
        label = _NO_NAME.sub("_", getattr(problem, attribute)).strip("_")
        if label:
            labels.setdefault(label, []).append(problem)
    return dict(sorted(labels.items()))


def _pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is right, 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374, eq. 1. k above `samples` counts
    as `samples`.
    """
    k = min(k, samples)
    return 1.0 - comb(samples - right, k) / comb(samples, k)
