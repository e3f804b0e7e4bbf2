"""The program that `rlinf train recipe=math` runs."""

from __future__ import annotations

from typing import cast

from recipes.language.layout import LanguageLayout
from recipes.language.loop.protocols import (
    ReasoningActor,
    ReasoningCritic,
    ReasoningReference,
    ReasoningReward,
    ReasoningRollout,
)
from recipes.language.loop.runner import ReasoningRunner
from recipes.language.model_rules import require_model
from recipes.math.config import OPTIONAL_COMPONENTS, MathConfig
from rlinf_core import (
    Cluster,
    HybridComponentPlacement,
    Job,
    RunFolder,
    RunRecord,
    WorkerReference,
    launch_together,
    run_job,
)
from rlinf_core.runners.events import Listener

# Named and not imported: torch is for the workers.
ACTOR = WorkerReference[ReasoningActor]("recipes.language.actor_worker:LanguageActor", ReasoningActor, "actor")
ROLLOUT = WorkerReference[ReasoningRollout](
    "recipes.language.rollout_worker:LanguageRolloutWorker", ReasoningRollout, "rollout"
)
REWARD = WorkerReference[ReasoningReward]("recipes.language.reward_worker:RewardWorker", ReasoningReward, "reward")
CRITIC = WorkerReference[ReasoningCritic]("recipes.language.critic_worker:LanguageCritic", ReasoningCritic, "critic")
REFERENCE = WorkerReference[ReasoningReference](
    "recipes.language.reference_worker:LanguageReference", ReasoningReference, "reference"
)


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a language model as `job` says, to the end, and keep what happens in `folder`.

    Raises:
        RLinfError: see `run_job`; and ConfigError: the folder of the model cannot be used.
    """
    require_model(cast("MathConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: MathConfig, cluster: Cluster, record: RunRecord) -> ReasoningRunner:
    """Place and start the workers, and return the loop over them."""
    placement = HybridComponentPlacement(config, cluster)
    placed = optional_components(config)
    actor, rollout, reward = ACTOR.create_group(config), ROLLOUT.create_group(config), REWARD.create_group(config)
    critic = CRITIC.create_group(config) if "critic" in placed else None
    reference = REFERENCE.create_group(config) if "reference" in placed else None
    groups = {"actor": actor, "rollout": rollout, "reward": reward, "critic": critic, "reference": reference}
    launch_together(
        cluster, {group: placement.get_strategy(name) for name, group in groups.items() if group is not None}
    )
    return ReasoningRunner(config, actor, rollout, reward, LanguageLayout, record, critic=critic, reference=reference)


def optional_components(config: MathConfig) -> list[str]:
    """Return those of critic and reference that have a place, and something to do."""
    placed, algorithm = config.cluster.component_placement, config.algorithm
    # An advantage of the user's own may want values: a place for the critic says so.
    asked = {"critic": algorithm.wants_values, "reference": algorithm.kl_beta > 0}
    return [name for name in OPTIONAL_COMPONENTS if name in placed and asked[name]]
