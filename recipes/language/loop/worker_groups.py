"""The worker groups that every recipe of language models has, named and not imported: torch is for the workers."""

from __future__ import annotations

from recipes.language.config import OPTIONAL_COMPONENTS, LanguageConfig
from recipes.language.loop.protocols import ReasoningActor, ReasoningCritic, ReasoningReference, ReasoningReward
from rlinf_core import WorkerReference

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


def optional_components(config: LanguageConfig) -> list[str]:
    """Return those of critic and reference that have a place, and something to do."""
    placed, algorithm = config.cluster.component_placement, config.algorithm
    # An advantage of the user's own may want values: a place for the critic says so.
    asked = {"critic": algorithm.wants_values, "reference": algorithm.kl_beta > 0}
    return [name for name in OPTIONAL_COMPONENTS if name in placed and asked[name]]
