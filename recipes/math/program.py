"""The program that `rlinf train recipe=math` runs."""

from __future__ import annotations

from typing import cast

from recipes.language.loop.reasoning_runner import ReasoningRunner
from recipes.language.loop.worker_groups import GenerationGroup, launch_groups
from recipes.language.rules.model_rules import require_model
from recipes.math.config import MathConfig
from rlinf_core import Cluster, Job, run_job
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker import WorkerReference

# Named, not imported, as only workers need torch.
ROLLOUT = WorkerReference[GenerationGroup](
    "recipes.language.workers.rollout_worker:LanguageRolloutWorker", GenerationGroup, "rollout"
)


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a language model as configured in `job`, and record the run in `folder`.

    Raises:
        RLinfError: see `run_job`; also a ConfigError if the model's folder is not usable.
    """
    require_model(cast("MathConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: MathConfig, cluster: Cluster, record: RunRecord) -> ReasoningRunner:
    """Place and start the workers, and return their runner."""
    return ReasoningRunner(config, launch_groups(config, cluster, ROLLOUT), record)
