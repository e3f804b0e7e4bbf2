"""The program that `rlinf train recipe=agent` runs."""

from __future__ import annotations

from typing import Any, cast

from recipes.agent.config.agent_config import AgentConfig
from recipes.agent.loop.agent_runner import AgentRunner
from recipes.agent.loop.task_calls import AgentCalls, IndexGroup, TurnGroup
from recipes.language.config.group_names import LanguageLayout
from recipes.language.loop.protocols import ACTOR, REWARD, optional_groups
from recipes.language.rules.model_rules import require_model
from rlinf_core import Cluster, HybridComponentPlacement, Job, WorkerGroup, run_job
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.group.worker_group import launch_together
from rlinf_core.worker.worker_reference import WorkerReference

# Named and not imported: torch is for the workers that compute.
ROLLOUT = WorkerReference[TurnGroup]("recipes.agent.workers.rollout_worker:AgentRolloutWorker", TurnGroup, "rollout")
AGENT = WorkerReference[AgentCalls]("recipes.agent.workers.agent_worker:AgentWorker", AgentCalls, "agent", forked=True)
INDEX = WorkerReference[IndexGroup]("recipes.agent.workers.index_worker:IndexWorker", IndexGroup, "index")


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a language-model agent as configured in `job`, and record the run in `folder`.

    Raises:
        RLinfError: see `run_job`; and ConfigError: the folder of the model cannot be used.
    """
    require_model(cast("AgentConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: AgentConfig, cluster: Cluster, record: RunRecord) -> AgentRunner:
    """Place and start the workers, and return the loop over them."""
    placement = HybridComponentPlacement(config, cluster)
    actor, rollout, reward = ACTOR.create_group(config), ROLLOUT.create_group(config), REWARD.create_group(config)
    agent = AGENT.create_group(config)
    others: dict[str, WorkerGroup[Any]] = {"agent": agent}
    if config.has_index:
        others["index"] = INDEX.create_group(config)
    evaluators = optional_groups(config)
    groups = {"actor": actor, "rollout": rollout, "reward": reward, **others, **evaluators}
    launch_together(cluster, {group: placement.get_strategy(name) for name, group in groups.items()})
    return AgentRunner(
        config,
        actor,
        rollout,
        reward,
        LanguageLayout,
        record,
        evaluators=evaluators,
        others=others,
    )
