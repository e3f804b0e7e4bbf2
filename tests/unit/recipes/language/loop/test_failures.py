from __future__ import annotations

import pytest

from recipes.language.loop.arrivals import Failures
from recipes.language.prompts.prompt_messages import GroupReport
from rlinf_core.errors import RunError


def report(scored: int, failures: dict[str, int], failure: str = "") -> GroupReport:
    return GroupReport(
        slot=0,
        step=3,
        problem=0,
        source="sums",
        difficulty="",
        tokens=0,
        rewards=(1.0,) * scored,
        lengths=(1,) * scored,
        truncated=0,
        failures=failures,
        parts={},
        oldest=0,
        version_sum=0,
        failure=failure,
    )


def test_a_step_in_which_most_answers_fail_ends_the_run() -> None:
    failures = Failures()
    failures.count(report(4, {}))
    failures.count(report(1, {"timeout": 2, "error": 1}, "why the first"))
    failures.check("step 3", 8, 0.5)

    failures.count(report(0, {"error": 4}, "another"))

    with pytest.raises(RunError, match="7 of 12 answers of step 3 failed: error 5, timeout 2") as caught:
        failures.check("step 3", 8, 0.5)
    assert "why the first" in str(caught.value)
    failures.check("step 3", 8, 0.6)


def test_the_first_few_answers_of_a_step_end_nothing() -> None:
    failures = Failures()
    failures.count(report(0, {"error": 4}, "a judge that wakes up"))
    failures.check("step 1", 8, 0.5)


def test_the_end_of_a_run_tells_of_all() -> None:
    failures = Failures()
    failures.count(report(3, {"crash": 1}, "killed"))
    assert str(failures) == "1 of 4 answers failed and were dropped: crash 1; the first: killed"
