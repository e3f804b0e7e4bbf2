"""A check of a data set's reference answers against the configured rule, before a run starts."""

from __future__ import annotations

import time
from typing import Final

from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data.problem_sources import read_file
from recipes.language.rewards.gold_answers import CHECKED, GOLDS, GoldFault, complaint, gold_error
from recipes.language.rewards.scoring import Item, Scorer

# Time limit for checking reference answers, in seconds; the remainder becomes a warning.
_SECONDS: Final = 120.0
_AT_ONCE: Final = 64


def check_right_answers(data: LanguageDataConfig, rule: str, *, share: tuple[int, int], must_fit: bool) -> str:
    """Hold a worker's share of the right answers of files against themselves.

    Args:
        data: the problems.
        rule: `reward.reward_type`; of a function nothing is known.
        share: number of the worker, and how many share the problems.
        must_fit: whether every answer is scored by the rule, so that most right answers must be right by it.

    Returns:
        A warning of those that are not right, and of those that there was no time for; "" for none.

    Raises:
        ConfigError: more than half of them are not right.
    """
    if rule not in CHECKED or data.source != "files":
        return ""
    rank, workers = share
    deadline = time.monotonic() + _SECONDS
    faults: list[GoldFault] = []
    checked = late = 0
    with Scorer(GOLDS, settings={"rule": rule}) as scorer:
        for path in (*data.train_data_paths, *data.val_data_paths):
            problems = read_file(path, data.prompt_key, data.answer_key)
            numbers = range(rank, len(problems), workers)
            for first in range(0, len(numbers), _AT_ONCE):
                chosen = numbers[first : first + _AT_ONCE]
                if time.monotonic() > deadline:
                    late += len(chosen)
                    continue
                answers = [problems[number].answer for number in chosen]
                scores = scorer.score_all([Item(text="", answer=answer) for answer in answers])
                faults += [
                    GoldFault(problems.places[number], answer, score.reason)
                    for number, answer, score in zip(chosen, answers, scores, strict=True)
                    if not score.correct
                ]
                checked += len(chosen)
    error = gold_error(rule, faults, checked)
    if error is not None and must_fit:
        raise error
    warnings = [complaint(rule, faults, checked)] if faults else []
    if late:
        warnings.append(f"{late} reference answers were not checked within {_SECONDS:g} s")
    return "; ".join(warnings)
