"""The scorer that a file asks for."""

from __future__ import annotations

from typing import Any

from recipes.language.config import LanguageConfig
from recipes.language.rewards.scoring import PROGRAMS, Scorer


def make_scorer(config: LanguageConfig) -> Scorer:
    """Return the scorer of `reward.reward_type`."""
    reward, data = config.reward, config.data
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
