"""The program that `rlinf train recipe=embodied` runs."""

from __future__ import annotations

from functools import partial
from typing import cast

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.algorithm_config import is_off_policy
from recipes.embodied.config.embodied_config import divides_among
from recipes.embodied.loop.embodied_runner import EmbodiedRunner
from recipes.embodied.loop.protocols import EmbodiedActor, EmbodiedEnv, EmbodiedRollout
from recipes.embodied.models.folder_facts import require_model_folder
from rlinf_core import Cluster, HybridComponentPlacement, Job, run_job
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker import WorkerReference
from rlinf_core.worker.worker_group import launch_together

# Named rather than imported, since only workers need torch.
ACTOR = WorkerReference[EmbodiedActor](
    "recipes.embodied.workers.actor_worker:EmbodiedFSDPActor", EmbodiedActor, "actor"
)
ROLLOUT = WorkerReference[EmbodiedRollout](
    "recipes.embodied.workers.rollout_worker:MultiStepRolloutWorker", EmbodiedRollout, "rollout"
)
OFF_POLICY_ACTOR = WorkerReference[EmbodiedActor](
    "recipes.embodied.off_policy.off_policy_actor:OffPolicyActor", EmbodiedActor, "actor"
)
OFF_POLICY_ROLLOUT = WorkerReference[EmbodiedRollout](
    "recipes.embodied.off_policy.off_policy_rollout:OffPolicyRolloutWorker", EmbodiedRollout, "rollout"
)
ENV = WorkerReference[EmbodiedEnv]("recipes.embodied.workers.env_worker:EnvWorker", EmbodiedEnv, "env")


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a policy as configured in `job`, and record the run in `folder`; raises like `run_job`."""
    require_model_folder(cast("EmbodiedConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: EmbodiedConfig, cluster: Cluster, record: RunRecord) -> EmbodiedRunner:
    """Place and start the workers, and return the loop over them."""
    placement = HybridComponentPlacement(config, cluster)
    off_policy = is_off_policy(config.algorithm.loss_type)
    trains, acts = (OFF_POLICY_ACTOR, OFF_POLICY_ROLLOUT) if off_policy else (ACTOR, ROLLOUT)
    actor, rollout, env = trains.create_group(config), acts.create_group(config), ENV.create_group(config)
    (trajectories,) = launch_together(
        cluster,
        {
            actor: placement.get_strategy("actor"),
            rollout: placement.get_strategy("rollout"),
            env: placement.get_strategy("env", partial(divides_among, config)),
        },
        channels=[EmbodiedRunner.channel_name(config.actor.group_name)],
    )
    return EmbodiedRunner(config, actor=actor, rollout=rollout, env=env, record=record, trajectories=trajectories)
