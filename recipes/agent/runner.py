"""The training loop of agents: that of language models, whose prompts agents answer by many turns of the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from recipes.agent.messages import engine_key
from recipes.agent.protocols import TurnGroup
from recipes.language.loop.generation import PromptService, Turns, wait_for
from recipes.language.loop.prompts import Prompt, ScoredGroup
from recipes.language.loop.protocols import AnsweringGroup, Generation, RewardGroup
from recipes.language.loop.runner import ReasoningRunner
from rlinf_core import Channel, WorkerGroupHandle
from rlinf_core.worker.handle import wait_together


class AgentTurns(Turns):
    """All tasks that were asked are done by one call on each group; engines serve until the last run is over.

    Args:
        agents, rollout, reward: the groups.
        engines: how many processes draw turns.
        channel: to them.
    """

    def __init__(
        self, agents: AnsweringGroup, rollout: TurnGroup, reward: RewardGroup, engines: int, channel: Channel
    ) -> None:
        super().__init__(cast("Any", rollout), reward)
        self._agents = agents
        self._serving = rollout
        self._engines = engines
        self._channel = channel

    def _answered(
        self, asked: tuple[Prompt, ...], scoring: WorkerGroupHandle[list[ScoredGroup]]
    ) -> tuple[Sequence[Generation], Sequence[list[ScoredGroup]]]:
        """See `Turns`."""
        serving = self._serving.serve()

        def check() -> None:
            # Agents would wait for a failed engine without an end.
            if serving.failed:
                serving.wait()

        handles: list[WorkerGroupHandle[Any]] = [self._agents.generate(asked), scoring]
        _, scored = wait_for(handles, check)
        for rank in range(self._engines):
            self._channel.put(None, key=engine_key(rank))
        (generated,) = wait_together(serving)
        return generated, scored


class AgentRunner(ReasoningRunner):
    """Runs actor, rollout, reward and agent workers until the run is over: act, score, learn."""

    answering: ClassVar[str] = "agent"

    def _turns(self) -> PromptService:
        """See `ReasoningRunner`."""
        rollout, channel = cast("TurnGroup", self.rollout), self._channels[0]
        return AgentTurns(self.answers, rollout, self.reward, self.world_sizes["rollout"], channel)
