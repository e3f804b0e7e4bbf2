"""Configuration of the embodied recipe: sections and defaults. `rules` holds the constraints between them.

The defaults train a Franka arm to pick a block, in about a minute on two CPU cores. Recipe `sft` shares the sections of
the policy and of the environments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from recipes.embodied.config.algorithm_config import ActorCriticConfig, PolicyGradientConfig
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.config.embodied_no_effect import EMBODIED
from recipes.embodied.config.env_config import TRAINING, EnvironmentConfig, EnvSection, TrainEnvironments
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.model_config import POLICY_MODELS, PolicyModel
from recipes.embodied.config.off_policy_settings import Algorithm
from recipes.sections.actor import (
    ActorConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    OptimConfig,
    RolloutConfig,
    ValueOptimConfig,
)
from recipes.sections.algorithm import ADVANTAGES, GROUP_ADVANTAGES
from rlinf_core import Count, IgnoredKeys, JobConfig, RunnerConfig
from rlinf_core.config.model import OneOf
from rlinf_core.config.sections.runner import RolloutRunnerConfig
from rlinf_core.config.sections.values import NonNegativeFloat, OptionalPath, PositiveFloat, Precision, StepsOrNever


class PolicyOptimConfig(OptimConfig):
    """AdamW and the clipping of gradients."""

    lr: PositiveFloat = 1e-3
    adam_eps: PositiveFloat = 1e-5
    clip_grad: NonNegativeFloat = 0.5


class PolicyPrecisionConfig(MixedPrecisionConfig):
    """Types used while computing, where they differ from the weights' own. Buffers are never cast."""

    param_dtype: Precision | None = Field(
        default=None,
        description="Type of gathered weights and of activations: fp32 or bf16; fp16 only with `runner.only_eval`."
        " Default: `model.precision`.",
    )

    @property
    def computing(self) -> Precision | None:
        return self.param_dtype


class PolicyFsdpConfig(FsdpConfig):
    """The sharding of weights, gradients and optimizer state over the actor's ranks (FSDP2)."""

    mixed_precision: PolicyPrecisionConfig = Field(
        default_factory=PolicyPrecisionConfig, description="Mixed precision: param_dtype, reduce_dtype."
    )


class PolicyRunnerConfig(RunnerConfig):
    """The run as a whole."""

    on_env_error: Literal["stop", "count"] = Field(
        default="stop",
        description="An environment whose own code raises, and raises again from the same seed and actions. The episode"
        " counts as failed in any case; stop also ends the run where that happens in its first pass, or in three"
        " different episodes; count continues.",
    )


class PolicyActorConfig(ActorConfig):
    """The workers that train."""

    global_batch_size: Count | None = Field(
        default=None,
        description="Samples per optimizer step, over all ranks. Default: about a quarter of a step's samples.",
    )
    micro_batch_size: Count | None = Field(
        default=None,
        description="Samples per forward and backward pass on one rank. Default: a rank's whole share,"
        " global_batch_size / world size.",
    )
    checkpoint_load_path: OptionalPath = Field(
        default=None, description="Checkpoint whose weights training starts from; the step count starts at 0."
    )
    fsdp_config: PolicyFsdpConfig = Field(
        default_factory=PolicyFsdpConfig, description="How the model is spread over ranks."
    )
    model: PolicyModel = Field(
        default_factory=POLICY_MODELS[0], description="The policy: model_type, hidden_dim, precision."
    )
    optim: PolicyOptimConfig = Field(default_factory=PolicyOptimConfig, description="Optimizer: lr, betas, clipping.")


class PolicyRolloutConfig(RolloutConfig):
    """The workers that run the policy."""

    pipeline_stage_num: Count = Field(
        default=1,
        description="Groups of environments per env worker: while one waits for its actions, another steps.",
    )


class PolicyJob(JobConfig):
    """A whole file. A recipe adds how it learns."""

    runner: PolicyRunnerConfig = Field(
        default_factory=PolicyRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: PolicyActorConfig = Field(
        default_factory=PolicyActorConfig, description="The model that learns, its optimizer and its sharding."
    )
    rollout: PolicyRolloutConfig = Field(
        default_factory=PolicyRolloutConfig, description="The workers that run the policy in the environments."
    )
    env: EnvSection = Field(default_factory=EnvSection, description="The environments of training and evaluation.")
    data: DemonstrationsConfig = Field(
        default_factory=DemonstrationsConfig, description="Demonstrations: train_data_paths."
    )


def facts(config: PolicyJob) -> dict[str, str | int | float | bool | None]:
    """Return the settings that must match to resume from a checkpoint: all that determine weight shapes."""
    model = config.actor.model.model_dump()
    shaping = ("model_type", "num_action_chunks", "hidden_dim", "add_value_head", "precision")
    named = {f"actor.model.{name}": model[name] for name in shaping if name in model}
    # The options of a custom model may determine its shapes.
    options = {key: value for key, value in config.actor.model.options.items() if key != "ensemble"}
    named |= {
        f"actor.model.options.{key}": value for key, value in options.items() if isinstance(value, str | int | float)
    }
    train = config.env.train
    return {**named, "env.train.env_type": train.env_type, "env.train.task": train.task}


def inputs(config: PolicyJob) -> list[Path]:
    """Return the files and folders that a run reads."""
    return [Path(name) for name in (config.actor.model.model_path, config.actor.checkpoint_load_path) if name]


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
    """Return how many environments share each start; always 1 in evaluations."""
    if isinstance(config, EmbodiedConfig) and environments is config.env.train:
        return config.algorithm.group_size
    return 1


def resets_each_pass(config: EmbodiedConfig) -> bool:
    """Return whether every training pass resets all environments.

    Without values nothing estimates the rewards after a pass; members of a group are comparable only over whole
    episodes; robots cannot return to an earlier state.
    """
    train = config.env.train
    return (
        is_robot(train.env_type)
        or not train.auto_reset
        or not uses_values(config)
        or comparing_setting(config) is not None
    )


def uses_values(config: EmbodiedConfig) -> bool:
    """Return whether advantages use values; a custom advantage is assumed to if the model has a value head."""
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
    return "filter_rewards: true" if algorithm.settings.filter_rewards else None
