"""`algorithm`: advantages, losses and how often samples are trained on."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel, Count, Fraction
from rlinf_core.config.sections.values import LossAggregation, NonNegativeFloat
from rlinf_core.scalars import Bool, Data, Text

# Advantages that compare total rewards within a group and nothing else; all that compare the members of a group; and
# all that every recipe has.
WITHIN_GROUP_ADVANTAGES: Final = ("grpo", "dr_grpo", "rloo")
GROUP_ADVANTAGES: Final = (*WITHIN_GROUP_ADVANTAGES, "reinforce_pp_baseline")
ADVANTAGES: Final = ("gae", *WITHIN_GROUP_ADVANTAGES, "reinforce_pp", "reinforce_pp_baseline")
LOSSES: Final = ("actor_critic", "actor")


# Names that other projects give ours.
OTHER_ADVANTAGES: Final = {
    "reinpp": "reinforce_pp",
    "reinpp_baseline": "reinforce_pp_baseline",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
OTHER_LOSSES: Final = {"vanilla": "actor"}

AdvantageType = Annotated[Text, KnownOrOwn("adv_type", ADVANTAGES, OTHER_ADVANTAGES)]
LossType = Annotated[Text, KnownOrOwn("loss_type", LOSSES, OTHER_LOSSES)]


class AlgorithmConfig(ConfigModel):
    """Settings of every policy gradient."""

    adv_type: AdvantageType = Field(
        default="grpo",
        description="Advantage estimator: gae, grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, or"
        " `package.module:name`.",
    )
    loss_type: LossType = Field(
        default="actor",
        description="Loss. actor_critic: policy and value loss; actor: policy loss only; or `package.module:name`.",
    )
    loss_agg_func: LossAggregation = Field(
        default="token-mean",
        description="How token losses are aggregated: token-mean, seq-mean-token-sum, seq-mean-token-mean or"
        " seq-mean-token-sum-norm.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="Parameters of a custom advantage or loss, by name; its pydantic model, if any, validates them.",
    )
    group_size: Count = Field(
        default=1,
        description="Samples per group: they share a start (a prompt or an initial state), and GRPO compares them.",
    )
    update_epoch: Count = Field(default=1, description="Passes over the samples of a training step.")
    normalize_advantages: Bool = Field(
        default=True, description="Normalize the advantages of a step to mean 0 and standard deviation 1."
    )
    clip_ratio_low: Fraction = Field(default=0.2, description="Lower clip of the probability ratio: 1 minus this.")
    clip_ratio_high: NonNegativeFloat = Field(
        default=0.2, description="Upper clip of the probability ratio: 1 plus this."
    )
    entropy_bonus: NonNegativeFloat = Field(default=0.0, description="Weight of the policy's entropy bonus.")
