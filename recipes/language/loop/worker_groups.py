"""The worker groups of a language job, with their placement and start.

Workers are named, not imported, as only their processes need torch.
"""

from __future__ import annotations

from typing import Any

from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.language_no_effect import OPTIONAL
from recipes.language.loop.protocols import CriticGroup, JudgeGroup, LanguageActorGroup, ReferenceGroup, RewardGroup
from rlinf_core import Cluster, HybridComponentPlacement, WorkerGroup
from rlinf_core.worker.group.worker_group import launch_together
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


def launch_groups(
    config: LanguageConfig, cluster: Cluster, rollout: WorkerReference[Any], **others: WorkerReference[Any]
) -> dict[str, WorkerGroup[Any]]:
    """Place and start the workers of a job, and return their groups by component.

    Args:
        config: the configuration of the job.
        cluster: the cluster.
        rollout: the workers that hold engines.
        others: further workers of the recipe, by component.
    """
    named: dict[str, WorkerReference[Any]] = dict(zip(OPTIONAL, (CRITIC, REFERENCE, TEACHER, JUDGE), strict=True))
    optional = {name: named[name] for name in optional_components(config)}
    common: dict[str, WorkerReference[Any]] = {"actor": ACTOR, "rollout": rollout, "reward": REWARD}
    groups = {name: reference.create_group(config) for name, reference in {**common, **others, **optional}.items()}
    placement = HybridComponentPlacement(config, cluster)
    launch_together(cluster, {group: placement.get_strategy(name) for name, group in groups.items()})
    return groups


def optional_components(config: LanguageConfig) -> list[str]:
    """Return the optional components (critic, reference, teacher, judge) that are placed and needed."""
    placed = config.cluster.component_placement
    return [name for name, component in OPTIONAL.items() if name in placed and not component.unneeded(config)]
