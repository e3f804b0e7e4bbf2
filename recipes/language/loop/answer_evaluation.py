"""Evaluation metrics of a language model: shares of right answers by data set and difficulty."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Final

from recipes.language.prompts.prompt_messages import GroupReport
from rlinf_core.statistics import mean, wilson_interval

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
    for `samples`, by the unbiased `pass_at_k`; `mean@<samples>`, the mean over all answers, is another name of
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
        metrics |= _with_interval(f"pass@{size}", [pass_at_k(of, count, size) for count, of in counts if of >= size])
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


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is right, 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374, eq. 1. k above `samples` counts
    as `samples`.
    """
    k = min(k, samples)
    return 1.0 - comb(samples - right, k) / comb(samples, k)
