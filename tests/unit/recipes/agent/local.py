"""An engine worker in this process, as agents ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

import torch

from recipes.agent.agent_config import AgentConfig
from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest, TurnEncoder
from recipes.agent.workers.rollout_worker import AgentRolloutWorker
from recipes.language.engines.registry import make_engine
from recipes.language.learning.warm_start import initial_policy
from recipes.language.models.load_model import make_tokenizer, stop_token_ids

T = TypeVar("T")


def agent_config(**sections: Any) -> AgentConfig:
    """Return a file of small models that are not shown anything; `sections` change it, key by key."""
    small: dict[str, Any] = {
        "actor": {"model": {"hidden_dim": 32, "num_layers": 1}, "warm_start": {"steps": 0}},
        "runner": {"seq_length": 120},
        "data": {"max_prompt_length": 100},
        "rollout": {"sampling_params": {"max_new_tokens": 8}},
    }
    merged = {name: {**small.get(name, {}), **sections.get(name, {})} for name in {*small, *sections}}
    placed = {"actor,rollout,reward,agent": {"node_group": "node", "placement": 0}}
    return AgentConfig.model_validate(
        {"recipe": "agent", "cluster": {"num_nodes": 1, "component_placement": placed}, **merged}
    )


class LocalEngine(AgentRolloutWorker):
    """Draws turns in this process; its messages go through lists instead of channels."""

    def __init__(self, config: AgentConfig, *, warm: bool = False) -> None:
        self._config = config
        self._open = {}
        self._drawn = 0
        self._tokenizer = make_tokenizer(config.actor)
        self._stops = stop_token_ids(self._tokenizer, None)
        self._engine = make_engine(config, self._tokenizer, self._stops, torch.device("cpu"))
        self._encoder = TurnEncoder(self._tokenizer, apply_chat_template=config.data.apply_chat_template)
        self.policy = initial_policy(config, self._tokenizer, torch.device("cpu")).policy if warm else None
        if self.policy is not None:
            self._engine.load_weights(cast("Any", self.policy.model).state_dict().items(), 0)
        self._asked: list[DrawRequest] = []
        self._answers: dict[int, asyncio.Future[DrawnTurn]] = {}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._tokenizer

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        number = len(self._answers)
        result = self._answers[number] = asyncio.get_running_loop().create_future()
        self._asked.append(request._replace(request_id=number))
        return await result

    def _send(self, agent: int, turns: list[DrawnTurn]) -> None:
        for turn in turns:
            self._answers[turn.request_id].set_result(turn)

    def run(self, *runs: Awaitable[T]) -> list[T]:
        """Return what runs return, which ask this engine."""

        async def serve() -> list[T]:
            tasks = [asyncio.ensure_future(run) for run in runs]
            while not all(task.done() for task in tasks):
                # Until every run has gone on as far as it can.
                for _ in range(8):
                    await asyncio.sleep(0)
                asked, self._asked = self._asked, []
                self._begin(asked)
                self._finish(self._engine.step())
            return [task.result() for task in tasks]

        return asyncio.run(serve())
