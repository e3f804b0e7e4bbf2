"""The program that `rlinf train recipe=sft` runs."""

from __future__ import annotations

from typing import Any, cast

from recipes.embodied.episodes.collecting_worker import CollectingEnvWorker
from recipes.embodied.models.folder_facts import require_model_folder
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.sft.config import SftConfig, evaluates
from recipes.sft.sft_actor import SftActor
from recipes.sft.sft_runner import SftRunner
from rlinf_core import Cluster, HybridComponentPlacement, Job, WorkerGroup, run_job
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.group.worker_group import launch_together


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Learn from demonstrations as configured in `job`, and record the run in `folder`; raises like `run_job`."""
    require_model_folder(cast("SftConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: SftConfig, cluster: Cluster, record: RunRecord) -> SftRunner:
    """Place and start the workers, and return the loop over them."""
    placement = HybridComponentPlacement(config, cluster)
    groups: dict[str, WorkerGroup[Any]] = {"actor": SftActor.create_group(config)}
    if evaluates(config) and config.runner.val_check_interval != -1:
        groups["rollout"] = MultiStepRolloutWorker.create_group(config)
        # It makes the environments of `env.eval` alone.
        groups["env"] = CollectingEnvWorker.create_group(config)
    launch_together(cluster, {group: placement.get_strategy(name) for name, group in groups.items()})
    return SftRunner(config, groups, record)
