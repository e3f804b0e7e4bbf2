"""TD3, twin delayed deep deterministic policy gradient: Fujimoto et al. 2018 (arXiv 1802.09477).

TD3+BC is TD3 on demonstrations that stays close to their actions: Fujimoto and Gu 2021 (arXiv 2106.06860).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from pydantic import Field

from recipes.embodied.config.algorithm_config import OF_ALGORITHM, BootstrappedOptions, BootstrappedSettings, LossName
from recipes.embodied.off_policy.algorithm import BootstrappedAlgorithm, TransitionTensors
from rlinf_core.config.sections.values import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.embodied.models.base_policy import Inputs
    from rlinf_core import Loss


# The std and the bound of the noise on next actions in targets, as in the paper.
_TARGET_NOISE: Final = 0.2
_NOISE_BOUND: Final = 0.5


class Td3Settings(BootstrappedSettings):
    """The keys of TD3."""

    loss_type: LossName = "td3"


Deterministic = TypeVar("Deterministic", bound=Td3Settings)


class Td3(BootstrappedAlgorithm[Deterministic]):
    """TD3, with a deterministic policy that explores with noise of a fixed size."""

    settings_model = Td3Settings
    has_fixed_noise = True
    uses_target_policy = True

    def next_actions(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """See `BootstrappedAlgorithm`: the target policy's actions, with noise."""
        import torch

        policy = self.policy if self.target_policy is None else self.target_policy
        actions, _ = policy.sample(inputs)
        noise = (torch.randn_like(actions) * _TARGET_NOISE).clamp(-_NOISE_BOUND, _NOISE_BOUND)
        return (actions + noise).clamp(-1, 1), None

    def policy_loss(self, batch: TransitionTensors) -> Loss:
        actions, _ = self.policy.sample(batch.inputs)
        return deterministic_policy_loss(self.critics(batch.inputs, actions))


def deterministic_policy_loss(values: Tensor) -> Loss:
    """Return minus the mean value of the first critic, which TD3's policy minimizes; `values` [E, n]."""
    from rlinf_core import Loss

    loss = -values[0].mean()
    return Loss(loss, {"actor/policy_loss": loss.detach()})


class Td3BcOptions(BootstrappedOptions):
    """Options of TD3+BC."""

    cloning_scale: PositiveFloat = Field(
        default=2.5,
        description="Weight of values against the distance from recorded actions (alpha).",
    )


class Td3BcSettings(Td3Settings):
    """The keys of TD3+BC."""

    loss_type: LossName = "td3_bc"
    options: Td3BcOptions = Field(default_factory=Td3BcOptions, description=OF_ALGORITHM)


class Td3Bc(Td3[Td3BcSettings]):
    """TD3+BC."""

    settings_model = Td3BcSettings
    records_alone = True

    def policy_loss(self, batch: TransitionTensors) -> Loss:
        actions, _ = self.policy.sample(batch.inputs)
        values = self.critics(batch.inputs, actions)
        return cloning_policy_loss(values, actions, batch.actions, self.settings.options.cloning_scale)


def cloning_policy_loss(values: Tensor, actions: Tensor, recorded: Tensor, scale: float) -> Loss:
    """Return the mean squared distance from recorded actions, minus the value of the policy's own actions, which
    TD3+BC's policy minimizes (eq. 5).

    Args:
        values: float [E, n], of the policy's actions, with gradients through the actions; only the first critic counts.
        actions: float [n, A], of the policy, with gradients.
        recorded: float [n, A], of the data.
        scale: alpha; values are multiplied by alpha over their mean magnitude.
    """
    import torch

    from rlinf_core import Loss

    first = values[0]
    weight = scale / first.detach().abs().mean().clamp(min=torch.finfo(first.dtype).eps)
    away = (actions - recorded).square().mean()
    loss = away - weight * first.mean()
    return Loss(loss, {"actor/policy_loss": loss.detach(), "actor/bc_loss": away.detach()})
