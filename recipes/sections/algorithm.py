"""`algorithm`: advantages, losses and how often samples are learned from."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import Count, Fraction, Level, LossAggregation, NonNegativeFloat, PositiveFloat
from rlinf_core.scalars import Bool, Data, Float, Text

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
_ESTIMATORS: Final = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}

AdvantageType = Annotated[Text, KnownOrOwn("adv_type", ADVANTAGES, OTHER_ADVANTAGES)]
LossType = Annotated[Text, KnownOrOwn("loss_type", LOSSES, OTHER_LOSSES)]


def _estimator(value: Any) -> Any:
    return _ESTIMATORS.get(value, value) if isinstance(value, str) else value


KlEstimator = Annotated[
    Literal["k1", "k2", "k3"],
    BeforeValidator(_estimator),
    WithJsonSchema({"enum": ["k1", "k2", "k3", *_ESTIMATORS]}),
]


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
    clip_ratio_c: Annotated[Float, Field(gt=1)] | None = Field(
        default=3.0, description="Dual clip: bound of the ratio for negative advantages; null: none."
    )
    entropy_bonus: NonNegativeFloat = Field(default=0.0, description="Weight of the policy's entropy bonus.")
    kl_beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL divergence from the reference model; 0: no reference is loaded."
    )
    kl_penalty: KlEstimator = Field(
        default="k3", description="Estimator of the KL divergence: k1 (or kl), k2 (or mse), k3 (or low_var_kl)."
    )
    filter_rewards: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal; under GRPO they carry no learning signal."
    )


class ActorCriticConfig(AlgorithmConfig):
    """Further settings with a value head and a sequence of rewards."""

    gamma: Fraction = Field(default=0.99, description="Discount factor of rewards, per step.")
    gae_lambda: Fraction = Field(default=0.95, description="Lambda of GAE.")
    value_clip: PositiveFloat | None = Field(
        default=None,
        description="Value clipping: largest change of a value in one training step, in units of return; null: none.",
    )
    huber_delta: PositiveFloat | None = Field(
        default=None,
        description="Value error beyond which the loss is linear (Huber), in units of return; null: always squared.",
    )
    bootstrap_type: Literal["standard", "always"] = Field(
        default="standard",
        description="Where the value of the last observation is bootstrapped: standard, at truncated episodes; always,"
        " at every end.",
    )
    reward_type: Literal["action_level", "chunk_level"] = Field(
        default="action_level",
        description="Rewards per action, or summed over a chunk, which then counts as one step. They are always summed"
        " with `logprob_type: chunk_level`, and for models with one value per chunk.",
    )
    logprob_type: Level = Field(
        default="action_level", description="Unit of a probability ratio: a token, an action or a chunk."
    )
    entropy_type: Level = Field(
        default="action_level", description="Unit of an entropy: a token, an action or a chunk."
    )
