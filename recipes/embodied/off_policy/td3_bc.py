"""TD3+BC, TD3 on demonstrations that stays close to their actions: Fujimoto and Gu 2021 (arXiv 2106.06860)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recipes.embodied.config.algorithm_config import OF_ALGORITHM, BootstrappedOptions, LossName
from recipes.embodied.off_policy.algorithm import TransitionTensors
from recipes.embodied.off_policy.td3 import Td3, Td3Settings
from rlinf_core.config.sections.values import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf_core import Loss


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
