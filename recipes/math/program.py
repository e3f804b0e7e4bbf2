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
    PlacementStrategy,
    ReasoningRunner,
    RunFolder,
    RunRecord,
    Waiting,
    with_recovery,
)
from rlinf_core.runners.events import Listener


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a language model as `job` says, to the end, and keep what happens in `folder`.

    Raises:
        WorkerGroupError: a worker failed, or died once more than `runner.max_restarts` allows.
        ClusterError: the machines cannot be had.
        CheckpointError: the checkpoint does not fit, or cannot be written.
        ConfigError: the folder of the model cannot be used.
    """
    config = cast("MathConfig", job.config)
    require_model(config)
    with RunRecord.open(job, folder, listener, config.runner, facts(config)) as record:
        with_recovery(lambda: train(config, record), record, config.runner.max_restarts)
        record.finished()


def train(config: MathConfig, record: RunRecord) -> None:
    """Run from where `record` stands to the end, on a cluster of its own."""
    record.tell(Waiting("the cluster"))
    with Cluster(cluster_cfg=config.cluster) as cluster:
        sections = {"actor": config.actor, "rollout": config.rollout, "reward": config.reward}
        sections |= {name: getattr(config, name) for name in optional_components(config)}
        record.watch(cluster, {section.group_name: name for name, section in sections.items()})
        launch(config, cluster, record).run()


def launch(config: MathConfig, cluster: Cluster, record: RunRecord) -> ReasoningRunner:
    """Place and start the workers, ready to `run`."""
    placement = HybridComponentPlacement(config, cluster)

    def next_group(component: str) -> PlacementStrategy:
        count = placement.get_world_size(component)
        record.tell(Waiting(f"{component}: {count} process{'es' if count > 1 else ''}"))
        return placement.get_strategy(component)

    actor = LanguageActor.create_group(config).launch(cluster, placement_strategy=next_group("actor"))
    rollout = LanguageRolloutWorker.create_group(config).launch(cluster, placement_strategy=next_group("rollout"))
    reward = RewardWorker.create_group(config).launch(cluster, placement_strategy=next_group("reward"))
    critic = reference = None
    placed = optional_components(config)
    if "critic" in placed:
        critic = LanguageCritic.create_group(config).launch(cluster, placement_strategy=next_group("critic"))
    if "reference" in placed:
        reference = LanguageReference.create_group(config).launch(cluster, placement_strategy=next_group("reference"))
    runner = ReasoningRunner(config, actor, rollout, reward, LanguageLayout, record, critic=critic, reference=reference)
    runner.init_workers()
    return runner


def optional_components(config: MathConfig) -> list[str]:
    """Return those of critic and reference that have a place, and something to do."""
    placed, algorithm = config.cluster.component_placement, config.algorithm
    # An advantage of the user's own may want values: a place for the critic says so.
    asked = {"critic": algorithm.wants_values, "reference": algorithm.kl_beta > 0}
    return [name for name in OPTIONAL_COMPONENTS if name in placed and asked[name]]


def facts(config: MathConfig) -> dict[str, str | int | float | bool | None]:
    """Return what a run must agree in to continue from a checkpoint: whatever shapes the weights."""
    model = config.actor.model
    lora = model.adapter()
    return {
        "actor.model.model_path": model.model_path,
        "actor.model.hidden_dim": model.hidden_dim,
        "actor.model.num_layers": model.num_layers,
        "actor.model.lora.rank": lora.rank if lora else None,
    }
