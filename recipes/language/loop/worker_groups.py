"""The worker groups that every recipe of language models has, named and not imported: torch is for the workers."""

from __future__ import annotations

from typing import Any

from recipes.language.config.language_config import OPTIONAL_COMPONENTS, LanguageConfig
from recipes.language.loop.protocols import (
    CriticGroup,
    JudgeGroup,
    LanguageActorGroup,
    ReferenceGroup,
    RewardGroup,
)
from rlinf_core import WorkerGroup
from rlinf_core.worker.worker_reference import WorkerReference

ACTOR = WorkerReference[LanguageActorGroup](
    "recipes.language.workers.actor_worker:LanguageActor", LanguageActorGroup, "actor"
)
REWARD = WorkerReference[RewardGroup]("recipes.language.workers.reward_worker:RewardWorker", RewardGroup, "reward")
CRITIC = WorkerReference[CriticGroup]("recipes.language.workers.critic_worker:LanguageCritic", CriticGroup, "critic")
REFERENCE = WorkerReference[ReferenceGroup](
    "recipes.language.workers.reference_worker:LanguageReference", ReferenceGroup, "reference"
)


TEACHER = WorkerReference[ReferenceGroup](
    "recipes.language.workers.reference_worker:LanguageTeacher", ReferenceGroup, "teacher"
)
JUDGE = WorkerReference[JudgeGroup]("recipes.language.workers.judge_worker:JudgeWorker", JudgeGroup, "judge")


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
