"""The scorer that a file asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipes.language.config import LanguageConfig
from recipes.language.judging.judge_scorer import Ask, JudgeScorer
from recipes.language.rewards.scoring import PROGRAMS, AnswerScorer, Scorer


def make_scorer(config: LanguageConfig, ask: Callable[[], Ask], rank: int = 0) -> AnswerScorer:
    """Return the scorer of `reward.reward_type`.

    Args:
        config: the whole file.
        ask: makes what asks the judges, where there are any.
        rank: the rank of this reward worker.
    """
    reward, data = config.reward, config.data
    if reward.asks_judge:
        return JudgeScorer(ask(), rank, correct=reward.correct_reward, incorrect=reward.incorrect_reward)
    settings: dict[str, Any] | None = None
    if data.type == "reasoning_gym":
        settings = {"task": data.task, "task_config": data.task_config}
    elif reward.reward_type == PROGRAMS:
        settings = {"memory": reward.program_memory_mib << 20}
    return Scorer(
        reward.reward_type,
        correct=reward.correct_reward,
        incorrect=reward.incorrect_reward,
        timeout=reward.timeout,
        settings=settings,
    )
