"""The program that `rlinf train recipe=math` runs."""

from __future__ import annotations

from typing import cast

from recipes.language.actor_worker import LanguageActor
from recipes.language.critic_worker import LanguageCritic
from recipes.language.layout import LanguageLayout
from recipes.language.model_rules import require_model
from recipes.language.reference_worker import LanguageReference
from recipes.language.reward_worker import RewardWorker
from recipes.language.rollout_worker import LanguageRolloutWorker
from recipes.math.config import OPTIONAL_COMPONENTS, MathConfig
from rlinf_core import (
    Cluster,
    HybridComponentPlacement,
    Job,
    ReasoningRunner,
    RunFolder,
    RunRecord,
    run_job,
)
from rlinf_core.runners.events import Listener


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
    actor = LanguageActor.create_group(config).launch(cluster, placement_strategy=placement.get_strategy("actor"))
    rollout = LanguageRolloutWorker.create_group(config).launch(
        cluster, placement_strategy=placement.get_strategy("rollout")
    )
    reward = RewardWorker.create_group(config).launch(cluster, placement_strategy=placement.get_strategy("reward"))
    critic = reference = None
    placed = optional_components(config)
    if "critic" in placed:
        critic = LanguageCritic.create_group(config).launch(
            cluster, placement_strategy=placement.get_strategy("critic")
        )
    if "reference" in placed:
        reference = LanguageReference.create_group(config).launch(
            cluster, placement_strategy=placement.get_strategy("reference")
        )
    return ReasoningRunner(config, actor, rollout, reward, LanguageLayout, record, critic=critic, reference=reference)


def optional_components(config: MathConfig) -> list[str]:
    """Return those of critic and reference that have a place, and something to do."""
    placed, algorithm = config.cluster.component_placement, config.algorithm
    # An advantage of the user's own may want values: a place for the critic says so.
    asked = {"critic": algorithm.wants_values, "reference": algorithm.kl_beta > 0}
    return [name for name in OPTIONAL_COMPONENTS if name in placed and asked[name]]
