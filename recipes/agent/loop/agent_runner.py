"""The training loop of agents: the language-model loop, with multi-turn agents in place of single answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from recipes.agent.conversation.turn_messages import engine_key
from recipes.agent.loop.protocols import AgentGroup, TurnGroup
from recipes.agent.loop.slow_tools import SlowTools
from recipes.agent.loop.task_calls import TaskCalls
from recipes.language.loop.generation import (
    AsyncRollouts,
    PromptService,
    Stage,
    SyncRollouts,
    orders_key,
    scoring,
    wait_for,
)
from recipes.language.loop.prompts import Prompt, ScoredGroup
from recipes.language.loop.protocols import Generation, RewardGroup
from recipes.language.loop.reasoning_runner import ReasoningRunner
from rlinf_core import Channel, WorkerGroupHandle
from rlinf_core.worker.handle import wait_together

LOGGER = logging.getLogger("rlinf")


class AgentSyncRollouts(SyncRollouts):
    """Synchronous rollouts of agents: all tasks are run together, and engines serve until the last run is over.

    Args:
        calls: on the agent processes.
        rollout, reward: the groups.
        sizes: processes of each component.
        channel: to engines and reward workers.
    """

    def __init__(
        self, calls: TaskCalls, rollout: TurnGroup, reward: RewardGroup, sizes: Mapping[str, int], channel: Channel
    ) -> None:
        super().__init__(cast("Any", rollout), reward)
        self._calls = calls
        self._serving = rollout
        self._sizes = sizes
        self._channel = channel
        # A channel whose producers are all dead raises: the driver registers as one before the first agent does.
        self._channel.put((), key=engine_key(0))

    def _answered(
        self, asked: tuple[Prompt, ...], scoring: WorkerGroupHandle[list[ScoredGroup]]
    ) -> tuple[Sequence[Generation], Sequence[list[ScoredGroup]]]:
        """See `SyncRollouts`."""
        serving, lost = self._serving.serve(), self._calls.lost

        def check() -> None:
            # Agents would wait for a failed engine without an end, and scoring for a failed judge.
            self._check_alongside()
            if serving.failed:
                serving.wait()

        self._calls.begin(asked)
        _, scored = wait_for([self._calls, scoring], check)
        for rank in range(self._sizes["rollout"]):
            self._channel.put(None, key=engine_key(rank))
        (generated,) = wait_together(serving)
        if self._calls.lost > lost:
            self._drop_repeated()
        return generated, scored

    def _drop_repeated(self) -> None:
        """Drop duplicate groups, which a later call of `score` would count as its own."""
        for rank in range(self._sizes["reward"]):
            while not self._channel.empty(key=str(rank)):
                self._channel.get_nowait(key=str(rank))


class AgentRunner(ReasoningRunner):
    """Runs actor, rollout, reward and agent workers until the run is over: act, score, learn."""

    answering: ClassVar[str] = "agent"

    def _sync_rollouts(self) -> PromptService:
        """See `ReasoningRunner`."""
        rollout, channel, sizes = cast("TurnGroup", self.rollout), self._channels[0], self.world_sizes
        self._slow_tools = SlowTools(LOGGER.warning)
        self._calls = TaskCalls(cast("AgentGroup", self.answers), sizes["agent"])
        return AgentSyncRollouts(self._calls, rollout, self.reward, sizes, channel)

    def _async_rollouts(self) -> AsyncRollouts:
        """See `ReasoningRunner`: tasks go to the agents, weights to the engines. A run that is under way is begun anew
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
        """See `ReasoningRunner`; with how many agent processes have died, and how many tasks were moved since then."""
        metrics = super().generate_rollouts(step)
        metrics["agent/processes_lost"] = self._calls.lost
        metrics["agent/tasks_moved"] = self._calls.take_moved()
        self._slow_tools.look(metrics)
        return metrics
