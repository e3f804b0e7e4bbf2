"""The yaml-test-suite: valid YAML has its value or is refused, and the exceptions are these and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.reading import decode, read_document
from rlinf_core.config.tree import to_data

CASES = Path(__file__).parents[3] / "data" / "yaml-test-suite" / "cases.jsonl"

# Valid YAML that is refused, by the code that says so.
REFUSED = {
    # A configuration is one document of plain data, and its keys are names.
    "several-documents": "35KP 6XDY 6ZKB 7Z25 9DXL 9KAX JHB9 KSS4 L383 M7A3 PUW8 RZT7 U9NS W4TN",
    "unknown-tag": "2XXW 565N 5TYM 6CK3 6WLZ 7FWL 9WXW C4HZ CC74 CUP7 J7PZ M5C3 P76L UGM3 Z67P Z9M4",
    "complex-key": "4FJ6 6BFJ 6PBE KK5P LX3P M2N8/01 M5DY Q9WF RZP5 SBG9 V9D5 X38W XW4D",
    "null-key": "2JQS 6M2F DFF7 FH7J FRK4 M2N8/00 NHX8 NKF9 PW8X S3PD SM9W/01 UKK6/00",
    # What another version would mean by `on` or `010` is not what is read.
    "yaml-version": "BEC7 MUS6/02 MUS6/03 MUS6/04",
    # A tab below a space in the indentation, and one that starts a further line of an unquoted text: nobody sees it.
    "tab-indentation": "DK95/00 HS5T UV7Q",
    # What ruamel.yaml refuses: keys over several lines in braces, `[: a]`, `...` before any content, blocks of text
    # below deeper empty lines.
    "yaml-syntax": "4MUZ/00 4MUZ/01 4MUZ/02 4QFQ 5MUD 652Z 9MMW 9SA2 CFD4 DWX9 HM87/01 HWV9 K3WX NB6Z NJ66 QT73 R4YG"
    " T26H UT92 VJP3/01 WZ62",
}

# What is no YAML and is read all the same: it can mean but one thing.
ACCEPTED = {
    "9C9N": "lines within brackets need no indentation: `key: {` is closed by a `}` in the first column everywhere",
    "G5U8": "a `-` within brackets is a text",
    "YJV2": "the same",
    "Y79Y/003": "the same, of a line that starts with a tab",
    "DK95/01": "lines of a quoted text need no indentation",
    "QB6E": "the same, without a tab",
    "9MMA": "a `%YAML` line alone is a file without content, which `read` refuses",
    "Y79Y/000": "a block of text that holds a tab alone is empty",
}


class Case(NamedTuple):
    id: str
    text: str
    fail: bool
    documents: list[Any] | None


def cases() -> Iterator[Case]:
    for line in CASES.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        yield Case(case["id"], case["yaml"], case.get("fail", False), case.get("json"))


@cache
def reading(text: str) -> tuple[str | None, object]:
    """Return the code of the first error, None for a text without one, and the value."""
    diagnostics = Diagnostics()
    source = decode("case.yaml", text.encode(), diagnostics)
    root = read_document(source, diagnostics)[1] if source else None
    errors = [finding.code for finding in diagnostics if finding.severity is Severity.ERROR]
    return (errors[0] if errors else None), None if root is None else to_data(root)


def test_all_cases_are_there() -> None:
    assert len(list(cases())) == 402


def test_no_value_is_another_one() -> None:
    wrong: list[str] = []
    for case in cases():
        error, value = reading(case.text)
        if not case.fail and error is None and case.documents is not None and [value] != (case.documents or [None]):
            wrong.append(f"{case.id}: {value!r} for {case.documents!r}")
    assert wrong == []


def test_refused_valid_cases_are_those_agreed() -> None:
    refused: dict[str, list[str]] = {}
    for case in cases():
        error, _ = reading(case.text)
        if not case.fail and error is not None:
            refused.setdefault(error, []).append(case.id)
    assert {code: " ".join(sorted(ids)) for code, ids in refused.items()} == REFUSED


def test_accepted_invalid_cases_are_those_agreed() -> None:
    accepted = {case.id for case in cases() if case.fail and reading(case.text)[0] is None}
    assert accepted == set(ACCEPTED)
