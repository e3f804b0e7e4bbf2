"""Figures, samples and failures of steps and evaluations."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.language.answers.prompt_messages import GroupReport
from recipes.language.loop.group_accounts import (
    MOST_DIFFICULTIES,
    Arrivals,
    Failures,
    evaluation_metrics,
    progress_text,
    shares,
    write_samples,
)
from recipes.language.loop.reasoning_runner import group_metrics
from recipes.language.trained_models import figures_by_set
from rlinf_cli.report.content import read_samples, sampled_steps
from rlinf_core.config.secrets import MASK
from rlinf_core.errors import RunError
from rlinf_core.runners.metrics import mean
from tests.unit.recipes.language.tiny import report


def judged(source: str, difficulty: str, *rewards: float) -> GroupReport:
    rights = tuple(reward >= 1 for reward in rewards)
    return report(rewards=rewards, source=source, difficulty=difficulty, corrects=rights, lengths=(3,) * len(rewards))


def test_data_sets_and_difficulties_are_told_apart() -> None:
    problems = [
        judged("gsm/test set", "easy", 1.0),
        judged("gsm/test set", "hard one", 0.0),
        judged("gsm/test set", "easy", 1.0),
        judged("sums", "", 0.0),
    ]
    figures = evaluation_metrics(problems, 1)
    assert {name: value for name, value in figures.items() if name.endswith("pass@1")} == {
        "eval/pass@1": 0.5,
        "eval/gsm_test_set/pass@1": 2 / 3,
        "eval/gsm_test_set/easy/pass@1": 1.0,
        "eval/gsm_test_set/hard_one/pass@1": 0.0,
        "eval/sums/pass@1": 0.0,
    }
    assert figures["eval/sums/length"] == 3
    for name, value in figures.items():
        if name.endswith("@1"):
            assert figures[f"{name}_low"] <= value <= figures[f"{name}_high"]


def test_one_label_or_very_many_are_no_difficulties() -> None:
    one = [judged("sums", "same", 1.0), judged("sums", "same", 0.0)]
    many = [judged("sums", str(number), 1.0) for number in range(MOST_DIFFICULTIES + 1)]
    for problems in (one, many):
        assert {name.count("/") for name in evaluation_metrics(problems, 1)} == {1, 2}


def test_problems_that_were_not_asked_are_counted_and_not_judged() -> None:
    metrics = evaluation_metrics([judged("sums", "", 1.0), report(skipped=True)], 1)
    assert metrics["eval/pass@1"] == 1.0
    assert metrics["eval/sums/prompts_skipped"] == 1


@pytest.mark.parametrize("problems", [[], [report(skipped=True)], [report(failures={"timeout": 2})]])
def test_what_was_not_measured_has_counts_alone(problems: list[GroupReport]) -> None:
    names = {name.rpartition("/")[2] for name in evaluation_metrics(problems, 2)}
    assert names - {"timeout", "prompts_skipped"} == {"answers", "cut_off", "left_out"}


def test_no_problem_with_enough_answers_gives_no_share() -> None:
    figures = evaluation_metrics([report(rewards=(1.0,), corrects=(True,), failures={"timeout": 1})], 2)
    assert figures["eval/pass@1"] == 1.0
    assert "eval/pass@2" not in figures


def test_an_evaluation_that_asks_nothing_ends_with_the_reason() -> None:
    arrivals = Arrivals(cast("Any", None), 8, 0.5)
    arrivals.check_evaluation([report(skipped=True), report(rewards=(1.0,), corrects=(True,))])
    with pytest.raises(RunError, match="the evaluation has no answers") as caught:
        arrivals.check_evaluation([report(skipped=True)] * 3)
    assert "all 3 prompts are longer than `data.max_prompt_length`" in str(caught.value)


@pytest.mark.parametrize("names", [("all", "hard"), ("my set", "all"), ("数学", "代码"), ("failed", "exit")])
def test_a_data_set_may_have_any_name(names: tuple[str, str]) -> None:
    problems = [judged(names[0], "", 1.0), judged(names[0], "", 1.0), judged(names[1], "", 0.0)]
    *parts, (last, whole) = figures_by_set(problems, 1).items()
    assert (last, whole["pass@1"], whole["problems"]) == ("all", pytest.approx(2 / 3), 3)
    assert sorted((figures["pass@1"], figures["problems"]) for _, figures in parts) == [(0.0, 1), (1.0, 2)]


@pytest.mark.parametrize(
    ("sources", "names"), [("aa", ["a/easy", "a/hard", "all"]), ("ab", ["a", "a/easy", "a/hard", "b", "all"])]
)
def test_labels_of_difficulty_have_shares_of_their_own(sources: str, names: list[str]) -> None:
    problems = [judged("a", "easy", 1.0), judged("a", "hard", 0.0), judged(sources[1], "hard", 1.0)]
    sets = figures_by_set(problems, 1)
    assert list(sets) == names
    assert (sets["a/easy"]["pass@1"], sets["a/hard"]["problems"]) == (1.0, sources.count("a"))


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
        report(rewards=(0.5, 0.25), corrects=(True, False)),
        report(rewards=(0.5,), corrects=(True,), failures={"timeout": 1}),
        report(failures={"timeout": 1, "crash": 1}),
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
        report(rewards=(1.0,), corrects=(True,), failures={cause: 1}, truncated=1),
        report(rewards=(0.0, 0.0), corrects=(False, False), source="words", truncated=2),
    ]
    figures = evaluation_metrics(problems, 2)
    counts = [tuple(figures[f"{name}/{count}"] for count in ("answers", "left_out", "cut_off")) for name in NAMES]
    assert counts == [(3, 1, 3), (1, 1, 1), (2, 0, 2)]


NAMES = ("eval", "eval/sums", "eval/words")


def test_progress_counts_what_timed_out() -> None:
    assert progress_text(12, 64, {"timeout": 3, "error": 1}) == "12 of 64 answers, 1 failed (error), 3 timed out"
    assert progress_text(12, 64, {}) == "12 of 64 answers"


def sample(**options: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"slot": 0, "sample": 0, "prompt": "1+1=", "text": "2", "answer": "2", "reward": 1.0}
    known |= {"reason": "the same text", "finish_reason": "stop", "tokens": [5], "logprobs": [-0.1], "versions": [0]}
    return {**known, "parts": {}, "pieces": ["2"], **options}


def test_the_samples_of_a_step_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample()])
    write_samples(tmp_path, 20, [sample(text="zwölf"), sample(reward=0.0)])
    assert sampled_steps(tmp_path) == [1, 20]
    assert read_samples(tmp_path, 1) == (1, [sample()])
    step, results = read_samples(tmp_path)
    assert (step, [result["text"] for result in results]) == (20, ["zwölf", "2"])
    assert [path.name for path in (tmp_path / "samples").iterdir() if path.name.startswith(".")] == []


def test_secrets_of_the_environment_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-123456")
    spelled = sample(text="it is sk-123456", prompt="say sk-123456", tokens=[1, 2], pieces=["it is ", "sk-123456"])
    write_samples(tmp_path, 1, [spelled, sample()])
    assert "sk-123456" not in (tmp_path / "samples" / "step_1.jsonl").read_text()
    _, (masked, plain) = read_samples(tmp_path)
    assert (masked["text"], masked["prompt"]) == (f"it is {MASK}", f"say {MASK}")
    assert (masked["tokens"], masked["pieces"], masked["logprobs"]) == ([], [], [])
    assert plain == sample()


def test_what_is_not_there_or_broken_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no samples"):
        read_samples(tmp_path)
    write_samples(tmp_path, 3, [sample()])
    with pytest.raises(RunError, match="step 4 has no samples"):
        read_samples(tmp_path, 4)
    (tmp_path / "samples" / "step_3.jsonl").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        read_samples(tmp_path)


def counted(*failed: tuple[int, dict[str, int], str]) -> Failures:
    """Return failures with these reports: numbers of scored answers, failures, and why the first."""
    failures = Failures()
    for scored, by_cause, why in failed:
        failures.count(report(rewards=(1.0,) * scored, failures=by_cause, failure=why))
    return failures


def test_a_step_in_which_most_answers_fail_ends_the_run() -> None:
    reports = [(4, {}, ""), (1, {"timeout": 2, "error": 1}, "why the first"), (0, {"error": 4}, "another")]
    counted(*reports[:2]).check("step 3", 8, 0.5)
    failures = counted(*reports)
    with pytest.raises(RunError, match="7 of 12 answers of step 3 failed: error 5, timeout 2") as caught:
        failures.check("step 3", 8, 0.5)
    assert "why the first" in str(caught.value)
    failures.check("step 3", 8, 0.6)


def test_the_first_few_answers_of_a_step_end_nothing() -> None:
    counted((0, {"error": 4}, "a judge that wakes up")).check("step 1", 8, 0.5)


def test_the_end_of_a_run_tells_of_all() -> None:
    assert str(counted((3, {"crash": 1}, "killed"))) == (
        "1 of 4 answers failed and were dropped: crash 1; the first: killed"
    )


def test_figures_of_a_step() -> None:
    groups = [
        report(0, (1.0, 0.0), truncated=1, parts={"style": 3.0}),
        report(1, (1.0, 1.0), failures={"timeout": 2}),
        report(2, tokens=0, skipped=True),
    ]
    figures = group_metrics(groups)
    expected = {"rollout/reward": 0.75, "rollout/truncated": 0.25, "rollout/prompts_skipped": 1, "reward/style": 0.75}
    expected |= {"rollout/response_length": 2, "rollout/prompt_length": 3, "failed/timeout": 2}
    assert {name: figures[name] for name in expected} == expected
