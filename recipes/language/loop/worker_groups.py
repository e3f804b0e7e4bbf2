"""The worker groups that every recipe of language models has, named and not imported: torch is for the workers."""

from __future__ import annotations

from typing import Any

from recipes.language.config import OPTIONAL_COMPONENTS, LanguageConfig
from recipes.language.loop.protocols import (
    ReasoningActor,
    ReasoningCritic,
    ReasoningJudge,
    ReasoningReference,
    ReasoningReward,
)
from rlinf_core import WorkerGroup
from rlinf_core.worker.worker_reference import WorkerReference

ACTOR = WorkerReference[ReasoningActor]("recipes.language.workers.actor_worker:LanguageActor", ReasoningActor, "actor")
REWARD = WorkerReference[ReasoningReward](
    "recipes.language.workers.reward_worker:RewardWorker", ReasoningReward, "reward"
)
CRITIC = WorkerReference[ReasoningCritic](
    "recipes.language.workers.critic_worker:LanguageCritic", ReasoningCritic, "critic"
)
REFERENCE = WorkerReference[ReasoningReference](
    "recipes.language.workers.reference_worker:LanguageReference", ReasoningReference, "reference"
)


TEACHER = WorkerReference[ReasoningReference](
    "recipes.language.workers.teacher_worker:LanguageTeacher", ReasoningReference, "teacher"
)
JUDGE = WorkerReference[ReasoningJudge]("recipes.language.workers.judge_worker:JudgeWorker", ReasoningJudge, "judge")


def optional_groups(config: LanguageConfig) -> dict[str, WorkerGroup[Any]]:
    """Return the groups of `optional_components`, by component."""
    makers: dict[str, WorkerReference[Any]] = {
        "critic": CRITIC,
        "reference": REFERENCE,
        "teacher": TEACHER,
        "judge": JUDGE,
    }
    return {name: makers[name].create_group(config) for name in optional_components(config)}


def optional_components(config: LanguageConfig) -> list[str]:
    """Return those of critic, reference, teacher and judge that have a place, and something to do."""
    placed, algorithm = config.cluster.component_placement, config.algorithm
    # A user-defined advantage may want values: a place for the critic says so.
    asked = {
        "critic": algorithm.wants_values,
        "reference": algorithm.kl_beta > 0,
        "teacher": algorithm.needs_teacher,
        "judge": config.reward.asks_judge,
    }
    return [name for name in OPTIONAL_COMPONENTS if name in placed and asked[name]]
