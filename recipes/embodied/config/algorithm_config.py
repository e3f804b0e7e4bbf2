"""`algorithm` of the embodied recipe: the keys of every algorithm, and the keys of policy gradients.

The keys of off-policy algorithms are beside their losses, in `off_policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pydantic import Field

from recipes.sections.algorithm import LOSSES, OTHER_LOSSES, AdvantageType, AlgorithmConfig
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel, Count, Fraction
from rlinf_core.config.model import Options, Variant
from rlinf_core.config.sections.values import Level, NonNegativeFloat, NonNegativeInt, PositiveFloat
from rlinf_core.scalars import Bool, Text


class OffPolicyType(NamedTuple):
    """An off-policy algorithm: its class as `package.module:Class`, and a few words about it."""

    target: str
    summary: str


# Classes are named, since their modules import torch and this configuration.
ALGORITHMS: Final[Mapping[str, OffPolicyType]] = {
    "sac": OffPolicyType("recipes.embodied.off_policy.sac:Sac", "soft actor-critic"),
    "td3": OffPolicyType("recipes.embodied.off_policy.td3:Td3", "a deterministic policy and delayed updates"),
    "td3_bc": OffPolicyType(
        "recipes.embodied.off_policy.td3_bc:Td3Bc", "td3 on demonstrations, whose actions it also imitates"
    ),
    "iql": OffPolicyType(
        "recipes.embodied.off_policy.iql:Iql",
        "implicit Q-learning, demonstrations of which better actions weigh more",
    ),
    "dsrl": OffPolicyType(
        "recipes.embodied.off_policy.dsrl:Dsrl", "sac on the noise of a frozen diffusion or flow policy"
    ),
}
LossName = Annotated[Text, KnownOrOwn("loss_type", (*LOSSES, *ALGORITHMS), OTHER_LOSSES)]


class LearningConfig(Variant):
    """The keys of every algorithm."""

    chosen_by: ClassVar[str] = "loss_type"

    loss_type: LossName = Field(
        default="actor_critic",
        description="Loss. actor_critic: policy and value loss; actor: policy loss only; off policy, with critics of"
        " actions trained from a replay buffer, "
        + "; ".join(f"{name}: {algorithm.summary}" for name, algorithm in ALGORITHMS.items())
        + "; or `package.module:name`. It chooses the other keys.",
    )
    group_size: Count = Field(
        default=1,
        description="Samples per group: they share a start (a prompt or an initial state), and GRPO compares them.",
    )
    gamma: Fraction = Field(default=0.99, description="Discount factor of rewards, per step.")
    normalize_observations: Bool = Field(
        default=False,
        description="Normalize states by the mean and standard deviation of all rows so far, updated after each"
        " training step, with mlp_policy, cnn_policy and squashed_policy. They are saved and exported with the policy."
        " Off policy, rows of demonstrations count, too.",
    )


class PolicyGradientOptions(ConfigModel, extra="allow"):
    """Options of built-in advantages and losses. Those of a component of your own may have any name."""

    normalize_advantages: Bool = Field(
        default=True, description="Normalize the advantages of a step to mean 0 and standard deviation 1."
    )
    filter_rewards: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal; under GRPO they carry no learning signal."
    )


class ActorCriticOptions(PolicyGradientOptions):
    """Options of `actor_critic` and its advantages."""

    critic_warmup_steps: NonNegativeInt = Field(
        default=0,
        description="Initial training steps that train only the value head, for a pretrained policy with an untrained"
        " head.",
    )
    gae_lambda: Fraction = Field(default=0.95, description="Lambda of GAE.")
    value_clip: PositiveFloat | None = Field(
        default=None,
        description="Value clipping: largest change of a value in one training step, in units of return; null: none.",
    )
    value_weight: PositiveFloat = Field(
        default=1.0,
        description="Weight of the value loss, half the squared error, relative to the policy loss.",
    )


_OPTIONS: Final = (
    "The keys of this advantage and this loss alone (docs/embodied.md), and parameters of a custom one; its pydantic"
    " model, if any, validates them."
)


class PolicyGradientConfig(LearningConfig, AlgorithmConfig):
    """The keys of policy gradients."""

    built_in: ClassVar[type[PolicyGradientOptions]] = PolicyGradientOptions
    of_others: ClassVar[Mapping[str, str]] = dict.fromkeys(ActorCriticOptions.model_fields, "`loss_type: actor_critic`")

    loss_type: LossName = "actor_critic"
    options: Options[PolicyGradientOptions] = Field(default_factory=dict[str, Any], description=_OPTIONS)
    update_epoch: Count = 6
    normalize_rewards: Bool = Field(
        default=False,
        description="Divide rewards by the running standard deviation of discounted returns, and clip them to -10..10."
        " `env/` and `eval/` metrics are of rewards as they are.",
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="Divergence of the policy from the one that acted (`train/actor/approx_kl`) in the last batch of a"
        " pass over the samples, above which the training step takes no further pass; null: `update_epoch` passes.",
    )
    logprob_type: Level = Field(
        default="action_level",
        description="Unit of a probability ratio and of an entropy: a token, an action or a chunk, whose rewards then"
        " are summed.",
    )
    bc_weight: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of the behavior-cloning loss on demonstrations (`data.train_data_paths`) relative to the"
        " policy loss; every micro batch adds as many demonstration rows. 0: none.",
    )

    @property
    def settings(self) -> PolicyGradientOptions:
        return self.built_in.model_validate(self.options)


def policy_gradient_of(section: LearningConfig) -> PolicyGradientConfig:
    """Return the section `algorithm` of a job that learns on-policy.

    Raises:
        TypeError: the job learns off-policy.
    """
    if not isinstance(section, PolicyGradientConfig):
        raise TypeError(
            f"`loss_type: {section.loss_type}` learns off-policy: `OffPolicyActor` and `OffPolicyRolloutWorker` run it"
        )
    return section


class ActorCriticConfig(PolicyGradientConfig):
    """PPO with GAE, and losses of your own."""

    others: ClassVar[tuple[str, ...]] = ("package.module:name",)

    built_in: ClassVar[type[PolicyGradientOptions]] = ActorCriticOptions

    loss_type: LossName = "actor_critic"
    adv_type: AdvantageType = "gae"
    options: Options[ActorCriticOptions] = Field(default_factory=dict[str, Any], description=_OPTIONS)

    @classmethod
    def takes(cls, name: str) -> bool:
        """Return whether `name` is `actor_critic` or a custom loss."""
        return ":" in name or super().takes(name)


def warmup_steps(algorithm: PolicyGradientConfig) -> int:
    """Return how many training steps train only the value head."""
    settings = algorithm.settings
    return settings.critic_warmup_steps if isinstance(settings, ActorCriticOptions) else 0


class GroupConfig(PolicyGradientConfig):
    """GRPO, and others without values."""

    loss_type: LossName = "actor"
    adv_type: AdvantageType = "grpo"
