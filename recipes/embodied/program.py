"""The program that `rlinf train recipe=embodied` runs."""

from __future__ import annotations

from typing import cast

from recipes.embodied.actor_worker import EmbodiedFSDPActor
from recipes.embodied.config import EmbodiedConfig, facts
from recipes.embodied.env_worker import EnvWorker
from recipes.embodied.rollout_worker import MultiStepRolloutWorker
from rlinf_core import (
    Cluster,
    EmbodiedRunner,
    HybridComponentPlacement,
    Job,
    PlacementStrategy,
    RunFolder,
    RunRecord,
    Waiting,
    with_recovery,
)
from rlinf_core.runners.events import Listener


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a policy as `job` says, to the end, and keep what happens in `folder`.

    Raises:
        WorkerGroupError: a worker failed, or died once more than `runner.max_restarts` allows.
        ClusterError: the machines cannot be had.
        CheckpointError: the checkpoint does not fit, or cannot be written.
    """
    config = cast("EmbodiedConfig", job.config)
    with RunRecord.open(job, folder, listener, config.runner, facts(config)) as record:
        with_recovery(lambda: train(config, record), record, config.runner.max_restarts)
        record.finished()


def train(config: EmbodiedConfig, record: RunRecord) -> None:
    """Run from where `record` stands to the end, on a cluster of its own."""
    record.tell(Waiting("the cluster"))
    with Cluster(cluster_cfg=config.cluster) as cluster:
        names = {config.actor.group_name: "actor", config.rollout.group_name: "rollout", config.env.group_name: "env"}
        record.watch(cluster, names)
        launch(config, cluster, record).run()


def launch(config: EmbodiedConfig, cluster: Cluster, record: RunRecord) -> EmbodiedRunner:
    """Place and start the workers, ready to `run`."""
    placement = HybridComponentPlacement(config, cluster)

    def next_group(component: str) -> PlacementStrategy:
        count = placement.get_world_size(component)
        record.tell(Waiting(f"{component}: {count} process{'es' if count > 1 else ''}"))
        return placement.get_strategy(component)

    actor = EmbodiedFSDPActor.create_group(config).launch(cluster, placement_strategy=next_group("actor"))
    rollout = MultiStepRolloutWorker.create_group(config).launch(cluster, placement_strategy=next_group("rollout"))
    env = EnvWorker.create_group(config).launch(cluster, placement_strategy=next_group("env"))
    runner = EmbodiedRunner(config, actor=actor, rollout=rollout, env=env, record=record)
    runner.init_workers()
    return runner
