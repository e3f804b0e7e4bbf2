"""The training loop of agents, that of language models with multi-turn agents instead of single answers; and the
program that `rlinf train recipe=agent` runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

from recipes.agent.agent_config import AgentConfig
from recipes.agent.conversation.turn_messages import engine_key
from recipes.agent.task_calls import AgentCalls, AgentGroup, IndexGroup, TaskCalls, TurnGroup
from recipes.language.answers.prompt_messages import GenerationReport, Prompt, ScoredGroup
from recipes.language.answers.sequences import Exit
from recipes.language.loop.answer_recovery import AnswerRecovery
from recipes.language.loop.generation import (
    AsyncRollouts,
    PromptService,
    Stage,
    SyncRollouts,
    Wait,
    orders_key,
    scoring,
    wait_for,
)
from recipes.language.loop.reasoning_runner import ReasoningRunner
from recipes.language.loop.worker_groups import launch_groups
from recipes.language.rules.model_rules import require_model
from rlinf_core import Channel, Cluster, Job, Relaunching, WorkerGroup, run_job
from rlinf_core.errors import RunError
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.run_program import Dead
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.handle import wait_together
from rlinf_core.worker.worker import WorkerReference

LOGGER = logging.getLogger("rlinf")


class AgentSyncRollouts(SyncRollouts):
    """Synchronous rollouts of agents: all tasks run together, and engines serve until the last run ends.

    Args:
        calls: the calls of the agent processes.
        rollout: the workers that generate turns.
        recovery: the recovery of the reward workers.
        engines: the number of rollout processes.
        channel: the channel to engines and reward workers.
    """

    def __init__(
        self, calls: TaskCalls, rollout: TurnGroup, recovery: AnswerRecovery, engines: int, channel: Channel
    ) -> None:
        super().__init__(rollout, self._serve)
        self._calls = calls
        self._serving = rollout
        self._recovery = recovery
        self._engines = engines
        self._channel = channel

    def _serve(
        self, asked: tuple[Prompt, ...], _wait: Wait
    ) -> tuple[Sequence[GenerationReport], Sequence[list[ScoredGroup]]]:
        """Run and score tasks; return the engines' reports, and each reward worker's groups."""
        serving, lost = self._serving.serve(), self._calls.lost

        def check() -> None:
            # Agents would wait forever for a failed engine, and scoring for a failed judge.
            self._check_alongside()
            if serving.failed:
                serving.wait()

        self._calls.begin(asked)
        _, scored = self._recovery.answered(asked, lambda *scoring: wait_for([self._calls, *scoring], check)[1:])
        for rank in range(self._engines):
            self._channel.put(None, key=engine_key(rank))
        (generated,) = wait_together(serving)
        if self._calls.lost > lost:
            self._recovery.drop_repeated()
        return generated, scored


class AgentRelaunching(Relaunching):
    """The relaunch of agent processes, each of which restarts its predecessor's tasks.

    Args:
        agents: the worker group.
        record: the record of the run.
        layout: the argument of their `init_worker`.
    """

    def __init__(self, agents: WorkerGroup[Any], record: RunRecord, layout: object) -> None:
        super().__init__({"agent": agents}, record)
        self._agents = agents
        self._layout = layout

    def may_relaunch(self, dead: Dead) -> bool:
        return True

    def prepare(self, dead: Dead) -> str:
        self._agents.execute_on(*dead["agent"]).init_worker(self._layout).wait()
        return "its tasks"


class AgentRunner(ReasoningRunner):
    """Runs the actor, rollout, reward and agent workers: act, score, learn."""

    answering: ClassVar[str] = "agent"

    def _prepared(self, layout: Any) -> None:
        super()._prepared(layout)
        self._agents_layout = layout

    def _sync_rollouts(self) -> PromptService:
        rollout, channel, sizes = cast("TurnGroup", self.rollout), self._channels[0], self.world_sizes
        self._slow_tools = SlowTools(LOGGER.warning)
        relaunching = AgentRelaunching(self.groups["agent"], self.record, self._agents_layout)
        self._calls = TaskCalls(
            cast("AgentGroup", self.answers), sizes["agent"], relaunching.relaunch, self._note_set_aside
        )
        return AgentSyncRollouts(self._calls, rollout, self._recovery, sizes["rollout"], channel)

    def _note_set_aside(self, task: Prompt, deaths: Sequence[str]) -> None:
        """Record a task that killed its processes."""
        self.record.set_aside("task", str(self._suspects.problem_of(task)), task.step, deaths)

    def _async_rollouts(self) -> AsyncRollouts:
        """See `ReasoningRunner`: tasks go to the agents, weights to the engines. A run that is under way starts over
        after a crash: what a tool has done can't be taken back.
        """
        sizes, turns = self.world_sizes, cast("TurnGroup", self.rollout)
        engines = [engine_key(rank) for rank in range(sizes["rollout"])]
        tasks = [orders_key(rank) for rank in range(sizes["agent"])]
        stages = (
            Stage(cast("AgentGroup", self.answers).generate_forever(), tasks),
            Stage(turns.serve_forever(), engines),
            scoring(self.reward, sizes["reward"]),
        )
        return AsyncRollouts(stages, engines, *self._channels, keeps_unfinished=False)

    def generate_rollouts(self, step: int | None = None) -> dict[str, float]:
        """See `ReasoningRunner`; the metrics include lost agent processes and moved tasks.

        Raises:
            RunError: the agent raised in every run, which the model's output alone does not explain.
        """
        metrics = super().generate_rollouts(step)
        if metrics.get(f"exit/{Exit.ERROR}") == 1.0:
            key = "agent.environment" if self._cfg.agent.run == "env_agent" else "agent.run"
            raise RunError(
                f"the agent raised in every run of step {self.next_step if step is None else step}",
                why="the log has the first of its exceptions",
                help=f"mend `{key}`; where it cannot read what the model says, have it end the run with reward 0",
            )
        metrics["agent/processes_lost"] = self._calls.lost
        metrics["agent/tasks_moved"] = self._calls.take_moved()
        metrics["agent/tasks_set_aside"] = self._calls.set_aside
        self._slow_tools.look(metrics)
        return metrics


_TOOL_SECONDS: Final = "agent/tool_seconds/"
# Thresholds of the warning: the share of a run's time, and seconds.
_SLOW_SHARE: Final = 0.5
_SLOW_SECONDS: Final = 0.1


class SlowTools:
    """Warns of tools that take more than half of an agent run's time.

    Args:
        emit: receives one line per slow tool.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._warned: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Check the metrics of a step."""
        whole = metrics.get("agent/seconds", 0.0)
        by_tool = {
            name.removeprefix(_TOOL_SECONDS): value for name, value in metrics.items() if name.startswith(_TOOL_SECONDS)
        }
        for name, seconds in by_tool.items():
            if name not in self._warned and seconds >= _SLOW_SECONDS and seconds > _SLOW_SHARE * whole > 0:
                self._warned.add(name)
                self._emit(f"agents spend {seconds:.2g} s of the {whole:.2g} s of a run in the tool `{name}`")


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
