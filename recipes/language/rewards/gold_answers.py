"""Checks of reference answers against their own rule: one that does not pass can never be matched."""

from __future__ import annotations

from typing import Final, NamedTuple

from recipes.language.rewards.matching.cleaning import boxed_content
from recipes.language.rewards.matching.final_answer import answer_number
from recipes.language.rewards.matching.readings import Other, read, text_of
from recipes.language.rewards.matching.rules import RULES, Verdict, is_expression
from recipes.language.rewards.programs import fault_of_tests
from recipes.language.rewards.scoring import PROGRAMS
from rlinf_core import ConfigError
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
