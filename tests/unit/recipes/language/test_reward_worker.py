"""The reward worker: what it tells of answers that cannot be scored."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("transformers")

from recipes.language.answers.answer_group import AnswerGroup
from recipes.language.answers.sequences import Sequence
from recipes.language.config.group_names import LanguageLayout
from recipes.language.data.problems import Problem
from recipes.language.loop.prompts import Prompt
from recipes.language.rewards.scoring import Item, Score, Scorer
from recipes.language.workers.reward_worker import RewardWorker
from recipes.math.config import MathConfig
from rlinf_core.job.load import load_job
from tests.unit.recipes.language.in_threads import Hub, in_thread


def group(slot: int, *texts: str) -> AnswerGroup:
    answers = tuple(
        Sequence(
            request_id=str(slot),
            sample=number,
            prompt=(1,),
            tokens=(2,),
            logprobs=(-0.5,),
            versions=(1,),
            finish_reason="stop",
        )
        for number in range(len(texts))
    )
    prompt = Prompt(slot, position=slot, step=1, worker=0, answers=len(texts), temperature=1.0)
    return AnswerGroup(prompt, slot, Problem(prompt="1+1", answer="2"), texts, answers)


def test_the_first_failure_of_each_kind_is_told_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(scorer: Scorer, items: list[Item]) -> list[Score]:
        failures = {"late": "timeout", "bad": "error", "2": ""}
        return [Score(0.0, f"why {each.text}", failure=failures[each.text]) for each in items]

    monkeypatch.setattr(Scorer, "score_all", scored)
    config = cast("MathConfig", load_job("math_laptop", environ={}).config)
    hub, warnings = Hub(), list[str]()
    worker = in_thread(RewardWorker, config.reward.group_name, hub, 0, 1)(config)
    monkeypatch.setattr(worker, "log_warning", lambda message, *args: warnings.append(message % args))
    worker.init_worker(LanguageLayout(1, 1, 1, "answers", "scored"))

    hub.channel("answers").put([group(0, "bad", "2", "bad"), group(1, "late", "bad")], key="0")
    reports = [each.report for each in worker.score((0, 1))]

    assert [each.failures for each in reports] == [{"error": 2}, {"timeout": 1, "error": 1}]
    assert warnings == [
        "an answer could not be scored and gets 0: why bad; further ones are counted as reward/failed_error",
        "an answer could not be scored and gets 0: why late; further ones are counted as reward/failed_timeout",
    ]
