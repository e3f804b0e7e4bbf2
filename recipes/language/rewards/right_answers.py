"""A check of a data set's reference answers against the configured rule, before a run starts.

A reference answer that does not pass its own rule can never be matched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from recipes.language.answers.exits import Score
from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data.load_problems import load_problems
from recipes.language.data.problem_sources import check_file, read_file
from recipes.language.data.problems import Problem
from recipes.language.rewards.matching.cleaning import boxed_content
from recipes.language.rewards.matching.final_answer import answer_number
from recipes.language.rewards.matching.readings import Other, read, text_of
from recipes.language.rewards.matching.rules import RULES, Verdict, is_expression
from recipes.language.rewards.programs import fault_of_tests
from recipes.language.rewards.scoring import PROGRAMS, AnswerScorer, Item, Scorer
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference
from rlinf_core.suggest import excerpt

# The kind of a scorer that judges right answers by themselves.
GOLDS: Final = "right answers"
# The rules whose reference answers can be checked without a user's function.
CHECKED: Final = ("exact", "boxed", "number", "math", PROGRAMS)
# The share of right answers above which a file and its rule do not belong together.
MOST_FAILING: Final = 0.5
_SHOWN: Final = 3


class GoldFault(NamedTuple):
    """A right answer that its rule does not call right.

    Attributes:
        place: the place of the row.
        answer: the answer, as the row has it.
        reason: the reason that the rule gives.
    """

    place: str
    answer: str
    reason: str


def gold_verdict(rule: str, answer: str) -> Verdict:
    """Return the rule's verdict on a reference answer given as an answer.

    Equal text is not enough: text that is neither a number nor an expression is right in no other spelling.
    """
    fault = quick_fault(rule, answer)
    if fault:
        return Verdict(0.0, fault)
    if rule == PROGRAMS:
        return Verdict(1.0, "tests")
    if rule == "math" and isinstance(read(_shown(answer)), Other) and not is_expression(_shown(answer)):
        return Verdict(0.0, "math-verify cannot parse it")
    text = answer if rule in ("exact", "number") else rf"\boxed{{{_shown(answer)}}}"
    return RULES[rule](text, answer)


def quick_fault(rule: str, answer: str) -> str:
    """Return the fault of a reference answer, as far as it can be determined without math-verify; "" for none."""
    if rule == PROGRAMS:
        return fault_of_tests(answer)
    if not text_of(read(_shown(answer))).strip():
        return "it is empty"
    if rule == "number" and answer_number(answer) is None:
        return "it is not a number"
    return ""


def complaint(rule: str, faults: list[GoldFault], checked: int) -> str:
    """Return a sentence about failing reference answers: how many, and the first of them."""
    listed = "; ".join(f"{fault.place}: `{excerpt(fault.answer, 40)}`: {fault.reason}" for fault in faults[:_SHOWN])
    rest = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return f"{len(faults)} of {checked} reference answers do not pass `reward_type: {rule}` ({listed}{rest})"


def gold_error(rule: str, faults: list[GoldFault], checked: int) -> ConfigError | None:
    """Return the error about data whose reference answers mostly fail; None if at most half do."""
    if len(faults) <= MOST_FAILING * checked:
        return None
    return ConfigError(
        complaint(rule, faults, checked),
        why="no answer to such a problem can be correct",
        help="set `reward.reward_type` to the rule that fits the data, or `data.answer_key` to the key of the answer",
    )


def _shown(answer: str) -> str:
    content = boxed_content(answer)
    return answer if content is None else content


# Time limit for checking reference answers, in seconds; the remainder becomes a warning.
_SECONDS: Final = 120.0
_AT_ONCE: Final = 64
# Right answers that a user's function is asked about, which may cost money, and a task of reasoning-gym.
_ASKED_OF_FUNCTION: Final = 8
_ASKED_OF_TASK: Final = 64

# Programs that solve nothing, and problems that each is tried on: what passes them rewards nothing that was learned.
_CANARIES: Final = {
    "only ends": "import os\nos._exit(0)",
    "prints its own source's marks": "import sys\nprint(*sys.argv, *vars(sys.modules['__main__']), sep='\\n')",
}
_CANARY_PROBLEMS: Final = 4

# Scores right answers as if they had been given.
Judge: TypeAlias = Callable[[Sequence[Problem]], list[Score]]


@dataclass(slots=True)
class _Tally:
    """Right answers that were looked at, and those that are not right."""

    faults: list[GoldFault] = field(default_factory=list[GoldFault])
    checked: int = 0
    late: int = 0

    def look(self, judge: Judge, problems: Sequence[Problem], places: Sequence[str], deadline: float) -> None:
        """Look at some right answers, unless it is late."""
        if time.monotonic() > deadline:
            self.late += len(problems)
            return
        scores = judge(problems)
        self.faults += [
            GoldFault(place, problem.answer, score.reason)
            for place, problem, score in zip(places, problems, scores, strict=True)
            if not score.correct
        ]
        self.checked += len(problems)


def check_right_answers(
    data: LanguageDataConfig, rule: str, scorer: AnswerScorer, *, share: tuple[int, int], must_fit: bool
) -> Difference | None:
    """Hold a worker's share of the right answers against themselves: all of files by a rule, some by a function or a
    task of reasoning-gym.

    Args:
        data: the problems.
        rule: `reward.reward_type`.
        scorer: scores answers by it.
        share: number of the worker, and how many share the problems.
        must_fit: whether every answer is scored by the rule, so that most right answers must be right by it.

    Returns:
        How many are right, with a warning of those that are not, and of those that there was no time for. None where
        there are none to look at. A function may want its answers in a form that right answers of the data do not
        have: nothing but a warning comes of that.

    Raises:
        ConfigError: more than half of them are not right by a rule.
    """
    tally = _Tally()
    deadline = time.monotonic() + _SECONDS
    if rule in CHECKED and data.source == "files":
        with Scorer(GOLDS, settings={"rule": rule}) as golds:

            def judge(problems: Sequence[Problem]) -> list[Score]:
                return golds.score_all([Item(text="", answer=problem.answer) for problem in problems])

            _look_at_files(tally, data, judge, share, deadline)
        error = gold_error(rule, tally.faults, tally.checked)
        if error is not None and must_fit:
            raise error
    elif ":" in rule or rule == "reasoning_gym":
        problems, places = _first_problems(data, _ASKED_OF_FUNCTION if ":" in rule else _ASKED_OF_TASK, share)
        items = [Item.of(problem, problem.answer) for problem in problems]
        tally.look(lambda _: scorer.score_all(items), problems, places, deadline)
    if not tally.checked:
        return None
    warnings = [complaint(rule, tally.faults, tally.checked)] if tally.faults else []
    if rule == PROGRAMS and data.source == "files":
        warnings += _earned_by_canaries(data, scorer, share)
    if tally.late:
        warnings.append(f"{tally.late} reference answers were not checked within {_SECONDS:g} s")
    return Difference(note="; ".join(warnings) or f"{tally.checked} reference answers", agrees=not warnings)


def _earned_by_canaries(data: LanguageDataConfig, scorer: AnswerScorer, share: tuple[int, int]) -> list[str]:
    """Return a warning for each program that solves nothing and passes tests of the first problems all the same."""
    problems, places = _first_problems(data, _CANARY_PROBLEMS, share)
    warnings: list[str] = []
    for name, program in _CANARIES.items():
        text = f"```python\n{program}\n```"
        scores = scorer.score_all([Item.of(problem, text) for problem in problems])
        passed = [place for place, score in zip(places, scores, strict=True) if score.correct]
        if passed:
            warnings.append(
                f"a program that {name} passes the tests of {len(passed)} of {len(problems)} problems ({passed[0]})"
            )
    return warnings


def _look_at_files(
    tally: _Tally, data: LanguageDataConfig, judge: Judge, share: tuple[int, int], deadline: float
) -> None:
    rank, workers = share
    for path in (*data.train_files, *data.val_data_paths):
        problems = read_file(path, data.prompt_key, data.answer_key)
        numbers = range(rank, len(problems), workers)
        for first in range(0, len(numbers), _AT_ONCE):
            chosen = numbers[first : first + _AT_ONCE]
            places = [problems.places[number] for number in chosen]
            tally.look(judge, [problems[number] for number in chosen], places, deadline)


def _first_problems(
    data: LanguageDataConfig, most: int, share: tuple[int, int]
) -> tuple[Sequence[Problem], Sequence[str]]:
    """Return a worker's share of the first problems that have a right answer, with their places."""
    rank, workers = share
    if data.source == "files":
        listed = check_file(data.train_files[0], data.prompt_key, data.answer_key, most)
        first, places = [listed[number] for number in range(len(listed))], list(listed.places)
    elif data.source in ("sums", "reasoning_gym"):
        made = load_problems(data, evaluation=False)
        first = [made[number] for number in range(min(most, len(made)))]
        places = [f"problem {number}" for number in range(len(first))]
    else:
        return (), ()
    numbers = [number for number in range(rank, len(first), workers) if first[number].answer]
    return [first[number] for number in numbers], [places[number] for number in numbers]
