"""Configuration of the embodied recipe: sections, defaults, sizes of batches. `rules` holds what they require of each
other.

The defaults train a Franka arm to pick a block, in about a minute on two CPU cores. Recipe `sft` shares the sections of
the policy and of the environments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from recipes.embodied.config.algorithm_config import ActorCriticConfig, Algorithm, PolicyGradientConfig
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.config.embodied_no_effect import EMBODIED
from recipes.embodied.config.env_config import TRAINING, EnvironmentConfig, EnvSection, TrainEnvironments
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.model_config import POLICY_MODELS, PolicyModel
from recipes.sections.actor import (
    ActorConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    OptimConfig,
    RolloutConfig,
    ValueOptimConfig,
)
from recipes.sections.algorithm import ADVANTAGES, GROUP_ADVANTAGES
from recipes.sections.checks import Report, blame, divisors
from rlinf_core import Count, IgnoredKeys, JobConfig, RunnerConfig
from rlinf_core.config import tree
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


# Optimizer steps per pass over the samples if the file sets no batch size; the first that divides evenly is taken.
_STEPS_A_PASS = (4, 5, 3)


def samples_of_a_step(config: EmbodiedConfig) -> int:
    """Return the number of samples (action chunks) of a training step over all actors."""
    train = config.env.train
    chunks = -(-train.max_steps_per_rollout_epoch // config.actor.model.num_action_chunks)
    return train.total_num_envs * chunks * train.rollout_epoch


def evaluates(config: EmbodiedConfig) -> bool:
    """Return whether the run evaluates at all."""
    return config.runner.only_eval or config.runner.val_check_interval != -1


def divides_among(config: EmbodiedConfig, workers: int) -> bool:
    """Return whether the environments split evenly, in whole groups, over the pipeline stages of this many workers."""
    sections = [config.env.train, *([config.env.eval] if evaluates(config) else [])]
    shares = workers * config.rollout.pipeline_stage_num
    return all(section.total_num_envs % (shares * group_size(config, section)) == 0 for section in sections)


def samples_of_an_actor(samples: int, actors: int) -> int:
    """Return the number of samples per actor; if they do not divide evenly, the last ones are padding."""
    return -(-samples // actors)


def batch_sizes(config: EmbodiedConfig, actors: int) -> tuple[int, int]:
    """Return the samples of an optimizer step on one actor, and of a forward and backward pass.

    Without `actor.global_batch_size`, a pass over the samples takes about four optimizer steps.
    """
    total = config.actor.global_batch_size
    if total is not None:
        share = max(1, total // actors)
    else:
        mine = samples_of_an_actor(samples_of_a_step(config), actors)
        steps = next((count for count in _STEPS_A_PASS if mine % count == 0), _STEPS_A_PASS[0])
        share = -(-mine // steps)
    return share, min(config.actor.micro_batch_size or share, share)


def check_batches(config: EmbodiedConfig, actors: int, report: Report) -> None:
    """Report a batch size that does not divide evenly, and suggest one that does."""
    actor, train, chunk = config.actor, config.env.train, config.actor.model.num_action_chunks
    total, micro = actor.global_batch_size, actor.micro_batch_size
    if total is None or train.max_steps_per_rollout_epoch % chunk:
        return  # chosen to fit, or reported with the steps
    unit = (micro or 1) * actors
    samples = samples_of_a_step(config)
    ranks = f"{actors} rank{'s' if actors > 1 else ''}"
    batch: tree.Path = ("actor", "global_batch_size")
    if total % unit:
        by = f"(micro_batch_size {micro} x {ranks} = {unit})" if micro else ranks
        at = blame(config, ("actor", "micro_batch_size"), batch, ("actor",))
        message = f"`actor.global_batch_size` does not divide evenly: {total} / {by} = {total / unit:g}"
    elif samples % total:
        names = ("max_steps_per_rollout_epoch", "total_num_envs", "rollout_epoch")
        sources: list[tree.Path] = [
            *(("env", "train", name) for name in names),
            ("actor", "model", "num_action_chunks"),
        ]
        at = blame(config, batch, *sources, ("actor",))
        message = (
            f"a step has {_arithmetic(config)} = {samples} samples, not a multiple of `actor.global_batch_size` {total}"
        )
    else:
        return
    report(at, "batch-not-divisible", message, _remedy(samples, total, actors, micro))


def _arithmetic(config: EmbodiedConfig) -> str:
    train, chunk = config.env.train, config.actor.model.num_action_chunks
    text = f"total_num_envs {train.total_num_envs} x max_steps_per_rollout_epoch {train.max_steps_per_rollout_epoch}"
    text += f" / num_action_chunks {chunk}" if chunk > 1 else ""
    return text + (f" x rollout_epoch {train.rollout_epoch}" if train.rollout_epoch > 1 else "")


def _remedy(samples: int, wanted: int, actors: int, micro: int | None) -> str:
    """Return batch sizes near the wanted one that divide the samples into whole micro batches on every actor."""
    removed = "remove it: a batch is then about a quarter of a step's samples"
    for size in dict.fromkeys((micro, None)):
        unit = (size or 1) * actors
        if samples % unit:
            continue
        fitting = [unit * divisor for divisor in divisors(samples // unit)]
        near = [
            *[near_size for near_size in fitting if near_size < wanted][-1:],
            *[near_size for near_size in fitting if near_size >= wanted][:1],
        ]
        also = ", without `actor.micro_batch_size`" if size != micro else ""
        return f"nearest valid `actor.global_batch_size`: {' or '.join(map(str, near))}{also}; or {removed}"
    return f"{actors} actors cannot split {samples} samples evenly with a fixed batch size: {removed}"
