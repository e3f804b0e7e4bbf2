"""IQL, implicit Q-learning: Kostrikov et al. 2021 (arXiv 2110.06169)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from recipes.embodied.config.algorithm_config import OF_ALGORITHM, LossName, OffPolicySettings
from recipes.embodied.off_policy.algorithm import OffPolicyAlgorithm, TransitionTensors
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import PositiveFloat
from rlinf_core.scalars import Float

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.embodied.models.base_policy import Inputs
    from rlinf_core import Loss

# The largest weight of a recorded action, as in the authors' code.
_LARGEST_WEIGHT: Final = 100.0


class IqlOptions(ConfigModel):
    """Options of IQL."""

    expectile: Annotated[Float, Field(gt=0, lt=1)] = Field(
        default=0.7,
        description="Expectile of recorded actions' values that a state's value is (tau).",
    )
    advantage_scale: PositiveFloat = Field(
        default=3.0,
        description="Inverse temperature (beta): recorded actions weigh exp(beta * advantage).",
    )


class IqlSettings(OffPolicySettings):
    """The keys of IQL."""

    loss_type: LossName = "iql"
    critic_norm: Literal["none", "layer"] = Field(
        default="none", description="none; layer: layer normalization. `batch` has no target networks, which it needs."
    )
    options: IqlOptions = Field(default_factory=IqlOptions, description=OF_ALGORITHM)


class Iql(OffPolicyAlgorithm[IqlSettings]):
    """IQL: only recorded actions are evaluated, and critics also have values of states."""

    settings_model = IqlSettings
    records_alone = True
    judges_states = True

    def critic_loss(self, batch: TransitionTensors) -> Loss:
        """See `OffPolicyAlgorithm`: of states, toward recorded actions, and of these, toward the next states."""
        import torch

        from recipes.embodied.models.critics import bootstrapped_targets, ensemble_loss
        from rlinf_core import Loss

        with torch.no_grad():
            following = self.critics.of_states(batch.next_inputs)
            targets = bootstrapped_targets(batch.rewards, batch.discounts, following[None])
            recorded = self._recorded_values(self.critics.encoded(batch.inputs), batch.actions)
        inputs = self.critics.encoded(batch.inputs)
        values = self.critics(inputs, batch.actions)
        critics = ensemble_loss(values, targets)
        states = expectile_loss(self.critics.of_states(inputs), recorded, self.settings.options.expectile)
        return Loss(critics.loss + states.loss, {**critics.metrics, **states.metrics})

    def policy_loss(self, batch: TransitionTensors) -> Loss:
        import torch

        chosen = self.policy(batch.inputs, batch.actions[:, None]).logprobs.sum(dim=(1, 2))
        with torch.no_grad():
            advantages = self._recorded_values(batch.inputs, batch.actions) - self.critics.of_states(batch.inputs)
        return advantage_weighted_loss(chosen, advantages, self.settings.options.advantage_scale)

    def _recorded_values(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Return the least value of recorded actions over the target critics, [n]."""
        critics = self.critics if self.target_critics is None else self.target_critics
        return critics(inputs, actions).amin(dim=0)


def expectile_loss(values: Tensor, targets: Tensor, expectile: float) -> Loss:
    """Return the mean of |expectile - (error < 0)| * error^2, with error = target - value (eq. 5).

    Above 0.5, a value approaches the larger of its targets, those of good actions.

    Args:
        values: float [n], of observations, with gradients.
        targets: float [n], of the recorded actions, without gradients.
        expectile: tau, from 0 to 1.
    """
    import torch

    from rlinf_core import Loss

    errors = targets - values
    loss = (torch.where(errors < 0, 1 - expectile, expectile) * errors.square()).mean()
    return Loss(loss, {"critic/expectile_loss": loss.detach(), "critic/state_value": values.detach().mean()})


def advantage_weighted_loss(logprobs: Tensor, advantages: Tensor, scale: float) -> Loss:
    """Return minus the mean log-probability of recorded actions, each weighted by min(exp(scale * advantage), 100) (eq.
    7; the bound is from the authors' code).

    Args:
        logprobs: float [n], of recorded actions, with gradients.
        advantages: float [n], without gradients.
        scale: beta.
    """
    from rlinf_core import Loss

    weights = (scale * advantages).exp().clamp(max=_LARGEST_WEIGHT)
    loss = -(weights * logprobs).mean()
    return Loss(loss, {"actor/policy_loss": loss.detach(), "actor/advantage_weight": weights.mean()})
