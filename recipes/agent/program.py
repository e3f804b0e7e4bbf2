"""The program that `rlinf train recipe=agent` runs."""

from __future__ import annotations

from typing import cast

from recipes.agent.config.agent_config import AgentConfig
from recipes.agent.loop.agent_runner import AgentRunner
from recipes.agent.loop.task_calls import AgentCalls, IndexGroup, TurnGroup
from recipes.language.loop.worker_groups import launch_groups
from recipes.language.rules.model_rules import require_model
from rlinf_core import Cluster, Job, run_job
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker_reference import WorkerReference

# Named rather than imported, to load torch only in workers that need it.
ROLLOUT = WorkerReference[TurnGroup]("recipes.agent.workers.rollout_worker:AgentRolloutWorker", TurnGroup, "rollout")
AGENT = WorkerReference[AgentCalls]("recipes.agent.workers.agent_worker:AgentWorker", AgentCalls, "agent", forked=True)
INDEX = WorkerReference[IndexGroup]("recipes.agent.workers.index_worker:IndexWorker", IndexGroup, "index")


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a language-model agent as `job` configures it, and record the run in `folder`.

    Raises:
        RLinfError: see `run_job`; ConfigError if the model's folder cannot be used.
    """
    require_model(cast("AgentConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: AgentConfig, cluster: Cluster, record: RunRecord) -> AgentRunner:
    """Place and start the workers, and return their training loop."""
    index: dict[str, WorkerReference[IndexGroup]] = {"index": INDEX} if config.has_index else {}
    return AgentRunner(config, launch_groups(config, cluster, ROLLOUT, agent=AGENT, **index), record)
