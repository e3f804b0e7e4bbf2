"""CrossQ, critics without target networks: Bhatt et al. 2019 (arXiv 1902.05605).

`critic_norm: batch` turns SAC into CrossQ, and also gives such critics to the other algorithms with a next action. The
batch renormalization of the policy is not implemented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.embodied.off_policy.algorithm import Bootstrapped, BootstrappedAlgorithm, TransitionTensors
from recipes.embodied.off_policy.dsrl import Dsrl, DsrlSettings
from recipes.embodied.off_policy.sac import Sac, SacSettings
from recipes.embodied.off_policy.td3 import Td3, Td3Settings
from recipes.embodied.off_policy.td3_bc import Td3Bc, Td3BcSettings

if TYPE_CHECKING:
    from rlinf_core import Loss


class JointCritics(BootstrappedAlgorithm[Bootstrapped]):
    """Critics that normalize current and next actions in one batch."""

    uses_target_critics = False

    def critic_loss(self, batch: TransitionTensors) -> Loss:
        import torch

        with torch.no_grad():
            actions, logprobs = self.next_actions(self.critics.encoded(batch.next_inputs))
        both = {name: torch.cat((tensor, batch.next_inputs[name])) for name, tensor in batch.inputs.items()}
        self.critics.train()
        values, following = self.critics(both, torch.cat((batch.actions, actions))).chunk(2, dim=1)
        self.critics.eval()
        return self.regression(batch, values, following.detach(), logprobs)


class CrossQ(JointCritics[SacSettings], Sac[SacSettings]):
    """CrossQ."""


class CrossQTd3(JointCritics[Td3Settings], Td3[Td3Settings]):
    """TD3 with the critics of CrossQ."""


class CrossQTd3Bc(JointCritics[Td3BcSettings], Td3Bc):
    """TD3+BC with the critics of CrossQ."""


class CrossQDsrl(JointCritics[DsrlSettings], Dsrl):
    """DSRL with the critics of CrossQ."""
