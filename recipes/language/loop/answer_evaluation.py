"""Metrics of an evaluation of a language model: shares of right answers by data set and by difficulty."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Final

from recipes.language.prompts.prompt_messages import GroupReport
from rlinf_core.statistics import mean, wilson_interval

# Data sets with more difficulty labels get no figures per label: they would be too many to read.
MOST_DIFFICULTIES: Final = 12
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_.@+=-]+")


def evaluation_metrics(problems: Sequence[GroupReport], samples: int) -> dict[str, float]:
    """Return accuracy with 95 % intervals, and rewards.

    Names are `eval/<figure>` over all problems, `eval/<data set>/<figure>`, and `eval/<data set>/<difficulty>/<figure>`
    for data sets whose problems have several labels of difficulty. Figures are those of `shares`, `reward` (the mean,
    without what training takes off), `length` (tokens of an answer), `answers` (the number of scored ones), `cut_off`
    (those of them that ended at the limit of tokens), `left_out` (those that could not be scored), where prompts were
    too long `prompts_skipped`, and for each cause for which answers could not be scored `failed/<cause>`.
    `exit/<status>` is the share of answers with that bad end.

    Args:
        problems: what was asked; one whose prompt was too long has no answers, and those that could not be scored are
            counted by cause.
        samples: answers to each problem.
    """
    metrics = _figures(problems, samples, "eval")
    for source, part in _by(problems, "source").items():
        metrics |= _figures(part, samples, f"eval/{source}")
        labels = _by(part, "difficulty")
        if 1 < len(labels) <= MOST_DIFFICULTIES:
            for label, chosen in labels.items():
                metrics |= _figures(chosen, samples, f"eval/{source}/{label}")
    return metrics


def progress_ends(failures: Mapping[str, int], exits: Mapping[str, int]) -> Mapping[str, int]:
    """Return answers that could not be scored by cause, those among them that ran into a time limit and count."""
    return {**failures, "timeout": failures.get("timeout", 0) + exits.get("time_limit", 0)}


def progress_text(scored: int, wanted: int, failures: Mapping[str, int]) -> str:
    """Return how far an evaluation is, with the answers that could not be scored: `12 of 64 answers, 3 timed out`."""
    words = {"timeout": "timed out"}
    failed = [f"{count} {words.get(cause, f'failed ({cause})')}" for cause, count in sorted(failures.items()) if count]
    return ", ".join([f"{scored} of {wanted} answers", *failed])


def scoring_progress(
    poll: Callable[[], list[tuple[int, Mapping[str, int]]]], wanted: int, report: Callable[[str], None]
) -> Callable[[], None]:
    """Return what reports how far an evaluation is, whenever it is called and there is news from reward workers.

    Args:
        poll: returns what they have scored since the last call: answers, and those that could not be, by cause.
        wanted: the number of answers of the evaluation.
        report: takes the words.
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

    `pass@1` is the chance that an answer is right, `pass@k` that one of k is, for k of 2, 4, 8 up to `samples`, by the
    unbiased estimate of `pass_at_k`; `mean@<samples>` is the mean of all answers, which is `pass@1` by its other name.
    `<name>_low` and `<name>_high` are Wilson's interval of as many trials as there are problems. Answers to one problem
    depend on each other, so they are not independent trials; and a problem's estimate, a number from 0 to 1, varies no
    more than one that is 0 or 1 with the same mean, so the interval is wide enough.

    Args:
        right: the number of right answers to each problem.
        samples: answers to each problem.
        judged: how many answers to each problem could be scored; a problem with fewer than k says nothing of `pass@k`.
            None: all of them.
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
    share = mean(estimates)
    low, high = wilson_interval(share * len(estimates), len(estimates))
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def _figures(problems: Sequence[GroupReport], samples: int, prefix: str) -> dict[str, float]:
    asked = [problem for problem in problems if not problem.skipped]
    figures = shares(
        [sum(problem.corrects) for problem in asked], samples, [len(problem.corrects) for problem in asked]
    )
    figures["reward"] = mean([reward for problem in asked for reward in problem.rewards])
    figures["length"] = mean([length for problem in asked for length in problem.lengths])
    figures["answers"] = float(sum(len(problem.corrects) for problem in asked))
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
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def _by(problems: Sequence[GroupReport], attribute: str) -> Mapping[str, list[GroupReport]]:
    """Return problems by label, as part of a metric's name; unlabelled problems are left out."""
    by_label: dict[str, list[GroupReport]] = {}
    for problem in problems:
        label = _NO_NAME.sub("_", getattr(problem, attribute)).strip("_")
        if label:
            by_label.setdefault(label, []).append(problem)
    return dict(sorted(by_label.items()))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right, 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374, eq. 1. k above `samples` counts
    as `samples`.
    """
    k = min(k, samples)
    return 1.0 - comb(samples - right, k) / comb(samples, k)
