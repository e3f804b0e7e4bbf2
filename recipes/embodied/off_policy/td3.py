"""TD3, twin delayed deep deterministic policy gradient: Fujimoto et al. 2018 (arXiv 1802.09477)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from recipes.embodied.config.algorithm_config import BootstrappedSettings, LossName
from recipes.embodied.off_policy.algorithm import BootstrappedAlgorithm, TransitionTensors

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
