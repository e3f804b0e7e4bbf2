"""Configuration of the embodied recipe: sections and defaults. `rules` holds the constraints between them.

The defaults train a Franka arm to pick a block, in about a minute on two CPU cores.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from recipes.embodied.config.algorithm_config import ActorCriticConfig, PolicyGradientConfig
from recipes.embodied.config.embodied_no_effect import EMBODIED
from recipes.embodied.config.env_config import TRAINING, EnvironmentConfig, EnvSection, TrainEnvironments
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.off_policy_config import Algorithm
from recipes.embodied.config.policy_config import PolicyActorConfig, PolicyJob, PolicyOptimConfig, PolicyRunnerConfig
from recipes.sections.actor import ValueOptimConfig
from recipes.sections.algorithm import ADVANTAGES, GROUP_ADVANTAGES
from rlinf_core import IgnoredKeys
from rlinf_core.config.sections.runner import RolloutRunnerConfig
from rlinf_core.config.sections.values import StepsOrNever
from rlinf_core.config.variants import OneOf

COMPONENTS = ("actor", "rollout", "env")


class EmbodiedRunnerConfig(RolloutRunnerConfig, PolicyRunnerConfig):
    """The run as a whole."""

    max_steps: StepsOrNever = 150


class EmbodiedOptimConfig(PolicyOptimConfig, ValueOptimConfig):
    """AdamW and the clipping of gradients."""


class EmbodiedActorConfig(PolicyActorConfig):
    """The workers that train."""

    optim: EmbodiedOptimConfig = Field(
        default_factory=EmbodiedOptimConfig, description="Optimizer: lr, betas, clipping."
    )


class EmbodiedEnvSection(EnvSection):
    """The workers that step environments."""

    train: TrainEnvironments = Field(default_factory=TRAINING[0], description="Training environments.")


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
    algorithm: Annotated[Algorithm, OneOf("loss_type")] = Field(
        default_factory=ActorCriticConfig,
        description="The loss, with the advantages or the replay buffer that it learns from. `loss_type` chooses the"
        " other keys.",
    )


def group_size(config: PolicyJob, environments: EnvironmentConfig) -> int:
    """Return how many environments share each start; evaluations compare none."""
    if isinstance(config, EmbodiedConfig) and environments is config.env.train:
        return config.algorithm.group_size
    return 1


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
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig) or algorithm.adv_type == "gae":
        return True
    return algorithm.adv_type not in ADVANTAGES and config.actor.model.add_value_head


def comparing_setting(config: EmbodiedConfig) -> str | None:
    """Return the setting that compares the members of a group, as written in a file; None if there is none."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return None
    if algorithm.adv_type in GROUP_ADVANTAGES:
        return f"adv_type: {algorithm.adv_type}"
    return "filter_rewards: true" if algorithm.filter_rewards else None
