"""The program that `rlinf serve` runs."""

from __future__ import annotations

from typing import cast

from recipes.sections.imports import runs_in_this_interpreter
from recipes.sections.model_folders import require_folder
from recipes.serve.config import PACKAGES, ServeConfig, require_port
from recipes.serve.values import AdapterTraining, SnapshotSampling
from rlinf_core import Cluster, ConfigError, HybridComponentPlacement, Job, run_job
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.run_program import JobLoop
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker import WorkerReference
from rlinf_core.worker.worker_group import launch_together

# Named, not imported, as only workers need torch.
ACTOR = WorkerReference[AdapterTraining]("recipes.serve.adapter_actor:AdapterActor", AdapterTraining, "actor")
ROLLOUT = WorkerReference[SnapshotSampling](
    "recipes.serve.snapshot_sampler:SnapshotSampler", SnapshotSampling, "rollout"
)


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Serve clients as configured in `job`, and record the run in `folder`.

    Raises:
        RLinfError: see `run_job`; also a ConfigError if a package is missing, or the model's folder or the port is not
            usable.
    """
    config = cast("ServeConfig", job.config)
    missing = missing_modules(PACKAGES)
    if missing:
        raise ConfigError(
            f"the service needs the package `{missing[0]}`, {absence(missing[0])}",
            help=f"run `{install_command(*missing)}`",
        )
    if config.actor.model.model_path is not None and runs_in_this_interpreter(config, "actor"):
        require_folder(config.actor.model.model_path, "a folder that `save_pretrained` wrote")
    # Check the port before workers start, which takes a while.
    require_port(config.server.port)
    run_job(job, folder, listener, launch)


def launch(config: ServeConfig, cluster: Cluster, record: RunRecord) -> JobLoop:
    """Place and start the workers, and return their runner."""
    from recipes.serve.serve_runner import ServeRunner

    placement = HybridComponentPlacement(config, cluster)
    actor, rollout = ACTOR.create_group(config), ROLLOUT.create_group(config)
    launch_together(cluster, {actor: placement.get_strategy("actor"), rollout: placement.get_strategy("rollout")})
    return ServeRunner(config, actor, rollout, record)
