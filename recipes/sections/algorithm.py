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
        description="How advantages are computed: gae, grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, or"
        " `package.module:name`.",
    )
    loss_type: LossType = Field(
        default="actor",
        description="actor_critic: policy and value loss; actor: policy loss alone; or `package.module:name`.",
    )
    loss_agg_func: LossAggregation = Field(
        default="token-mean",
        description="How losses of tokens become one: token-mean, seq-mean-token-sum, seq-mean-token-mean or"
        " seq-mean-token-sum-norm.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="Parameters of an advantage or loss of your own, by name; its pydantic model, if any, checks them.",
    )
    group_size: Count = Field(
        default=1, description="Samples that share a start (a prompt, an initial state) and are compared by GRPO."
    )
    update_epoch: Count = Field(default=1, description="Passes over the samples of a training step.")
    normalize_advantages: Bool = Field(
        default=True, description="Scale the advantages of a step to mean 0 and standard deviation 1."
    )
    clip_ratio_low: Fraction = Field(default=0.2, description="Smallest probability ratio is 1 minus this.")
    clip_ratio_high: NonNegativeFloat = Field(default=0.2, description="Largest probability ratio is 1 plus this.")
    clip_ratio_c: Annotated[Float, Field(gt=1)] | None = Field(
        default=3.0, description="Dual clip: bound of the ratio where the advantage is negative; null: none."
    )
    entropy_bonus: NonNegativeFloat = Field(default=0.0, description="Weight of the policy's entropy.")
    kl_beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the divergence from the reference model; 0: none is loaded."
    )
    kl_penalty: KlEstimator = Field(
        default="k3", description="Estimator of that divergence: k1 (or kl), k2 (or mse), k3 (or low_var_kl)."
    )
    filter_rewards: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal; they teach nothing under GRPO."
    )


class ActorCriticConfig(AlgorithmConfig):
    """Further settings with a value head and a sequence of rewards."""

    gamma: Fraction = Field(default=0.99, description="Discount of rewards, by step.")
    gae_lambda: Fraction = Field(default=0.95, description="Decay of temporal differences in GAE.")
    value_clip: PositiveFloat | None = Field(
        default=None, description="Largest change of a value in one training step, in units of return; null: none."
    )
    huber_delta: PositiveFloat | None = Field(
        default=None,
        description="Error of a value from which its loss grows linearly, in units of return; null: none, the loss is"
        " the squared error.",
    )
    bootstrap_type: Literal["standard", "always"] = Field(
        default="standard",
        description="Where the value of the last observation is added: standard, at episodes cut off; always, at every"
        " end.",
    )
    reward_type: Literal["action_level", "chunk_level"] = Field(
        default="action_level",
        description="Whether rewards count for each action or are summed over a chunk, which is then one step; always"
        " summed with `logprob_type: chunk_level`, and for models with one value for a chunk.",
    )
    logprob_type: Level = Field(
        default="action_level", description="What a probability ratio is taken of: a token, an action or a chunk."
    )
    entropy_type: Level = Field(
        default="action_level", description="What an entropy is taken of: a token, an action or a chunk."
    )
