"""The reward worker: what it tells of answers that cannot be scored."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipes.language.answers.answer_group import AnswerGroup, Rollout
from recipes.language.answers.prompt_messages import PROGRESS, GroupReport, Prompt
from recipes.language.answers.sequences import Score
from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data.problems import Problem
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.rewards.right_answers import check_right_answers
from recipes.language.rewards.scoring import Item, Scorer
from recipes.language.workers.reward_worker import RewardWorker
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference
from tests.unit.recipes.language import own_verdicts
from tests.unit.recipes.language.in_threads import Hub, in_thread
from tests.unit.recipes.language.tiny import job_config, sequence


def group(slot: int, *texts: str) -> AnswerGroup:
    rollouts = tuple(Rollout((sequence((2,), sample=number),), text) for number, text in enumerate(texts))
    prompt = Prompt(slot, position=slot, step=1, worker=0, answers=len(texts), temperature=1.0)
    return AnswerGroup(prompt, slot, Problem(prompt="1+1", answer="2"), rollouts)


def worker_of(
    monkeypatch: pytest.MonkeyPatch, *overrides: str, scores: dict[str, Score]
) -> tuple[RewardWorker, Hub, list[str]]:
    """Return a reward worker that finds these scores of texts, its channels, and what it warns of."""

    def scored(scorer: Scorer, items: list[Item]) -> list[Score]:
        return [scores[item.text] for item in items]

    monkeypatch.setattr(Scorer, "score_all", scored)
    config = job_config(*overrides)
    hub, warnings = Hub(), list[str]()
    worker = in_thread(RewardWorker, config.reward.group_name, hub, 0, 1)(config)
    monkeypatch.setattr(worker, "log_warning", lambda message, *args: warnings.append(message % args))
    worker.init_worker(LanguageLayout(1, 1, 1, "answers", "scored"))
    return worker, hub, warnings


def reports_of(worker: RewardWorker, hub: Hub, *groups: AnswerGroup) -> list[GroupReport]:
    """Have groups scored, and return the reports."""
    hub.channel("answers").put([*groups], key="0")
    return [item.report for item in worker.score(tuple(range(len(groups))))]


FAILING = {
    "late": Score(0.0, "why late", failure="timeout"),
    "bad": Score(0.0, "why bad", failure="error"),
    "2": Score(1.0, "right", correct=True),
    "3": Score(0.0, "wrong"),
}


def test_first_failure_of_each_cause_is_logged_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, hub, warnings = worker_of(monkeypatch, scores=FAILING)
    reports = reports_of(worker, hub, group(0, "bad", "2", "bad"), group(1, "late", "bad"))
    assert [report.failures for report in reports] == [{"error": 2}, {"timeout": 1, "error": 1}]
    assert [report.failure for report in reports] == ["why bad", "why late"]
    assert warnings == [
        "an answer failed and was dropped: why bad; further ones are counted as failed/error",
        "an answer failed and was dropped: why late; further ones are counted as failed/timeout",
    ]


def test_what_could_not_be_scored_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, hub, _ = worker_of(monkeypatch, scores=FAILING)
    reports = reports_of(worker, hub, group(0, "2", "bad", "3", "late"), group(1, "2", "bad"), group(2, "2", "3"))
    assert [report.rewards for report in reports] == [(1.0, 0.0), (1.0,), (1.0, 0.0)]
    assert [report.corrects for report in reports] == [(True, False), (True,), (True, False)]
    assert [report.lengths for report in reports] == [(1, 1), (1,), (1, 1)]
    # One answer alone is compared with nothing: another group comes in its place.
    assert [(report.spoiled, report.kept) for report in reports] == [(False, True), (True, False), (False, True)]
    kept = worker._kept
    assert {slot: scored.rewards for slot, scored in kept.items()} == {0: [1.0, 0.0], 2: [1.0, 0.0]}
    assert [answer.sample for answer in kept[0].answers] == [0, 2]


def test_scores_of_an_evaluation_are_told_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, hub, _ = worker_of(monkeypatch, scores=FAILING)
    training, asked = group(0, "2", "late"), [group(slot, "2", "late") for slot in (1, 2)]
    asked = [one._replace(prompt=one.prompt._replace(step=0)) for one in asked]
    reports_of(worker, hub, training, *asked)
    news = [hub.channel("scored").get(key=PROGRESS) for _ in asked]
    assert news == [(2, {"timeout": 1})] * 2
    assert hub.channel("scored").empty(key=PROGRESS)


def test_groups_whose_rewards_differ_by_rounding_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"2": Score(0.1 + 0.2, ""), "3": Score(0.3, "")}
    worker, hub, _ = worker_of(monkeypatch, "algorithm.filter_groups=true", scores=scores)
    assert reports_of(worker, hub, group(0, "2", "3"))[0].dropped


def test_the_punishment_of_long_answers_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, hub, _ = worker_of(
        monkeypatch, "reward.soft_overlong=2", "rollout.sampling_params.max_new_tokens=2", scores=FAILING
    )
    training = group(0, "2", "3")
    evaluation = training._replace(prompt=training.prompt._replace(slot=1, step=0))
    reports = reports_of(worker, hub, training, evaluation)
    assert [report.rewards for report in reports] == [(0.5, -0.5), (1.0, 0.0)]
    assert [report.corrects for report in reports] == [(True, False)] * 2


def data_of(file: Path, golds: list[str]) -> LanguageDataConfig:
    file.write_text("".join(f'{{"prompt": "?", "answer": "{gold}"}}\n' for gold in golds))
    overrides = [f"data.train_data_paths=[{file}]", f"data.val_data_paths=[{file}]", "data.type=jsonl"]
    return job_config(*overrides).data


def test_right_answers_that_do_not_fit_the_rule_end_the_start(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    data = data_of(file, ["(1,2)", "7", "x+1", "a/b"])
    with pytest.raises(ConfigError, match=r"6 of 8 reference answers") as caught:
        check_right_answers(data, "number", Scorer("number"), share=(0, 1), must_fit=True)
    assert f"{file}:1" in str(caught.value)
    assert "6 of 8" in looked_at(data, must_fit=False).note


def test_half_of_the_right_answers_may_fail_a_rule(tmp_path: Path) -> None:
    data = data_of(tmp_path / "pairs.jsonl", ["(1,2)", "7", "x+1", "8"])
    assert looked_at(data).note.startswith("4 of 8 reference answers do not pass")


def looked_at(
    data: LanguageDataConfig, rule: str = "number", share: tuple[int, int] = (0, 1), **how: bool
) -> Difference:
    with Scorer(rule) as scorer:
        result = check_right_answers(data, rule, scorer, share=share, **{"must_fit": True, **how})
    assert result is not None
    return result


def test_a_few_right_answers_that_do_not_fit_are_told(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    data = data_of(file, ["(1,2)", "7", "8", "9"])
    result = looked_at(data)
    assert not result.agrees
    assert result.note.startswith("2 of 8 reference answers do not pass `reward_type: number`")
    assert f"{file}:1: `(1,2)`: it is not a number" in result.note
    assert looked_at(data, share=(1, 2)) == Difference(note="4 reference answers")


def test_what_programs_earn_that_solve_nothing_is_told(tmp_path: Path) -> None:
    class Passing(Scorer):
        def score_all(self, items: list[Item]) -> list[Score]:  # type: ignore[override]
            assert all("_exit" in item.text or "argv" in item.text for item in items)
            return [Score(1.0, "passed", correct="argv" in item.text) for item in items]

    data = data_of(tmp_path / "tests.jsonl", ["assert f(2) == 4", "assert f(3) == 6"])
    result = check_right_answers(data, "code", Passing("code"), share=(0, 1), must_fit=True)
    assert result is not None
    assert not result.agrees
    assert "a program that prints its own source's marks passes the tests of 2 of 2 problems" in result.note
    assert "only ends" not in result.note


def test_right_answers_are_given_to_a_function(tmp_path: Path) -> None:
    data = data_of(tmp_path / "pairs.jsonl", ["1", "2", "", "0"])
    result = looked_at(data, f"{own_verdicts.__name__}:takes_all")
    assert "1 of 3 reference answers" in result.note
    assert "ZeroDivisionError" in result.note
    # No more than a warning: the function may want a form that the data do not have.
    assert "3 of 3" in looked_at(data, f"{own_verdicts.__name__}:wants_a_form").note
    # A run that only evaluates need not name training files.
    only = data.model_copy(update={"train_data_paths": ()})
    assert "3 of 3" in looked_at(only, f"{own_verdicts.__name__}:wants_a_form").note


def test_right_answers_of_reasoning_gym_are_scored_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dataset:
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"question": f"{index}+1", "answer": str(index + 1), "metadata": {}}

    monkeypatch.setitem(
        sys.modules, "reasoning_gym", cast("Any", SimpleNamespace(create_dataset=lambda *a, **k: Dataset()))
    )
    overrides = [
        "data.type=reasoning_gym",
        "data.options={task: sums, train_size: 5}",
        "reward.reward_type=reasoning_gym",
    ]
    data = job_config(*overrides, sound=False).data
    seen: list[Item] = []

    def scored(items: list[Item]) -> list[Score]:
        seen.extend(items)
        return [Score(1.0, "", correct=item.text != "3") for item in items]

    scorer: Any = SimpleNamespace(score_all=scored)
    result = check_right_answers(data, "reasoning_gym", scorer, share=(0, 2), must_fit=True)
    assert [(item.text, item.row["question"]) for item in seen] == [("1", "0+1"), ("3", "2+1"), ("5", "4+1")]
    assert result is not None
    assert "1 of 3 reference answers do not pass `reward_type: reasoning_gym` (problem 2: `3`" in result.note
