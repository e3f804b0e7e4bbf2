"""Sections of the files of language models' recipes, and the rules between their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from recipes.language.config.algorithm_config import LanguageAlgorithmConfig
from recipes.language.config.language_no_effect import LANGUAGE
from recipes.language.config.problem_config import LanguageDataConfig, LanguageRewardConfig
from recipes.language.config.rollout_config import LanguageRolloutConfig
from recipes.sections.actor import ActorConfig, FsdpConfig, ModelConfig, OptimConfig
from recipes.sections.checks import Report, blame, near_divisors
from rlinf_core import ConfigModel, JobConfig, RunnerConfig
from rlinf_core.config.model import NoEffect
from rlinf_core.config.sections.values import (
    Count,
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    Precision,
    StepsOrNever,
)
from rlinf_core.scalars import Bool, Text


class LanguageRunnerConfig(RunnerConfig):
    """The run as a whole."""

    not_available: ClassVar[Mapping[str, str]] = {
        **RunnerConfig.not_available,
        "max_tokens_per_mbs": "`actor.max_tokens_per_micro_batch` bounds what a pass holds, in tokens",
        "enable_dynamic_batch_size": "`actor.max_tokens_per_micro_batch` bounds what a pass holds, in tokens",
        "critic_warmup": "remove it: actor and critic learn from the first step on",
    }
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *RunnerConfig.no_effect,
        NoEffect(
            ("max_samples",),
            lambda runner, sizes: runner.sample_interval == -1,
            "no samples are written: `sample_interval` is -1",
            "remove it, or write `sample_interval: 10`",
            because=("sample_interval",),
        ),
    )

    seq_length: Count = Field(default=2048, description="Longest sequence, prompt and answer together, in tokens.")
    partial_rollout: Bool = Field(
        default=True,
        description="With `max_staleness`: answers that are under way go on under new weights. false: they are ended"
        " under the old ones first.",
    )
    sample_interval: StepsOrNever = Field(
        default=10, description="Training steps between two files of samples, `samples/step_N.jsonl`; -1: never."
    )
    max_samples: Count = Field(default=64, description="Most answers in one file of samples.")
    save_format: Literal["dcp", "huggingface", "both"] = Field(
        default="both",
        description="Checkpoints: dcp, to resume from; huggingface, a folder that transformers loads; both: dcp, and"
        " such a folder at the end.",
    )


class LanguageModelConfig(ModelConfig):
    """The language model."""

    not_available: ClassVar[Mapping[str, str]] = {
        **ModelConfig.not_available,
        "external_lib": "remove it: no code beside the model's folder is loaded",
        "override_config": "remove it: the folder of a model says what it is",
        "lora_alpha": "write `lora: {rank: 16, alpha: 32}`",
        "target_modules": "write `lora: {rank: 16, target_modules: [q_proj, v_proj]}`",
        "enable_gradient_checkpointing": "`actor.fsdp_config.gradient_checkpointing` computes activations again",
        "use_remove_padding": "remove it: sequences are always packed, and none is padded",
        "trust_remote_code": "remove it: no code of a model's folder is ever run",
        "attn_implementation": "remove it: attention is computed over packed sequences",
    }
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *ModelConfig.no_effect,
        NoEffect(
            ("hidden_dim", "num_layers"),
            lambda model, sizes: model.model_path is not None,
            "`model_path` names a model, which has its own sizes",
            because=("model_path",),
        ),
    )

    precision: Precision = Field(
        default="fp32",
        description="Type that layers compute in, and that weights are sent and saved in for others: fp32 or bf16;"
        " fp16 is accepted only with `runner.only_eval`. What is trained is kept in fp32, and so is the optimizer's"
        " state.",
    )
    model_type: Literal["huggingface"] = Field(
        default="huggingface", description="What `model_path` holds: a causal language model of transformers."
    )
    hidden_dim: Count = Field(default=128, description="Width of the model built when there is no `model_path`.")
    num_layers: Count = Field(default=2, description="Layers of the model built when there is no `model_path`.")


class LanguageOptimConfig(OptimConfig):
    """AdamW and the clipping of gradients."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95


class WarmStartConfig(ConfigModel):
    """Supervised steps on right answers, for models built on the spot."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(("lr",), lambda start, sizes: start.steps == 0, "`steps` is 0", because=("steps",)),
    )

    steps: NonNegativeInt = Field(default=50, description="Optimizer steps before reinforcement learning begins.")
    lr: PositiveFloat = Field(default=1e-3, description="Learning rate of these steps.")


# Components that are placed where the algorithm asks for them.
OPTIONAL_COMPONENTS: Final = ("critic", "reference")

# What sums are written with; enough for a model that is built to learn them.
SYMBOLS: Final = "0123456789+-*/=() .,?"

# Keys of other trainers by which a pass is bounded in tokens, and those that there is nothing to choose about.
_TOKEN_BUDGETS: Final = {
    "ppo_max_token_len_per_gpu": "max_tokens_per_micro_batch",
    "max_tokens_per_mbs": "max_tokens_per_micro_batch",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
}
_ALWAYS: Final = {
    "use_dynamic_bsz": "remove it: `max_tokens_per_micro_batch` always bounds a pass, in tokens",
    "use_remove_padding": "remove it: sequences are always packed, and none is padded",
    "entropy_from_logits_with_chunking": "remove it: log-probabilities and entropies are always computed in chunks",
    "entropy_checkpointing": "remove it: log-probabilities and entropies are always computed in chunks",
    "ulysses_sequence_parallel_size": "remove it: a sequence is computed by one rank",
    "shuffle": "remove it: groups are dealt to optimizer steps at random, by `actor.seed`",
}


class LanguageActorConfig(ActorConfig):
    """The workers that train."""

    # Tokens of a model that is built on the spot: characters, and words that are one token each.
    built_symbols: ClassVar[str] = SYMBOLS
    built_words: ClassVar[tuple[str, ...]] = ()

    other_names: ClassVar[Mapping[str, str]] = {**ActorConfig.other_names, **_TOKEN_BUDGETS}
    moved: ClassVar[Mapping[str, str]] = {**ActorConfig.moved, "tis_imp_ratio_cap": "algorithm.tis_cap"}
    not_available: ClassVar[Mapping[str, str]] = {
        **ActorConfig.not_available,
        **_ALWAYS,
        "checkpoint": "`runner.save_format` says what a checkpoint is",
        "ppo_mini_batch_size": "`global_batch_size` counts answers, `algorithm.n_minibatches` optimizer steps",
        "loss_agg_mode": "`algorithm.loss_agg_func` says how losses of tokens become one",
        "policy_loss": "`algorithm.loss_type` names the loss",
        "tis_imp_ratio_cap": "`algorithm.tis_cap` bounds the weights of truncated importance sampling",
        "clip_ratio_low": "write `algorithm.clip_ratio_low`",
        "clip_ratio_high": "write `algorithm.clip_ratio_high`",
        "clip_ratio_c": "write `algorithm.clip_ratio_c`",
    }

    global_batch_size: Count | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, description="Answers of one optimizer step, over all ranks. Default: all of a training step."
    )
    micro_batch_size: Count | None = Field(
        default=None,
        description="Answers of one forward and backward pass on one rank at most. Default: as many as"
        " `max_tokens_per_micro_batch` holds.",
    )
    max_tokens_per_micro_batch: Count = Field(
        default=4096, description="Packed tokens of one forward and backward pass on one rank."
    )
    share_prompts: Bool = Field(
        default=True, description="Compute the prompt of a group once in training; losses are the same."
    )
    threads: Count = Field(default=1, description="CPU threads that each process computes on.")
    warm_start: WarmStartConfig = Field(
        default_factory=WarmStartConfig, description="Supervised steps of a model without `model_path`: steps, lr."
    )
    model: LanguageModelConfig = Field(
        default_factory=LanguageModelConfig, description="The language model: model_path, precision, lora."
    )
    optim: LanguageOptimConfig = Field(
        default_factory=LanguageOptimConfig, description="Optimizer: lr, betas, clipping."
    )


class LanguageCriticConfig(ConfigModel):
    """The workers that estimate values, for PPO: the language model with a linear value in the place of its logits."""

    other_names: ClassVar[Mapping[str, str]] = {
        "strategy": "training_backend",
        "ppo_max_token_len_per_gpu": "max_tokens_per_micro_batch",
    }
    moved: ClassVar[Mapping[str, str]] = {
        "cliprange_value": "algorithm.value_clip",
        "grad_clip": "critic.optim.clip_grad",
    }
    not_available: ClassVar[Mapping[str, str]] = {
        **_ALWAYS,
        "cliprange_value": "`algorithm.value_clip` bounds the change of a value",
        "ppo_mini_batch_size": "the critic takes as many optimizer steps as the actor: `algorithm.n_minibatches`",
        "ppo_epochs": "`algorithm.update_epoch` says how often the samples of a step are learned from",
        "grad_clip": "`critic.optim.clip_grad` bounds the norm of a gradient",
    }

    group_name: Text = Field(default="CriticGroup", description="Name of the worker group; others address it by this.")
    training_backend: Literal["fsdp"] = Field(default="fsdp", description="How training is spread over ranks.")
    max_tokens_per_micro_batch: Count = Field(
        default=4096, description="Packed tokens of one forward and backward pass on one rank."
    )
    threads: Count = Field(default=1, description="CPU threads that each process computes on.")
    model: LanguageModelConfig | None = Field(
        default=None, description="The model that values are learned on: model_path, precision, lora. Default: actor's."
    )
    optim: LanguageOptimConfig = Field(
        default_factory=LanguageOptimConfig, description="Optimizer: lr, value_lr of the value itself, clipping."
    )
    enable_offload: Bool = Field(
        default=False, description="Move the critic off its accelerators while other components use them."
    )
    fsdp_config: FsdpConfig = Field(default_factory=FsdpConfig, description="How the model is spread over ranks.")


class LanguageReferenceConfig(ConfigModel):
    """The workers that hold the reference model, which `algorithm.kl_beta` keeps the policy near."""

    not_available: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "log_prob_use_dynamic_bsz",
            "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_max_token_len_per_gpu",
        ),
        "`max_tokens_per_micro_batch` bounds a pass, in tokens",
    )

    group_name: Text = Field(
        default="ReferenceGroup", description="Name of the worker group; others address it by this."
    )
    max_tokens_per_micro_batch: Count = Field(default=4096, description="Packed tokens of one forward pass.")
    threads: Count = Field(default=1, description="CPU threads that each process computes on.")
    enable_offload: Bool = Field(
        default=False, description="Move the reference model off its accelerators while other components use them."
    )
    model_path: OptionalPath = Field(
        default=None, description="Folder of the reference model. Default: what the actor starts from."
    )


class LanguageConfig(JobConfig):
    """A whole file."""

    # Returns what a model that is built on the spot is shown before, from the file and the tokenizer.
    shown_first: ClassVar[str] = "recipes.language.learning.warm_start:right_answers"

    no_effect: ClassVar[tuple[NoEffect, ...]] = LANGUAGE

    not_available: ClassVar[Mapping[str, str]] = {
        **JobConfig.not_available,
        "actor_rollout_ref": "its parts are the sections `actor` and `rollout`",
        "trainer": "`runner` says how long a run lasts, what it keeps, and where results go",
        "ray_init": "remove it: `rlinf up` starts Ray on the machines of `cluster`",
        "ray_kwargs": "remove it: `rlinf up` starts Ray on the machines of `cluster`",
        "inference": "the actor computes log probabilities itself: remove the section, and its place",
        "reward_model": "`reward.reward_type` names the rule, or a function that may ask a model",
        "custom_reward_function": "write `reward.reward_type: package.module:function`",
    }

    runner: LanguageRunnerConfig = Field(
        default_factory=LanguageRunnerConfig, description="How long the run lasts, what it keeps, where results go."
    )
    actor: LanguageActorConfig = Field(
        default_factory=LanguageActorConfig, description="The model that learns, its optimizer and how it is spread."
    )
    rollout: LanguageRolloutConfig = Field(
        default_factory=LanguageRolloutConfig, description="The workers that answer prompts."
    )
    critic: LanguageCriticConfig = Field(
        default_factory=LanguageCriticConfig, description="The workers that estimate values, for `adv_type: gae`."
    )
    reference: LanguageReferenceConfig = Field(
        default_factory=LanguageReferenceConfig, description="The reference model, for `algorithm.kl_beta`."
    )
    reward: LanguageRewardConfig = Field(default_factory=LanguageRewardConfig, description="How answers are scored.")
    data: LanguageDataConfig = Field(default_factory=LanguageDataConfig, description="The problems.")
    algorithm: LanguageAlgorithmConfig = Field(
        default_factory=LanguageAlgorithmConfig,
        description="Advantages, losses, and how often samples are learned from.",
    )

    @property
    def answers_per_step(self) -> int:
        """Answers that a training step learns from, when no group is dropped."""
        return self.data.rollout_batch_size * self.algorithm.group_size

    @property
    def longest_answer(self) -> int:
        """Most tokens that an answer may have."""
        return self.rollout.sampling_params.max_new_tokens

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one pass over a training step's answers."""
        if self.algorithm.n_minibatches is not None:
            return self.algorithm.n_minibatches
        size = self.actor.global_batch_size
        return 1 if size is None else max(1, self.answers_per_step // size)


def check_minibatches(config: LanguageConfig, report: Report) -> None:
    """Report sizes of batches that do not fit each other."""
    size, answers = config.actor.global_batch_size, config.answers_per_step
    arithmetic = f"rollout_batch_size {config.data.rollout_batch_size} x group_size {config.algorithm.group_size}"
    prompts, steps = config.data.rollout_batch_size, config.minibatches
    if steps > prompts:
        report(
            blame(
                config, ("algorithm", "n_minibatches"), ("actor", "global_batch_size"), ("data", "rollout_batch_size")
            ),
            "conflicting-settings",
            f"{steps} optimizer steps share the answers to {prompts} prompts, and each takes whole groups",
            f"take {prompts} steps at most: `actor.global_batch_size` is at least `group_size`"
            f" {config.algorithm.group_size}",
        )
    if size is None:
        return
    at = blame(config, ("actor", "global_batch_size"), ("data", "rollout_batch_size"), ("algorithm", "group_size"))
    if answers % size:
        report(
            at,
            "batch-not-divisible",
            f"a step has {arithmetic} = {answers} answers, which `actor.global_batch_size` {size} does not divide",
            f"`actor.global_batch_size` could be {near_divisors(answers, size)}",
        )
    elif config.algorithm.n_minibatches not in (None, answers // size):
        report(
            ("algorithm", "n_minibatches"),
            "conflicting-settings",
            f"`n_minibatches` is {config.algorithm.n_minibatches}, and {arithmetic} = {answers} answers /"
            f" `actor.global_batch_size` {size} = {answers // size}",
            "remove one of the two",
        )
