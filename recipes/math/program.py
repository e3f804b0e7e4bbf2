"""The program that `rlinf train recipe=math` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from recipes.language.actor_worker import LanguageActor
from recipes.language.critic_worker import LanguageCritic
from recipes.language.layout import LanguageLayout
from recipes.language.model_rules import require_model
from recipes.language.reference_worker import LanguageReference
from recipes.language.reward_worker import RewardWorker
from recipes.language.rollout_worker import LanguageRolloutWorker
from recipes.math.config import MathConfig
from rlinf_core import (
    Cluster,
    HybridComponentPlacement,
    Job,
    ReasoningRunner,
    RunFolder,
    RunRecord,
    Worker,
    run_job,
)
from rlinf_core.runners.events import Listener

# Placed where the algorithm asks for them.
OPTIONAL: Final[Mapping[str, type[Worker]]] = {"critic": LanguageCritic, "reference": LanguageReference}


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
    optional: dict[str, Any] = {
        name: OPTIONAL[name].create_group(config).launch(cluster, placement_strategy=placement.get_strategy(name))
        for name in optional_components(config)
    }
    return ReasoningRunner(config, actor, rollout, reward, LanguageLayout, record, **optional)


def optional_components(config: MathConfig) -> list[str]:
    """Return those of critic and reference that have a place, and something to do."""
    placed, algorithm = config.cluster.component_placement, config.algorithm
    # An advantage of the user's own may want values: a place for the critic says so.
    asked = {"critic": algorithm.wants_values, "reference": algorithm.kl_beta > 0}
    return [name for name in OPTIONAL if name in placed and asked[name]]
