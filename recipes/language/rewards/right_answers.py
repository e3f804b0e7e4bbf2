"""A start-up check of a data set's reference answers against the configured rule.

A reference answer that does not pass its own rule can never be matched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data.problem_sources import check_file, load_problems, read_file
from recipes.language.data.problems import Problem
from recipes.language.rewards.matching.cleaning import boxed_content
from recipes.language.rewards.matching.final_answer import answer_number
from recipes.language.rewards.matching.readings import Other, read, text_of
from recipes.language.rewards.matching.rules import RULES, Verdict, is_expression
from recipes.language.rewards.programs import fault_of_tests
from recipes.language.rewards.scoring import PROGRAMS, AnswerScorer, Item, Scorer, item_of
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference
from rlinf_core.suggest import excerpt

# The kind of a scorer that judges reference answers by themselves.
GOLDS: Final = "right answers"
# The rules whose reference answers can be checked without a custom function.
CHECKED: Final = ("exact", "boxed", "number", "math", PROGRAMS)
# Above this share of failing reference answers, a file and its rule do not fit.
MOST_FAILING: Final = 0.5
_SHOWN: Final = 3

# Problems and their places.
_Batch: TypeAlias = tuple[Sequence[Problem], Sequence[str]]


def gold_verdict(rule: str, answer: str) -> Verdict:
    """Return the rule's verdict on a reference answer given as an answer.

    Equal text is not enough: no other spelling would match a text that is neither a number nor an expression.
    """
    if rule == PROGRAMS:
        fault = fault_of_tests(answer)
        return Verdict(0.0, fault) if fault else Verdict(1.0, "tests")
    content = boxed_content(answer)
    shown = answer if content is None else content
    reading = read(shown)
    if not text_of(reading).strip():
        return Verdict(0.0, "it is empty")
    if rule == "number" and answer_number(answer) is None:
        return Verdict(0.0, "it is not a number")
    if rule == "math" and isinstance(reading, Other) and not is_expression(shown):
        return Verdict(0.0, "math-verify cannot parse it")
    text = answer if rule in ("exact", "number") else rf"\boxed{{{shown}}}"
    return RULES[rule](text, answer)


# The time limit of checking reference answers, in seconds; a warning counts the rest.
_SECONDS: Final = 120.0
_AT_ONCE: Final = 64
# The numbers of reference answers to try with a custom function, which may cost money, and with reasoning-gym.
_ASKED_OF_FUNCTION: Final = 8
_ASKED_OF_TASK: Final = 64

# Programs that solve nothing, and the number of problems to try each on: tests that they pass are worthless.
_CANARIES: Final = {
    "only ends": "import os\nos._exit(0)",
    "prints its own source's marks": "import sys\nprint(*sys.argv, *vars(sys.modules['__main__']), sep='\\n')",
}
_CANARY_PROBLEMS: Final = 4


def check_right_answers(
    data: LanguageDataConfig, rule: str, scorer: AnswerScorer, *, share: tuple[int, int], must_fit: bool
) -> Difference | None:
    """Score a worker's share of the reference answers as answers: all answers of files by a rule, or a few by a custom
    function or reasoning-gym.

    Args:
        data: the problems.
        rule: the value of `reward.reward_type`.
        scorer: a scorer by this rule.
        share: the number of the worker, and of all workers that share the problems.
        must_fit: whether the rule scores every answer, so that most reference answers must pass it.

    Returns:
        The number of reference answers, or warnings of those that fail and of those not checked in time; None if there
            are none to check. With a custom function, which may require another form of answers, failures only give a
            warning.

    Raises:
        ConfigError: more than half of the reference answers fail a rule that must fit.
    """
    deadline = time.monotonic() + _SECONDS
    by_rule = rule in CHECKED and data.source == "files"
    batches: Iterable[_Batch] = ()
    if by_rule:
        batches = _batches_of_files(data, share)
    elif ":" in rule or rule == "reasoning_gym":
        batches = [_first_problems(data, _ASKED_OF_FUNCTION if ":" in rule else _ASKED_OF_TASK, share)]
    faults, checked, late = list[str](), 0, 0
    with Scorer(GOLDS, settings={"rule": rule}) as golds:
        for problems, places in batches:
            if time.monotonic() > deadline:
                late += len(problems)
                continue
            if by_rule:
                scores = golds.score_all([Item(text="", answer=problem.answer) for problem in problems])
            else:
                scores = scorer.score_all([item_of(problem, problem.answer) for problem in problems])
            faults += [
                f"{place}: `{excerpt(problem.answer, 40)}`: {score.reason}"
                for place, problem, score in zip(places, problems, scores, strict=True)
                if not score.correct
            ]
            checked += len(problems)
    if not checked:
        return None
    rest = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    complaint = (
        f"{len(faults)} of {checked} reference answers do not pass `reward_type: {rule}`"
        f" ({'; '.join(faults[:_SHOWN])}{rest})"
    )
    if by_rule and must_fit and len(faults) > MOST_FAILING * checked:
        raise ConfigError(
            complaint,
            why="no answer to such a problem can be correct",
            help="set `reward.reward_type` to the rule that fits the data, or `data.answer_key` to the key of the"
            " answer",
        )
    warnings = [complaint] if faults else []
    if rule == PROGRAMS and data.source == "files":
        warnings += _earned_by_canaries(data, scorer, share)
    if late:
        warnings.append(f"{late} reference answers were not checked within {_SECONDS:g} s")
    return Difference(note="; ".join(warnings) or f"{checked} reference answers", agrees=not warnings)


def _earned_by_canaries(data: LanguageDataConfig, scorer: AnswerScorer, share: tuple[int, int]) -> list[str]:
    """Return a warning for each program that solves nothing, yet passes tests of the first problems."""
    problems, places = _first_problems(data, _CANARY_PROBLEMS, share)
    warnings: list[str] = []
    for name, program in _CANARIES.items():
        text = f"```python\n{program}\n```"
        scores = scorer.score_all([item_of(problem, text) for problem in problems])
        passed = [place for place, score in zip(places, scores, strict=True) if score.correct]
        if passed:
            warnings.append(
                f"a program that {name} passes the tests of {len(passed)} of {len(problems)} problems ({passed[0]})"
            )
    return warnings


def _batches_of_files(data: LanguageDataConfig, share: tuple[int, int]) -> Iterator[_Batch]:
    """Yield a worker's share of the problems of all files, with their places."""
    rank, workers = share
    for path in (*data.train_files, *data.val_data_paths):
        problems = read_file(path, data.prompt_key, data.answer_key)
        numbers = range(rank, len(problems), workers)
        for first in range(0, len(numbers), _AT_ONCE):
            chosen = numbers[first : first + _AT_ONCE]
            yield [problems[number] for number in chosen], [problems.places[number] for number in chosen]


def _first_problems(data: LanguageDataConfig, most: int, share: tuple[int, int]) -> _Batch:
    """Return a worker's share of the first problems that have a reference answer, with their places."""
    rank, workers = share
    if data.source == "files":
        # A run that only evaluates may have no training files.
        path = (data.train_files or data.val_data_paths)[0]
        listed = check_file(path, data.prompt_key, data.answer_key, most)
        first, places = [listed[number] for number in range(len(listed))], list(listed.places)
    elif data.source in ("sums", "reasoning_gym"):
        made = load_problems(data, evaluation=False)
        first = [made[number] for number in range(min(most, len(made)))]
        places = [f"problem {number}" for number in range(len(first))]
    else:
        return (), ()
    numbers = [number for number in range(rank, len(first), workers) if first[number].answer]
    return [first[number] for number in numbers], [places[number] for number in numbers]
