"""SAC, soft actor-critic: Haarnoja et al. 2018 (arXiv 1812.05905). RLPD is SAC with demonstrations in the batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import Field

from recipes.embodied.config.algorithm_config import OF_ALGORITHM, BootstrappedOptions, BootstrappedSettings, LossName
from recipes.embodied.off_policy.algorithm import BootstrappedAlgorithm, TransitionTensors
from rlinf_core import IgnoredKeys
from rlinf_core.config.sections.values import PositiveFloat
from rlinf_core.scalars import Bool, Float

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from recipes.embodied.models.base_policy import Inputs
    from recipes.training.updater import Figures
    from rlinf_core import Loss

# The reduction of an ensemble's values: minimum or mean.
Reduction: TypeAlias = Literal["min", "mean"]


class SacOptions(BootstrappedOptions):
    """Options of SAC."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("target_entropy",),
            lambda options, sizes: not options.learn_temperature,
            "the entropy weight is fixed: `learn_temperature` is false",
            because=("learn_temperature",),
        ),
    )

    policy_values: Reduction = Field(
        default="min", description="Value of the ensemble that the policy maximizes: the minimum or the mean."
    )
    temperature: PositiveFloat = Field(default=1.0, description="Initial weight of the entropy.")
    learn_temperature: Bool = Field(default=True, description="Adapt the entropy weight to reach `target_entropy`.")
    target_entropy: Float | None = Field(
        default=None, description="Target entropy, in nats. Default: minus the action dimension."
    )
    entropy_in_target: Bool = Field(default=True, description="Include the entropy of later actions in the return.")


class SacSettings(BootstrappedSettings):
    """The keys of SAC."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("target_rate",),
            lambda settings, sizes: settings.critic_norm == "batch",
            "`critic_norm: batch` needs no target networks",
            because=("critic_norm",),
        ),
    )

    loss_type: LossName = "sac"
    options: SacOptions = Field(default_factory=SacOptions, description=OF_ALGORITHM)


Soft = TypeVar("Soft", bound=SacSettings)


class Sac(BootstrappedAlgorithm[Soft]):
    """SAC, whose policy also maximizes entropy, with a learned weight: the temperature."""

    settings_model = SacSettings
    has_fixed_noise = False

    def __init__(self, *args: Any, **named: Any) -> None:
        import torch

        from recipes.training.optimizer import EagerAdamW

        super().__init__(*args, **named)
        device, target = next(self.policy.parameters()).device, self.settings.options.target_entropy
        self._target_entropy = -float(self.policy.action_size) if target is None else target
        self.log_temperature = torch.tensor(
            math.log(self.settings.options.temperature), device=device, requires_grad=True
        )
        self._optimizer = EagerAdamW([self.log_temperature], lr=self.lr, weight_decay=0.0, fused=True)

    @property
    def temperature(self) -> Tensor:
        """The weight of the entropy, a scalar without gradients."""
        return self.log_temperature.detach().exp()

    def entropy_weight(self) -> Tensor:
        return self.temperature

    def next_actions(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        actions, logprobs = self.policy.sample(inputs)
        return actions, logprobs if self.settings.options.entropy_in_target else None

    def policy_loss(self, batch: TransitionTensors) -> Loss:
        actions, logprobs = self.policy.sample(batch.inputs)
        if logprobs is None:
            raise ValueError("the policy explores with noise of a fixed size, and has no entropy to learn")
        self._logprobs = logprobs.detach()
        values = self.values_of_choice(batch.inputs, actions)
        return soft_policy_loss(logprobs, values, self.temperature, self.settings.options.policy_values)

    def values_of_choice(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Return the critics' values of the policy's choice, [E, n], with gradients through the choice."""
        return self.critics(inputs, actions)

    def update_policy(self, batch: TransitionTensors, step: int, figures: Figures) -> None:
        """See `OffPolicyAlgorithm`; also takes one update of the temperature."""
        skipped = figures.skipped
        super().update_policy(batch, step, figures)
        # The log-probabilities of a skipped batch may not be finite.
        if not self.settings.options.learn_temperature or figures.skipped > skipped:
            return
        self._optimizer.zero_grad()
        temperature_loss(self.log_temperature, self._logprobs, self._target_entropy).backward()
        gradient = self.log_temperature.grad
        if gradient is not None and self.strategy.world_size > 1:
            gradient.copy_(self.strategy.reduce_sum(gradient) / self.strategy.world_size)
        self._optimizer.step()

    def metrics(self) -> dict[str, float]:
        return {"train/actor/temperature": float(self.temperature)}

    def state(self) -> dict[str, Tensor]:
        """See `OffPolicyAlgorithm`; also the temperature with its optimizer's state."""
        kept: dict[str, Tensor] = self._optimizer.state.get(self.log_temperature, {})
        own = {f"temperature_optimizer.state.0.{name}": value for name, value in kept.items()}
        return {**super().state(), "log_temperature": self.log_temperature.detach(), **own}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        from recipes.training.tensor_files import below

        super().load_state(state)
        self.log_temperature.detach().copy_(state["log_temperature"])
        kept = below(state, "temperature_optimizer.state.0")
        settings = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": {0: kept} if kept else {}, "param_groups": settings})


def reduced(values: Tensor, how: Reduction) -> Tensor:
    """Return the values of an ensemble [E, n] as one for each transition, [n]."""
    return values.amin(dim=0) if how == "min" else values.mean(dim=0)


def soft_policy_loss(logprobs: Tensor, values: Tensor, temperature: Tensor | float, how: Reduction = "min") -> Loss:
    """Return the mean of temperature * log-probability - value, which SAC's policy minimizes.

    Args:
        logprobs: float [n], of actions drawn by the policy, with gradients.
        values: float [E, n], of these actions, with gradients through the actions.
        temperature: the weight of the entropy.
        how: see `reduced`.
    """
    from rlinf_core import Loss

    loss = (temperature * logprobs - reduced(values, how)).mean()
    return Loss(loss, {"actor/policy_loss": loss.detach(), "actor/entropy": -logprobs.detach().mean()})


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """Return the temperature loss, which raises the temperature while the entropy is below its target (SAC, eq. 18).

    As usual, the loss uses the log-temperature instead of the temperature, so that the step size does not depend on the
    temperature.

    Args:
        log_temperature: a scalar, with gradients.
        logprobs: float [n], of actions drawn by the policy.
        target_entropy: the target entropy in nats.
    """
    return -(log_temperature * (logprobs.detach() + target_entropy)).mean()
