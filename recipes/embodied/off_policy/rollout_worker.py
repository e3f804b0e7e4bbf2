"""Rollout workers of off-policy learning: they send what was observed after each step, and no values."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.layout import routes_of
from recipes.embodied.messages import CHUNKS, EXECUTED, INTERVENTIONS
from recipes.embodied.models.base import Inputs, PolicyOutput
from recipes.embodied.precision import computing, output_in_float32
from recipes.embodied.rollout_worker import MultiStepRolloutWorker
from recipes.embodied.routing import Routes
from recipes.embodied.trajectory import RolloutBuffer, RolloutChunks

# Prefix of the names, among the steps of `RolloutChunks`, of observations after a step.
NEXT = "next/"
ACTIONS = "actions"


class TransitionRecorder(RolloutBuffer):
    """Writes down the steps of one batch of environments, with the observations after each of them."""

    def add_following(self, step: int, inputs: Inputs) -> None:
        """Record the observations after a step: those in which an episode ended where one did."""
        for name, tensor in inputs.items():
            self._write(self._steps, f"{NEXT}{name}", step, tensor)

    def add_outcome(self, step: int, outcome: dict[str, NDArray[Any]], finals: Tensor | None) -> None:
        """Record the outcome, and the actions that were carried out where they need not be the policy's."""
        super().add_outcome(step, outcome, finals)
        for name, column in ((EXECUTED, ACTIONS), (INTERVENTIONS, INTERVENTIONS)):
            if name in outcome:
                self._write(self._steps, column, step, torch.from_numpy(outcome[name]))  # pyright: ignore[reportUnknownMemberType]


class OffPolicyRolloutWorker(MultiStepRolloutWorker):
    """Acts as `MultiStepRolloutWorker` does; at the beginning of a run it may act at random."""

    def generate(self, step: int | None = None) -> None:
        """See `MultiStepRolloutWorker`."""
        step = self._step + 1 if step is None else step
        train = self._config.env.train
        routes = routes_of(self._layout, self._config, training=True)
        before = (step - 1) * routes.total * train.max_steps_per_rollout_epoch * train.rollout_epoch
        # A function of the step, so that a resumed run does the same.
        self._random = before < self._config.algorithm.off_policy.random_steps
        super().generate(step)

    def _pass(self, routes: Routes, *, training: bool) -> dict[int, RolloutChunks]:
        """Act for one pass of all stages; return what happened by stage, where it is learned from."""
        if not training:
            return super()._pass(routes, training=False)
        policy = self.policy
        shares = {stage: routes.of_rollout(self._rank, stage) for stage in range(routes.stages)}
        shares = {stage: found for stage, found in shares.items() if found}
        recorders: dict[int, TransitionRecorder] = {}
        finished: dict[int, RolloutChunks] = {}
        chunk = chunks = 0
        while shares and chunk <= chunks:
            for stage, peers in shares.items():
                with self.worker_timer("rollout/wait"):
                    message = self._receive(peers)
                if chunk == 0:
                    chunks = int(message[CHUNKS][0])
                    recorders[stage] = TransitionRecorder(chunks, self._version)
                inputs = policy.prepare(message["observations"])
                output: PolicyOutput | None = None
                if chunk < chunks:
                    with self.worker_timer("rollout/policy"), computing(self._config.actor, self.torch_device):
                        output = output_in_float32(policy.act(inputs))
                    if self._random:
                        drawn = torch.rand(output.actions.shape, device=output.actions.device) * 2 - 1
                        output = PolicyOutput(drawn, output.logprobs, None)
                    self._answer(peers, policy.to_env(output.actions))
                recorder = recorders[stage]
                if chunk:
                    recorder.add_outcome(chunk - 1, message, None)
                    recorder.add_following(chunk - 1, self._following(message, inputs))
                if output is not None:
                    recorder.add_action(chunk, inputs, output)
                else:
                    finished[stage] = recorder.finish(None)
            chunk += 1
        return finished

    def _following(self, message: dict[str, Any], inputs: Inputs) -> Inputs:
        """Return the observations after a step; where an episode ended, those in which it did."""
        if "final_observations" not in message:
            # No episode was cut off, and of one that terminated nothing follows.
            return inputs
        finals = self.policy.prepare(message["final_observations"])
        ended = torch.from_numpy(message["truncations"] | message["terminations"])[:, -1]  # pyright: ignore[reportUnknownMemberType]
        return {name: _chosen(ended, finals[name], each) for name, each in inputs.items()}


def _chosen(rows: Tensor, theirs: Tensor, others: Tensor) -> Tensor:
    """Return rows [n, ...] of `theirs` where `rows` bool [n] says so, of `others` elsewhere."""
    return torch.where(rows.to(others.device).reshape(-1, *(1,) * (others.dim() - 1)), theirs, others)
