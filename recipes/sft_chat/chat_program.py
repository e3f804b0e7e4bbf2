"""The program that `rlinf train recipe=sft_chat` runs."""

from __future__ import annotations

from typing import cast

from recipes.sft_chat.chat_rules import require_inputs
from recipes.sft_chat.chat_runner import ChatRunner, ChatTraining
from recipes.sft_chat.config import ChatConfig
from rlinf_core import Cluster, HybridComponentPlacement, Job, run_job
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.group.worker_group import launch_together
from rlinf_core.worker.worker_reference import WorkerReference

# Named and not imported: torch is for the workers.
ACTOR = WorkerReference[ChatTraining]("recipes.sft_chat.chat_actor:ChatActor", ChatTraining, "actor")


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a language model on conversations as configured in `job`, and record the run in `folder`.

    Raises:
        RLinfError: see `run_job`; and ConfigError: a row or the folder of the model cannot be used.
    """
    require_inputs(cast("ChatConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: ChatConfig, cluster: Cluster, record: RunRecord) -> ChatRunner:
    """Place and start the workers, and return the loop over them."""
    placement = HybridComponentPlacement(config, cluster)
    actor = ACTOR.create_group(config)
    launch_together(cluster, {actor: placement.get_strategy("actor")})
    return ChatRunner(config, actor, record)
