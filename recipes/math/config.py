"""The file of the math recipe: its sections, its defaults, and the rules between its values.

The defaults build a Qwen2 of 0.4 M parameters, show it sums for a second, and improve it by GRPO in about
half a minute on two CPU cores.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlinf_core.config.fragments.actor import ActorConfig, ModelConfig, OptimConfig
from rlinf_core.config.fragments.algorithm import AlgorithmConfig
from rlinf_core.config.fragments.checks import (
    Report,
    WorldSizes,
    blame,
    check_batches,
    check_components,
    check_folders,
    check_fsdp,
    check_group_names,
    check_loggers,
    check_samples,
)
from rlinf_core.config.fragments.data import DataConfig
from rlinf_core.config.fragments.job import JobConfig
from rlinf_core.config.fragments.reward import RewardConfig
from rlinf_core.config.fragments.rollout import RolloutConfig, SamplingParams
from rlinf_core.config.fragments.runner import RunnerConfig
from rlinf_core.config.fragments.values import Count, NonNegativeFloat, NonNegativeInt, PositiveFloat, StepsOrNever
from rlinf_core.config.tree import Path

COMPONENTS = ("actor", "rollout", "reward")


class MathRunnerConfig(RunnerConfig):
    """The run as a whole."""

    task_type: Literal["math", "reasoning"] = Field(
        default="math", description="Kind of job; `reasoning` is another word for it."
    )
    max_steps: StepsOrNever = 250
    seq_length: Count = Field(
        default=32, description="Longest sequence that is trained on, prompt and answer together, in tokens."
    )


class MathModelConfig(ModelConfig):
    """The language model."""

    model_type: Literal["huggingface"] = Field(
        default="huggingface", description="What `model_path` holds: a causal language model of transformers."
    )
    hidden_dim: Count = Field(default=128, description="Width of the model built when there is no `model_path`.")
    warmup_steps: NonNegativeInt = Field(
        default=50, description="Supervised steps for the model built when there is no `model_path`."
    )


class MathOptimConfig(OptimConfig):
    """AdamW and the clipping of gradients."""

    lr: PositiveFloat = 2e-4


class MathActorConfig(ActorConfig):
    """The workers that train."""

    global_batch_size: Count = 256
    model: MathModelConfig = Field(
        default_factory=MathModelConfig, description="The language model: model_path, precision, LoRA."
    )
    optim: MathOptimConfig = Field(default_factory=MathOptimConfig, description="Optimizer: lr, betas, clipping.")


class MathSamplingParams(SamplingParams):
    """How tokens are drawn."""

    max_new_tokens: Count = 8


class MathRolloutConfig(RolloutConfig):
    """The workers that answer prompts."""

    backend: Literal["huggingface", "vllm", "sglang"] = Field(
        default="huggingface", description="Engine that generates: huggingface, vllm or sglang."
    )
    sampling_params: MathSamplingParams = Field(
        default_factory=MathSamplingParams,
        description="How tokens are drawn: temperature, top_k, top_p, max_new_tokens.",
    )


class MathAlgorithmConfig(AlgorithmConfig):
    """GRPO with a higher upper clip."""

    group_size: Count = 8
    clip_ratio_high: NonNegativeFloat = 0.28


class MathDataConfig(DataConfig):
    """Problems with verifiable answers."""

    max_prompt_length: Count = 24


class MathConfig(JobConfig):
    """The whole file."""

    runner: MathRunnerConfig = Field(
        default_factory=MathRunnerConfig, description="How long the run lasts, what it keeps, where results go."
    )
    actor: MathActorConfig = Field(
        default_factory=MathActorConfig, description="The model that learns, its optimizer and how it is spread."
    )
    rollout: MathRolloutConfig = Field(
        default_factory=MathRolloutConfig, description="The workers that answer prompts."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="How answers are scored.")
    data: MathDataConfig = Field(default_factory=MathDataConfig, description="The problems.")
    algorithm: MathAlgorithmConfig = Field(
        default_factory=MathAlgorithmConfig, description="Advantages, losses, and how often samples are learned from."
    )


def check(config: MathConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report what does not fit together in a file of this recipe."""
    check_components(config.cluster, config.recipe, COMPONENTS, report)
    names = {"actor": config.actor.group_name, "rollout": config.rollout.group_name, "reward": config.reward.group_name}
    check_group_names(config, names, report)
    check_fsdp(config.actor.fsdp_config, report)
    check_loggers(config.runner, report)
    check_folders(config.runner, report)
    check_batches(config, config.actor, world_sizes.get("actor"), report)
    _check_algorithm(config, report)
    _check_lengths(config, report)
    algorithm, prompts = config.algorithm, config.data.rollout_batch_size
    if not algorithm.filter_rewards:  # with it, how many samples remain is known only when rewards are
        samples = prompts * algorithm.group_size
        arithmetic = f"rollout_batch_size {prompts} x group_size {algorithm.group_size}"
        sources: tuple[Path, ...] = (("data", "rollout_batch_size"), ("algorithm", "group_size"))
        check_samples(config, config.actor, samples, arithmetic, sources, report)


def _check_algorithm(config: MathConfig, report: Report) -> None:
    algorithm = config.algorithm
    for name, value in (("adv_type", "gae"), ("loss_type", "actor_critic")):
        if getattr(algorithm, name) == value:
            report(
                ("algorithm", name),
                "conflicting-settings",
                f"`{name}: {value}` needs values, and the models of this recipe have no value head",
                "write `adv_type: grpo` and `loss_type: actor`",
            )
    if algorithm.adv_type == "grpo" and algorithm.group_size < 2:
        report(
            blame(config, ("algorithm", "group_size"), ("algorithm", "adv_type")),
            "conflicting-settings",
            "`adv_type: grpo` compares the members of a group, and each group has one",
            "write `algorithm.group_size: 8`",
        )


def _check_lengths(config: MathConfig, report: Report) -> None:
    prompt, answer = config.data.max_prompt_length, config.rollout.sampling_params.max_new_tokens
    if prompt + answer <= config.runner.seq_length:
        return
    report(
        blame(
            config,
            ("runner", "seq_length"),
            ("rollout", "sampling_params", "max_new_tokens"),
            ("data", "max_prompt_length"),
        ),
        "conflicting-settings",
        f"max_prompt_length {prompt} + max_new_tokens {answer} = {prompt + answer} tokens, more than"
        f" `runner.seq_length` {config.runner.seq_length}",
        f"`runner.seq_length` could be {prompt + answer}",
    )
