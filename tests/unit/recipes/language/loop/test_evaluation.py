from __future__ import annotations

import random
from itertools import combinations
from typing import NamedTuple

import pytest

from recipes.language.loop.answer_evaluation import (
    MOST_DIFFICULTIES,
    evaluation_metrics,
    pass_at_k,
    progress_text,
    shares,
)
from rlinf_core.statistics import mean


class Judged(NamedTuple):
    source: str = "sums"
    difficulty: str = ""
    rewards: tuple[float, ...] = ()
    corrects: tuple[bool, ...] = ()
    failures: dict[str, int] = {}  # noqa: RUF012  of a named tuple
    lengths: tuple[int, ...] = ()
    skipped: bool = False
    exits: dict[str, int] = {}  # noqa: RUF012  of a named tuple
    truncated: int = 0


def judged(source: str, difficulty: str, *rewards: float) -> Judged:
    return Judged(source, difficulty, rewards, tuple(reward >= 1 for reward in rewards), {}, tuple(3 for _ in rewards))


def test_data_sets_and_difficulties_are_told_apart() -> None:
    problems = [
        judged("gsm/test set", "easy", 1.0),
        judged("gsm/test set", "hard one", 0.0),
        judged("gsm/test set", "easy", 1.0),
        judged("sums", "", 0.0),
    ]

    diagnostics = evaluation_metrics(problems, 1)

    assert {name: value for name, value in diagnostics.items() if name.endswith("pass@1")} == {
        "eval/pass@1": 0.5,
        "eval/gsm_test_set/pass@1": 2 / 3,
        "eval/gsm_test_set/easy/pass@1": 1.0,
        "eval/gsm_test_set/hard_one/pass@1": 0.0,
        "eval/sums/pass@1": 0.0,
    }
    assert diagnostics["eval/sums/length"] == 3
    assert all(
        diagnostics[f"{name}_low"] <= value <= diagnostics[f"{name}_high"]
        for name, value in diagnostics.items()
        if "@1" in name[-2:]
    )


def test_one_label_or_very_many_are_no_difficulties() -> None:
    one = [judged("sums", "same", 1.0), judged("sums", "same", 0.0)]
    many = [judged("sums", str(number), 1.0) for number in range(MOST_DIFFICULTIES + 1)]

    for problems in (one, many):
        assert {name.count("/") for name in evaluation_metrics(problems, 1)} == {1, 2}


def test_problems_that_were_not_asked_are_counted_and_not_judged() -> None:
    metrics = evaluation_metrics([judged("sums", "", 1.0), Judged(skipped=True)], 1)

    assert metrics["eval/pass@1"] == 1.0
    assert metrics["eval/sums/prompts_skipped"] == 1


def test_nothing_at_all_has_figures_too() -> None:
    assert evaluation_metrics([], 1)["eval/pass@1"] == 0.0


def test_shares_of_several_samples_are_those_of_all_choices_of_k() -> None:
    right, samples = [0, 1, 3, 6], 6

    result = shares(right, samples)

    for k in (1, 2, 4, 6):
        chosen = [any(answer < count for answer in pair) for count in right for pair in combinations(range(samples), k)]
        assert result[f"pass@{k}"] == pytest.approx(mean([float(item) for item in chosen]))
    assert result["mean@6"] == pytest.approx(result["pass@1"])
    assert "pass@3" not in result


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_hold_the_truth_in_95_of_100_evaluations(samples: int) -> None:
    rng = random.Random(0)
    held = {"pass@1": 0, f"pass@{samples}": 0}
    tries, problems = 400, 60
    # Easy and hard problems: answers to one depend on each other, so they are no trials of their own.
    easy, hard = 0.95, 0.1
    truth = {f"pass@{k}": (2 - (1 - easy) ** k - (1 - hard) ** k) / 2 for k in (1, samples)}
    for _ in range(tries):
        chances = [easy if rng.random() < 0.5 else hard for _ in range(problems)]
        right = [sum(rng.random() < chance for _ in range(samples)) for chance in chances]
        result = shares(right, samples)
        for name in held:
            held[name] += result[f"{name}_low"] <= truth[name] <= result[f"{name}_high"]

    assert all(count / tries >= 0.93 for count in held.values())


def test_what_is_right_follows_no_reward() -> None:
    """A judge that gives half a point for the right answer, and one whose answer could not be scored."""
    problems = [
        Judged("sums", "", (0.5, 0.25), (True, False), {}, (3, 3)),
        Judged("sums", "", (0.5,), (True,), {"timeout": 1}, (3,)),
        Judged("sums", "", (), (), {"timeout": 1, "crash": 1}, ()),
    ]

    figures = evaluation_metrics(problems, 2)

    assert figures["eval/reward"] == pytest.approx(1.25 / 3)
    assert figures["eval/pass@1"] == pytest.approx(0.75)
    assert figures["eval/pass@2"] == 1.0  # of the first problem alone
    assert figures["eval/mean@2"] == pytest.approx(0.75)
    assert (figures["eval/failed/timeout"], figures["eval/failed/crash"]) == (2, 1)


@pytest.mark.parametrize("cause", ["timeout", "crash", "engine", "judge", "tool", "error", "killed"])
def test_what_could_not_be_scored_is_counted_with_the_answers(cause: str) -> None:
    problems = [
        Judged("sums", "", (1.0,), (True,), {cause: 1}, (3,), truncated=1),
        Judged("words", "", (0.0, 0.0), (False, False), {}, (6, 6), truncated=2),
    ]
    figures = evaluation_metrics(problems, 2)
    counts = [tuple(figures[f"{name}/{count}"] for count in ("answers", "left_out", "cut_off")) for name in NAMES]
    assert counts == [(3, 1, 3), (1, 1, 1), (2, 0, 2)]


NAMES = ("eval", "eval/sums", "eval/words")


def test_progress_counts_what_timed_out() -> None:
    assert progress_text(12, 64, {"timeout": 3, "error": 1}) == "12 of 64 answers, 1 failed (error), 3 timed out"
    assert progress_text(12, 64, {}) == "12 of 64 answers"


@pytest.mark.parametrize(("samples", "right", "k"), [(5, 2, 3), (4, 0, 2), (6, 6, 1), (3, 1, 3)])
def test_pass_at_k_counts_choices_with_a_right_answer(samples: int, right: int, k: int) -> None:
    chosen = list(combinations(range(samples), k))

    assert pass_at_k(samples, right, k) == pytest.approx(mean([float(min(item) < right) for item in chosen]))
