"""Updates of critics, policy and temperature from batches of a replay buffer.

Needs tensors and networks, no worker: the actor feeds it, tests call it directly.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recipes.embodied.config.off_policy_config import OffPolicyConfig
from recipes.embodied.envs.env_spec import Observation
from recipes.embodied.models.base_policy import BasePolicy, Inputs
from recipes.embodied.models.critics import Critics
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.small.squashed_policy import SquashedPolicy
from recipes.embodied.off_policy.losses import (
    advantage_weighted_loss,
    bootstrapped_targets,
    cloning_policy_loss,
    copy_weights,
    deterministic_policy_loss,
    ensemble_loss,
    expectile_loss,
    move_toward,
    soft_policy_loss,
    temperature_loss,
)
from recipes.embodied.replay.replay_types import ReplayBatch
from recipes.training.arrays import Array
from recipes.training.optim.optimizer import EagerAdamW
from recipes.training.state.training_state import TrainingState
from recipes.training.updater import Figures, Updater
from rlinf_core import Loss


@dataclass(frozen=True)
class TransitionTensors:
    """A `ReplayBatch` as tensors on the device, its observations prepared by the policy."""

    inputs: Inputs
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    next_inputs: Inputs
    weights: Tensor

    @classmethod
    def of(
        cls, batch: ReplayBatch, prepare: Callable[[Observation], Inputs], device: torch.device
    ) -> TransitionTensors:
        """Return a batch on a device, its observations as `prepare` makes them."""

        def moved(array: Array) -> Tensor:
            return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

        return cls(
            prepare(batch.observations),
            moved(batch.actions),
            moved(batch.rewards),
            moved(batch.discounts),
            prepare(batch.next_observations),
            moved(batch.weights),
        )


class OffPolicyLearner:
    """Takes updates of critics, policy and temperature, together with the learners of other ranks.

    Random numbers come from torch's own generator, which the caller seeds.

    Args:
        config: the section `algorithm.off_policy`.
        deterministic: learn as TD3 does; else as SAC.
        clones: stay near the actions of a batch, as TD3+BC does.
        implicit: choose no actions but those of a batch, as IQL does; the critics judge states, too.
        policy: a `SquashedPolicy` with its optimizer.
        critics: `Critics` with their optimizer.
        temperature_lr: learning rate of the temperature.
        clip_grad: largest norm of a gradient; 0: any.
        skip_nonfinite: leave updates with a NaN or an infinity out, instead of raising.

    Attributes:
        updates: the number of updates of the critics since the beginning.
        log_temperature: a scalar.
    """

    def __init__(
        self,
        config: OffPolicyConfig,
        policy: TrainingState,
        critics: TrainingState,
        *,
        deterministic: bool,
        clones: bool = False,
        implicit: bool = False,
        temperature_lr: float,
        clip_grad: float = 0.0,
        skip_nonfinite: bool = False,
    ) -> None:
        self._config, self._deterministic = config, deterministic
        self._clones, self._implicit = clones, implicit
        self._strategy = policy.strategy
        self._policy, self._critics = _policy_of(policy), critics_of(critics)
        device = next(self._policy.parameters()).device
        # The critics' loss alone trains the encoder of images, as in SAC-AE (arXiv 1910.01741). Target critics take its
        # features, too, as in DrQ-v2 (arXiv 2107.09645). The policy acts by a copy.
        self._encoder = tuple(list(module.features.parameters()) for module in (self._policy, self._critics))
        # A policy that was loaded knows how to see.
        copy_weights(*reversed(self._encoder))
        # CrossQ has no target networks; only TD3 has a target policy.
        self._target_critics = None if config.critic_norm == "batch" else _frozen_copy(self._critics)
        self._target_policy = _frozen_copy(self._policy) if deterministic else None
        action_size = self._policy.action_size
        self._target_entropy = -float(action_size) if config.target_entropy is None else config.target_entropy
        self.log_temperature = torch.tensor(math.log(config.temperature), device=device, requires_grad=True)
        self._temperature_optimizer = EagerAdamW(
            [self.log_temperature], lr=temperature_lr, weight_decay=0.0, fused=True
        )
        # Cached for every update: a module collects its weights again on each call.
        self._critic_weights = list(self._critics.parameters())
        self._followers: list[tuple[list[Tensor], list[Tensor]]] = [
            (list(target.parameters()), list(module.parameters()))
            for target, module in ((self._target_critics, self._critics), (self._target_policy, self._policy))
            if target is not None
        ]
        self._policy_updater, self._critic_updater = (
            Updater(trained.strategy, trained.optimizer, clip_grad=clip_grad, skip_nonfinite=skip_nonfinite)
            for trained in (policy, critics)
        )
        self.updates = 0

    def normalize(self, normalization: Normalization) -> None:
        """Normalize states of policy and critics, targets included, in this way from now on."""
        self._policy.normalization = normalization
        for critics in (self._critics, self._target_critics):
            if critics is not None:
                critics.normalization = self._policy.scaling
        if self._target_policy is not None:
            self._target_policy.normalization = normalization

    def prepare(self, observations: Observation) -> Inputs:
        """Return observations of a replay buffer as the policy and the critics take them."""
        return BasePolicy.prepare(self._policy, observations)

    def update(self, batch: TransitionTensors, step: int, figures: Figures, critic_figures: Figures) -> Tensor:
        """Update the critics, and in every `policy_interval`-th update the policy and the temperature.

        Args:
            batch: the batch of this rank.
            step: the training step, for messages.
            figures: get the metrics of the policy.
            critic_figures: get those of the critics.

        Returns:
            float [n], the mean error of the critics for each transition, of either sign.

        Raises:
            NonFiniteError: a loss or a gradient is not finite.
        """
        errors = self._update_critics(batch, step, critic_figures)
        copy_weights(*self._encoder)
        self.updates += 1
        updates_policy = self.updates % self._config.policy_interval == 0
        if updates_policy:
            self._update_policy(batch, step, figures)
        if updates_policy or not self._deterministic:
            # In TD3 the targets wait for the policy.
            for targets, weights in self._followers:
                move_toward(targets, weights, self._config.target_rate)
        return errors

    def _update_critics(self, batch: TransitionTensors, step: int, figures: Figures) -> Tensor:
        if self._implicit:
            return self._update_implicitly(batch, step, figures)
        if self._target_critics is None:
            td_errors: list[Tensor] = []
            self._critic_updater.update([batch], lambda part: self._joint_loss(part, td_errors), step, figures)
            return td_errors[-1]
        with torch.no_grad():
            following = self._critics.encoded(batch.next_inputs)
            actions, logprobs = self._next_actions(following)
            values = self._target_critics(following, actions)
        targets = self._targets(batch, values, logprobs)
        errors: list[Tensor] = []

        def loss(part: TransitionTensors) -> Loss:
            values = self._critics(part.inputs, part.actions)
            errors.append((values.detach() - targets).mean(dim=0))
            return ensemble_loss(values, targets, part.weights)

        self._critic_updater.update([batch], loss, step, figures)
        return errors[-1]

    def _update_implicitly(self, batch: TransitionTensors, step: int, figures: Figures) -> Tensor:
        """Update values of states toward those of recorded actions, and these by the states that follow (IQL)."""
        with torch.no_grad():
            following = self._critics.of_states(batch.next_inputs)
            targets = bootstrapped_targets(batch.rewards, batch.discounts, following[None])
            recorded = self._recorded_values(self._critics.encoded(batch.inputs), batch.actions)
        errors: list[Tensor] = []

        def loss(part: TransitionTensors) -> Loss:
            inputs = self._critics.encoded(part.inputs)
            values = self._critics(inputs, part.actions)
            errors.append((values.detach() - targets).mean(dim=0))
            critics = ensemble_loss(values, targets, part.weights)
            states = expectile_loss(self._critics.of_states(inputs), recorded, self._config.expectile)
            return Loss(critics.loss + states.loss, {**critics.metrics, **states.metrics})

        self._critic_updater.update([batch], loss, step, figures)
        return errors[-1]

    def _recorded_values(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Return the least of what the target critics say of recorded actions, [n]."""
        critics = self._critics if self._target_critics is None else self._target_critics
        return critics(inputs, actions).amin(dim=0)

    def _advantages(self, batch: TransitionTensors) -> Tensor:
        """Return by how much recorded actions are better than their states, [n]."""
        with torch.no_grad():
            return self._recorded_values(batch.inputs, batch.actions) - self._critics.of_states(batch.inputs)

    def _joint_loss(self, batch: TransitionTensors, errors: list[Tensor]) -> Loss:
        """Return the loss of CrossQ: present and next actions are normalized in one batch."""
        with torch.no_grad():
            actions, logprobs = self._next_actions(self._critics.encoded(batch.next_inputs))
        both = {name: torch.cat((tensor, batch.next_inputs[name])) for name, tensor in batch.inputs.items()}
        self._critics.train()
        values, following = self._critics(both, torch.cat((batch.actions, actions))).chunk(2, dim=1)
        self._critics.eval()
        targets = self._targets(batch, following.detach(), logprobs)
        errors.append((values.detach() - targets).mean(dim=0))
        return ensemble_loss(values, targets, batch.weights)

    def _next_actions(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return the policy's next actions, and their log-probabilities where entropy counts."""
        if self._target_policy is None:
            actions, logprobs = self._policy.sample(inputs)
            return actions, logprobs if self._config.entropy_in_target else None
        actions, _ = self._target_policy.sample(inputs)
        bound = self._config.target_noise_clip
        noise = (torch.randn_like(actions) * self._config.target_noise).clamp(-bound, bound)
        return (actions + noise).clamp(-1, 1), None

    def _targets(self, batch: TransitionTensors, values: Tensor, logprobs: Tensor | None) -> Tensor:
        if self._config.critics_in_target < len(values):
            chosen = torch.randperm(len(values), device=values.device)[: self._config.critics_in_target]
            values = values[chosen]
        return bootstrapped_targets(batch.rewards, batch.discounts, values, logprobs, self.temperature)

    def _update_policy(self, batch: TransitionTensors, step: int, figures: Figures) -> None:
        with torch.no_grad():
            batch = replace(batch, inputs=self._critics.encoded(batch.inputs))
        logprobs_of_parts: list[Tensor] = []

        def loss(part: TransitionTensors) -> Loss:
            if self._implicit:
                chosen = self._policy(part.inputs, part.actions[:, None]).logprobs.sum(dim=(1, 2))
                return advantage_weighted_loss(chosen, self._advantages(part), self._config.advantage_scale)
            actions, logprobs = self._policy.sample(part.inputs)
            values = self._values_of_choice(part.inputs, actions)
            if self._clones:
                return cloning_policy_loss(values, actions, part.actions, self._config.cloning_scale)
            if logprobs is None:
                return deterministic_policy_loss(values)
            logprobs_of_parts.append(logprobs.detach())
            return soft_policy_loss(logprobs, values, self.temperature, self._config.policy_values)

        with _without_gradients(self._critic_weights):
            self._policy_updater.update([batch], loss, step, figures)
        if logprobs_of_parts and self._config.learn_temperature:
            self._update_temperature(logprobs_of_parts[-1])

    def _values_of_choice(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Return what critics say of what the policy chooses, [E, n], with gradients through it."""
        return self._critics(inputs, actions)

    def _update_temperature(self, logprobs: Tensor) -> None:
        self._temperature_optimizer.zero_grad()
        temperature_loss(self.log_temperature, logprobs, self._target_entropy).backward()
        gradient = self.log_temperature.grad
        if gradient is not None and self._strategy.world_size > 1:
            gradient.copy_(self._strategy.reduce_sum(gradient) / self._strategy.world_size)
        self._temperature_optimizer.step()

    @property
    def temperature(self) -> Tensor:
        """The weight of the entropy, a scalar without gradients."""
        return self.log_temperature.detach().exp()

    def state(self) -> dict[str, Any]:
        """Return the checkpointed state besides weights and optimizers: target networks, temperature, update count."""
        targets = {"target_critics": self._target_critics, "target_policy": self._target_policy}
        return {
            **{name: target.state_dict() for name, target in targets.items() if target is not None},
            "critic_buffers": dict(self._critics.named_buffers()),
            "log_temperature": self.log_temperature.detach(),
            "temperature_optimizer": self._temperature_optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` returned."""
        for name, module in (("target_critics", self._target_critics), ("target_policy", self._target_policy)):
            if module is not None:
                module.load_state_dict(state[name])
        with torch.no_grad():
            for name, buffer in self._critics.named_buffers():
                buffer.copy_(state["critic_buffers"][name])
            self.log_temperature.copy_(state["log_temperature"])
        self._temperature_optimizer.load_state_dict(state["temperature_optimizer"])
        self.updates = int(state["updates"])

    def check_weights(self, where: str) -> None:
        """Refuse weights that are not finite; see `Updater.check_weights`."""
        self._policy_updater.check_weights(where)
        self._critic_updater.check_weights(where)


def _policy_of(state: TrainingState) -> SquashedPolicy:
    if not isinstance(state.policy, SquashedPolicy):
        raise TypeError(f"off-policy learning needs a SquashedPolicy, not a {type(state.policy).__name__}")
    return state.policy


def critics_of(state: TrainingState) -> Critics:
    """Return the critics that a state trains."""
    if not isinstance(state.policy, Critics):
        raise TypeError(f"off-policy learning needs Critics, not a {type(state.policy).__name__}")
    return state.policy


def _frozen_copy(module: nn.Module) -> Any:
    return copy.deepcopy(module).requires_grad_(False)


@contextmanager
def _without_gradients(weights: Sequence[Tensor]) -> Generator[None, None, None]:
    """Disable gradients of some weights temporarily; gradients still flow through operations on them."""
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
