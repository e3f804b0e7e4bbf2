"""Extraction of final answers: the boxed text, the text stated as the answer, or the last number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from recipes.language.rewards.matching.cleaning import boxed_content, cleaned, unwrapped
from recipes.language.rewards.matching.numbers import Number, number_in_clean
from recipes.language.text.text_tokens import without_thought

_SAID: Final = re.compile(
    r"\banswer\b(?:\s+(?:to|for|of|here|now|must|should|will|would)\b[^.\n:=]{0,80}?)?(?:\*\*)?\s*"
    r"(?:(?:is|are|be|equals?)\b(?:\s+(?:that|therefore|thus|simply|just|approximately|about|exactly|option|choice))?"
    r"|:|=)[:\s]*",
    re.IGNORECASE,
)
_SAID_FIRST: Final = re.compile(r"(\S+) is (?:the|our|my) (?:final |correct |right )?answer\b", re.IGNORECASE)
_SAID_IN_CHINESE: Final = re.compile("答案(?:就|应该|應該)?[是为為]?[:：]?\\s*")
_MARKED: Final = re.compile(r"####[ \t]*")
# The end of a marked text, if the model continues with the next problem.
_MARK_END: Final = re.compile(r"\s*(?:\.{3}|\u2026)?\s*####")
_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
# Words that lead from a denied answer to the right one.
_BUT: Final = (
    r"\s+but(?:\s+(?:rather|instead))?"
    r"|\s*[,;:\u2013\u2014-]\s*(?:rather|instead|(?:it|the\s+(?:correct\s+|right\s+)?answer)(?:\s+(?:is|should\s+be)|['\u2019]s))"
)
_DENIED: Final = re.compile(
    r"\banswer\s+(?:(?:is|are|was|can|could|should|must)(?:\s+not|n['\u2019]t)|cannot)(?:\s+be)?\b\s*"
    r"(?P<value>[^A-Za-z\s.]|[A-J]\b)?"
    rf"(?:(?:[^.\n]|\.(?=[0-9]))*?,?(?P<but>{_BUT})\b|[^\n]*?(?:\.(?=\s|$)|(?=\n|$)))",
    re.IGNORECASE,
)
# `It is 5, not 6.`
_NOT_THIS: Final = re.compile(
    r"(?<=[0-9})%$*])(?:,?\s+and\s+not|,\s+not|,?\s+(?:rather\s+than|instead\s+of))\s+"
    r"[-+\u2212$\\(]?[0-9][^\s]*?(?=[.;!]?(?:\s|$))"
)
_SENTENCE_END: Final = re.compile(r"\n|(?<=[^\s.])[.!?](?=\s|$)")
_FORMULA: Final = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_REASONS: Final = re.compile(r",?\s+(?:because|since|so|which|as|where|for|when|if|after|by)\b|[,;]\s|\s\(")

_BLANK_CURRENCY: Final = re.compile(r"([-+]?)\s*(?:\\?\$|[€£¥])\s*(?=[-+]?\s*[0-9.])")
_OPERATOR_ENDS: Final = re.compile(r"(?:[-+*/^=×÷(\[{<>]|\\(?:times|cdot|div|le|ge|pm)|(?<![A-Za-z])[xX])$")
_OPERATOR_BEGINS: Final = re.compile(
    r"[*/^=×÷)\]}<>!%°]|[-+](?![0-9.])|\\(?:times|cdot|div|le|ge|pm)(?![A-Za-z])|[xX]$"
)
_PLAIN_WORD: Final = re.compile(r"\W?[A-Za-z]{2}")
_WHOLE: Final = re.compile(r"[-+]?[0-9]+")
_FRACTION: Final = re.compile(r"[0-9]+/[0-9]+|\\frac")
_DIGIT: Final = re.compile(r"[-+]?[0-9]")
_THOUSANDS: Final = re.compile(r"[-+]?[1-9][0-9]{0,2}(?: [0-9]{3})*")
_SIGNED: Final = re.compile(r"[-+\u2013\u2014][0-9.]")
_NUMBER_ENDS: Final = tuple("0123456789}%")
_LONG_DASHES: Final = ("\u2013", "\u2014")
_THREE: Final = re.compile(r"[0-9]{3}(?![0-9])")
_LISTED: Final = re.compile(r"[-+]?[0-9][0-9.,]*,$")
_MEMBER: Final = re.compile(r"[-+]?[0-9]|[A-Za-z]$|[A-Za-z]=")
_UNDECIDED: Final = re.compile(r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\[bp]?mod(?![A-Za-z])")
_JOINS: Final = ("or", "and")
# Inequations and several statements, whose last right side is not the answer.
_NO_EQUATION: Final = re.compile(
    r"\\(?:ne|not)(?![A-Za-z])|!=|=.*(?:(?<![A-Za-z])(?:or|and)(?![A-Za-z])|\\lor(?![A-Za-z])).*="
)


def answered(text: str) -> str:
    """Return a text without its thought, reduced to its last `<answer>`...`</answer>` if there is one, and without
    denied answers.
    """
    text = without_thought(text)
    tagged = list(_TAGGED.finditer(text))
    if tagged and tagged[-1].group(1).strip() and boxed_content(text[tagged[-1].end() :]) is None:
        text = tagged[-1].group(1)
    return _NOT_THIS.sub("", _DENIED.sub(_without_denial, text))


def _without_denial(match: re.Match[str]) -> str:
    """Return `answer is ` for `answer is not 6 but`, as in `not 6 but 5`, and "" for `answer is not obvious`."""
    return "answer is " if match["value"] and match["but"] else ""


def said_answer(text: str) -> str | None:
    """Return the stated answer of a text, or None.

    It is the first number after `####`, as in GSM8K's grader, as a model that continues writes the next problem's.
    Without a number there, as in headings, it is the text after the last `####`, or else after the last `answer is`.
    """
    marked = [_sentence(_MARK_END.split(text[match.end() :])[0]) for match in _MARKED.finditer(text)]
    numbers = (said for said in marked if number_in_clean(unwrapped(cleaned(said))[0]) is not None)
    if number := next(numbers, None):
        return number
    for stated in (
        marked,
        *(
            [_sentence(text[match.end() :]) for match in pattern.finditer(text)]
            for pattern in (_SAID, _SAID_IN_CHINESE)
        ),
    ):
        if stated and stated[-1]:
            return stated[-1]
    first = list(_SAID_FIRST.finditer(text))
    return first[-1].group(1) if first else None


def _sentence(text: str) -> str:
    """Return the first sentence or line of a text, without blanks around it."""
    text = text.lstrip()
    end = _SENTENCE_END.search(text)
    return (text if end is None else text[: end.start()]).strip()


def candidates(text: str) -> Iterator[str]:
    """Yield candidate answers of a text without boxes, the clearest first."""
    said = said_answer(text)
    if said is None:
        yield text
        # Skip a plain number: `answer_number` decides which number is the answer.
        yield from (run for run in list(_runs(text))[-1:] if number_in_clean(run) is None)
        return
    yield said
    formula = _FORMULA.search(said)
    if formula is not None:
        yield next(part for part in formula.groups() if part is not None)
    shorter = _REASONS.search(said)
    if shorter is not None:
        yield said[: shorter.start()]
    yield from list(_runs(said, bullets=False))[:1]


def answer_number(text: str) -> Number | None:
    r"""Return the number that a text gives as its answer, or None.

    It is the number in the last `\boxed{}`; else the first number after `####`, or after the last `answer is`; else the
    right side of the last equation; else the last number. In each place, an expression that is not a number, such as
    `(1,2)` or `2^3`, gives None.
    """
    expression = _answer_expression(text)
    return None if expression is None else _right_side(expression)


def is_undecided(text: str) -> bool:
    """Return whether the answer of a text is several numbers, as in `1 or 2`, or a residue class."""
    expression = _answer_expression(text)
    return expression is not None and _UNDECIDED.search(expression) is not None


def _answer_expression(text: str) -> str | None:
    boxed = boxed_content(text)
    if boxed is not None:
        return unwrapped(cleaned(boxed))[0]
    whole = unwrapped(cleaned(text))[0]
    if number_in_clean(whole) is not None:
        return whole
    said = said_answer(text)
    runs = [] if said is None else list(_runs(said, bullets=False))
    if runs:
        return runs[0]
    runs = list(_runs(text))
    return next((run for run in reversed(runs) if "=" in run), runs[-1] if runs else None)


def _right_side(run: str) -> Number | None:
    """Return the number that an expression is, or the right side of its last equality or approximation."""
    run = run.replace(r"\approx", "=")
    whole = number_in_clean(run)
    if whole is not None or "=" not in run or _NO_EQUATION.search(run):
        return whole
    return number_in_clean(unwrapped(run.rpartition("=")[2])[0])


def _runs(text: str, *, bullets: bool = True) -> Iterator[str]:
    """Yield the complete expressions of a text that have digits, cleaned.

    Words, and names with digits in them such as `H2O` or `2nd`, are not expressions.

    Args:
        text: the text.
        bullets: whether a dash and a blank at the start of a line mark a list item, not a negative number.
    """
    lines = (_BLANK_CURRENCY.sub(r" \1", cleaned(line)) for line in text.splitlines())
    for line in lines:
        chunks = re.sub(r"\\[()\[\]]|\$|\*\*|`|[\u2e80-\u9fff\uac00-\ud7ff]+", " ", line).split()
        at = 0
        while at < len(chunks):
            end = _end_of_run(chunks, at, bullets=bullets)
            run = _trimmed(" ".join(chunks[at:end]))
            # A list at the end of a sentence is one answer; before a word, only its last item is.
            if end < len(chunks) and end - at > 1 and all(_LISTED.match(chunk) for chunk in chunks[at : end - 1]):
                run = _trimmed(chunks[end - 1])
            at = end
            if any(character in "0123456789" for character in run) and not _is_name(run):
                yield run


def _end_of_run(chunks: list[str], at: int, *, bullets: bool) -> int:
    """Return the index of the first chunk after the expression that starts at index `at`."""
    end = at + 1
    while end < len(chunks):
        before, after = chunks[end - 1], chunks[end]
        # A dash between words, or one that begins a line, is not an operator.
        if before in ("-", "+", "*") and end - 1 == at and (at or bullets):
            break
        run = " ".join(chunks[at:end])
        is_open = any(run.count(begin) > run.count(close) for begin, close in ("()", "[]"))
        joined = (
            (is_open and not _PLAIN_WORD.match(after))
            or run.count("{") > run.count("}")
            or ("\\" in before + after and _is_formula(before) and _is_formula(after))
            or (_WHOLE.fullmatch(before) and _FRACTION.match(after))
            or (_LISTED.match(before) and _DIGIT.match(after))
            or (before[-1:].isdigit() and after in _JOINS and _MEMBER.match("".join(chunks[end + 1 : end + 3])))
            or (before in _JOINS and end - 1 > at)
            or (_THOUSANDS.fullmatch(run) and _THREE.match(after))
            # `453 -525` is a difference or a range, not a number.
            or (before[-1:] in _NUMBER_ENDS and _SIGNED.match(after))
            or (
                before[-1:] in _NUMBER_ENDS
                and after in _LONG_DASHES
                and _DIGIT.match(" ".join(chunks[end + 1 : end + 2]))
            )
            or (before in _LONG_DASHES and end - 1 > at)
            or _OPERATOR_ENDS.search(before)
            or _OPERATOR_BEGINS.match(after)
        )
        if not joined:
            break
        end += 1
    return end


def _is_formula(chunk: str) -> bool:
    """Return whether a chunk has a command or a digit, or is the name of a variable."""
    return bool(re.search(r"\\[A-Za-z]|[0-9]", chunk)) or (len(chunk) == 1 and chunk not in "aAI")


def _trimmed(run: str) -> str:
    """Return an expression without the punctuation and emphasis around it."""
    before = ""
    while run != before:
        before = run
        run = run.strip(" *_`\"'").rstrip(".,;:!?").lstrip(":,;")
        # Count both kinds of brackets together, as a half-open interval mixes them.
        opened, closed = (sum(run.count(mark) for mark in marks) for marks in ("([", ")]"))
        if closed > opened and run.endswith((")", "]")):
            run = run[:-1]
        if opened > closed and run.startswith(("(", "[")):
            run = run[1:]
    return unwrapped(run)[0]


def _is_name(run: str) -> bool:
    r"""Return whether an expression is a word with digits in it: `cm^2`, `H2O`, `2nd`, `3D`."""
    if number_in_clean(run) is not None:
        return False
    return bool(
        re.fullmatch(r"[A-Za-z][A-Za-z/]*(?:[-_]?[0-9]+|\^\{?-?[0-9]+\}?)[A-Za-z0-9]*|[0-9]+(?:st|nd|rd|th|D|d)", run)
    )
