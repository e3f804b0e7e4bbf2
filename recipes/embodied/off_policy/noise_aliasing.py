"""Updates of DSRL by noise aliasing: values of the actions that noise leads to, and of noise by those.

Wagenmaker et al. 2025, "Steering your diffusion policy with latent space reinforcement learning" (arXiv 2506.15799,
section 4.3, DSRL-NA): different noise may lead to the same actions, so that what was learned of one is known of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recipes.embodied.config.off_policy_config import OffPolicyConfig
from recipes.embodied.envs.env_spec import Observation
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.critics import Critics
from recipes.embodied.models.small.steered_policy import SteeredPolicy
from recipes.embodied.off_policy.critic_learner import OffPolicyLearner, TransitionTensors, critics_of
from recipes.embodied.off_policy.losses import ensemble_loss, reduced
from recipes.training.state.training_state import TrainingState
from recipes.training.updater import Figures, Updater
from rlinf_core import Loss


class NoiseAliasedLearner(OffPolicyLearner):
    """Critics learn from actions, as in SAC; those of noise from the critics, at noise drawn anew; and the policy from
    the latter.

    Args:
        config: see `OffPolicyLearner`.
        policy: a `SteeredPolicy` with its optimizer.
        critics: `Critics` of actions [n, C * A] with their optimizer.
        noise_critics: `Critics` of noise [n, W] with theirs.
        settings: those of `OffPolicyLearner`.
    """

    def __init__(
        self,
        config: OffPolicyConfig,
        policy: TrainingState,
        critics: TrainingState,
        noise_critics: TrainingState,
        **settings: Any,
    ) -> None:
        super().__init__(config, policy, critics, **settings)
        if not isinstance(self._policy, SteeredPolicy):
            raise TypeError(f"noise aliasing needs a SteeredPolicy, not a {type(self._policy).__name__}")
        self._steered = self._policy
        self._noise_critics: Critics = critics_of(noise_critics)
        self._noise_updater = Updater(
            noise_critics.strategy,
            noise_critics.optimizer,
            clip_grad=settings.get("clip_grad", 0.0),
            skip_nonfinite=settings.get("skip_nonfinite", False),
        )
        self._critic_weights += list(self._noise_critics.parameters())

    def prepare(self, observations: Observation) -> Inputs:
        """See `OffPolicyLearner`: with what the frozen policy makes of them."""
        return self._steered.prepare(observations)

    def check_weights(self, where: str) -> None:
        """See `OffPolicyLearner`."""
        super().check_weights(where)
        self._noise_updater.check_weights(where)

    def _next_actions(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        noise, logprobs = super()._next_actions(inputs)
        return self._steered.carried_out(inputs, noise), logprobs

    def _update_critics(self, batch: TransitionTensors, step: int, figures: Figures) -> Tensor:
        errors = super()._update_critics(batch, step, figures)
        noise = self._steered.standard_noise(batch.rewards)
        with torch.no_grad():
            inputs = self._critics.encoded(batch.inputs)
            values = self._critics(inputs, self._steered.carried_out(inputs, noise))
        targets = reduced(values, self._config.policy_values)

        def loss(part: TransitionTensors) -> Loss:
            # They see what the critics of actions do, whose encoder is not theirs to train.
            of_noise = ensemble_loss(self._noise_critics(part.inputs, noise), targets)
            return Loss(of_noise.loss, {"critic/noise_loss": of_noise.loss.detach()})

        self._noise_updater.update([replace(batch, inputs=inputs)], loss, step, figures)
        return errors

    def _values_of_choice(self, inputs: Inputs, actions: Tensor) -> Tensor:
        return self._noise_critics(inputs, actions)
