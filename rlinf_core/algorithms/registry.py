"""Advantages and losses by the names that a configuration gives them.

    @register_advantage("leave_one_out")
    def leave_one_out(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages: ...

and `algorithm.adv_type: package.module:leave_one_out`. `get_advantage` and its siblings take either kind of name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from rlinf_core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf_core.algorithms.advantages import Advantages, AdvantageSettings, Trajectories
    from rlinf_core.algorithms.loss_inputs import Loss, LossInputs, LossSettings

    AdvantageFunction: TypeAlias = Callable[[Trajectories, AdvantageSettings], Advantages]
    PolicyLossFunction: TypeAlias = Callable[[LossInputs, LossSettings], Loss | Tensor]


_ADVANTAGES: Registry[AdvantageFunction] = Registry(
    "advantage",
    {
        name: f"rlinf_core.algorithms.advantages:{name}"
        for name in (
            *("gae", "turn_gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
            "distillation",
        )
    },
)
_POLICY_LOSSES: Registry[PolicyLossFunction] = Registry(
    "policy loss",
    {
        name: f"rlinf_core.algorithms.losses:{name}"
        for name in ("actor_critic", "actor", "decoupled_actor", "gspo", "gmpo", "cispo", "sapo")
    },
)
register_advantage = _ADVANTAGES.register
get_advantage = _ADVANTAGES.get
register_policy_loss = _POLICY_LOSSES.register
get_policy_loss = _POLICY_LOSSES.get
