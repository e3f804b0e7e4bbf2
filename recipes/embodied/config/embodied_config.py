"""Configuration of the embodied recipe: sections and defaults. `rules` holds the constraints between them.

The defaults train a Franka arm to pick a block, in about a minute on two CPU cores.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from recipes.embodied.config.embodied_no_effect import EMBODIED
from recipes.embodied.config.env_config import EnvironmentConfig, EnvSection, TrainEnvironmentConfig
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.off_policy_config import METHODS, OffPolicyConfig
from recipes.embodied.config.policy_config import PolicyActorConfig, PolicyJob, PolicyOptimConfig, PolicyRunnerConfig
from recipes.sections.actor import ValueOptimConfig
from recipes.sections.algorithm import (
    ADVANTAGES,
    GROUP_ADVANTAGES,
    LOSSES,
    OTHER_LOSSES,
    AdvantageType,
    AlgorithmConfig,
)
from recipes.sections.values import KnownOrOwn
from rlinf_core import Count, Fraction, IgnoredKeys
from rlinf_core.config.sections.runner import RolloutRunnerConfig
from rlinf_core.config.sections.values import Level, NonNegativeFloat, NonNegativeInt, PositiveFloat, StepsOrNever
from rlinf_core.scalars import Bool, Text

COMPONENTS = ("actor", "rollout", "env")


class EmbodiedRunnerConfig(RolloutRunnerConfig, PolicyRunnerConfig):
    """The run as a whole."""

    max_steps: StepsOrNever = 150
    weight_sync_interval: Count = Field(
        default=1, description="Training steps between two updates of the rollout's weights."
    )


class EmbodiedOptimConfig(PolicyOptimConfig, ValueOptimConfig):
    """AdamW and the clipping of gradients."""


class EmbodiedActorConfig(PolicyActorConfig):
    """The workers that train."""

    optim: EmbodiedOptimConfig = Field(
        default_factory=EmbodiedOptimConfig, description="Optimizer: lr, betas, clipping."
    )


class EmbodiedEnvSection(EnvSection):
    """The workers that step environments."""

    train: TrainEnvironmentConfig = Field(default_factory=TrainEnvironmentConfig, description="Training environments.")


class EmbodiedAlgorithmConfig(AlgorithmConfig):
    """PPO with GAE by default; `adv_type: grpo` and `loss_type: actor` for GRPO; `loss_type: sac` off policy."""

    critic_warmup_steps: NonNegativeInt = Field(
        default=0,
        description="Initial training steps that train only the value head, for a pretrained policy with an untrained"
        " head.",
    )
    adv_type: AdvantageType = "gae"
    loss_type: Annotated[Text, KnownOrOwn("loss_type", (*LOSSES, *METHODS), OTHER_LOSSES)] = Field(
        default="actor_critic",
        description="Loss. actor_critic: policy and value loss; actor: policy loss only; off policy, with critics of"
        " actions trained from a replay buffer, "
        + "; ".join(f"{name}: {algorithm.summary}" for name, algorithm in METHODS.items())
        + "; or `package.module:name`.",
    )
    update_epoch: Count = 6
    filter_rewards: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal; under GRPO they carry no learning signal."
    )
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
    normalize_observations: Bool = Field(
        default=False,
        description="Normalize states by the mean and standard deviation of all rows so far, updated after each"
        " training step, with mlp_policy, cnn_policy and squashed_policy. They are saved and exported with the policy."
        " Off policy, rows of demonstrations count, too.",
    )
    normalize_rewards: Bool = Field(
        default=False,
        description="Divide rewards by the running standard deviation of discounted returns, and clip them to -10..10."
        " `env/` and `eval/` metrics are of rewards as they are.",
    )
    value_weight: PositiveFloat = Field(
        default=1.0,
        description="Weight of the value loss, half the squared error, relative to the policy loss.",
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="Divergence of the policy from the one that acted (`train/actor/approx_kl`) in the last batch of a"
        " pass over the samples, above which the training step takes no further pass; null: `update_epoch` passes.",
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
    bc_weight: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of the behavior-cloning loss on demonstrations (`data.train_data_paths`) relative to the"
        " policy loss; every micro batch adds as many demonstration rows. 0: none.",
    )
    off_policy: OffPolicyConfig = Field(
        default_factory=OffPolicyConfig,
        description="Settings of off-policy losses: replay buffer, critics, update ratios.",
    )


class EmbodiedConfig(PolicyJob):
    """Configuration of the embodied recipe."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = EMBODIED

    runner: EmbodiedRunnerConfig = Field(
        default_factory=EmbodiedRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: EmbodiedActorConfig = Field(
        default_factory=EmbodiedActorConfig, description="The model that learns, its optimizer and its sharding."
    )
    env: EmbodiedEnvSection = Field(
        default_factory=EmbodiedEnvSection, description="The environments of training and evaluation."
    )
    algorithm: EmbodiedAlgorithmConfig = Field(
        default_factory=EmbodiedAlgorithmConfig,
        description="Advantages, losses, and how often samples are reused.",
    )


def group_size(config: PolicyJob, environments: EnvironmentConfig) -> int:
    """Return how many environments share each start."""
    common = config.algorithm.group_size if isinstance(config, EmbodiedConfig) else 1
    return environments.group_size or common


def resets_each_pass(config: EmbodiedConfig) -> bool:
    """Return whether every training pass resets all environments.

    Without values nothing stands in for the rewards that come after a pass; members of a group are only comparable
    over whole episodes; robots cannot return to where they were.
    """
    train = config.env.train
    if train.reset_each_pass is not None:
        return train.reset_each_pass
    return (
        is_robot(train.env_type)
        or not train.auto_reset
        or not uses_values(config)
        or comparing_setting(config) is not None
    )


def uses_values(config: EmbodiedConfig) -> bool:
    """Return whether advantages use values; of a user's own it is assumed where the model has some."""
    adv_type = config.algorithm.adv_type
    return adv_type == "gae" if adv_type in ADVANTAGES else config.actor.model.add_value_head


def comparing_setting(config: EmbodiedConfig) -> str | None:
    """Return the setting that compares the members of a group, as written in a file; None if there is none."""
    algorithm = config.algorithm
    if algorithm.adv_type in GROUP_ADVANTAGES:
        return f"adv_type: {algorithm.adv_type}"
    return "filter_rewards: true" if algorithm.filter_rewards else None
