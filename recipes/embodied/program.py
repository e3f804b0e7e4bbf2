"""The program that `rlinf train recipe=embodied` runs."""

from __future__ import annotations

from recipes.embodied.actor_worker import EmbodiedFSDPActor
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.env_worker import EnvWorker
from recipes.embodied.rollout_worker import MultiStepRolloutWorker
from recipes.embodied.runner import FilmingRunner
from rlinf_core import (
    Cluster,
    EmbodiedRunner,
    HybridComponentPlacement,
    Job,
    RunFolder,
    RunRecord,
    run_job,
)
from rlinf_core.runners.events import Listener


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a policy as `job` says, to the end, and keep what happens in `folder`; raises what `run_job` does."""
    run_job(job, folder, listener, launch)


def launch(config: EmbodiedConfig, cluster: Cluster, record: RunRecord) -> EmbodiedRunner:
    """Place and start the workers, and return the loop over them."""
    placement = HybridComponentPlacement(config, cluster)
    actor = EmbodiedFSDPActor.create_group(config).launch(cluster, placement_strategy=placement.get_strategy("actor"))
    rollout = MultiStepRolloutWorker.create_group(config).launch(
        cluster, placement_strategy=placement.get_strategy("rollout")
    )
    env = EnvWorker.create_group(config).launch(cluster, placement_strategy=placement.get_strategy("env"))
    loop = FilmingRunner if config.env.eval.video_cfg.save_video else EmbodiedRunner
    return loop(config, actor=actor, rollout=rollout, env=env, record=record)
