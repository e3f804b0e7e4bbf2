"""`actor`: the model that learns, its optimizer, and how it is spread over accelerators."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlinf_core import ConfigModel
from rlinf_core.config.model import NoEffect
from rlinf_core.config.sections.values import (
    Count,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    Precision,
    Seed,
)
from rlinf_core.scalars import Bool, Float, Text

Decay = Annotated[Float, Field(ge=0, lt=1)]


class LoraSettings(ConfigModel):
    """Low-rank adapters: the weights of the model stay as they are."""

    rank: Count = Field(default=16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(default=32.0, description="Scale of the adapters, divided by the rank.")
    target_modules: tuple[Text, ...] = Field(
        default=(), description="Names of the layers that get adapters. Default: all linear layers but the last."
    )


class ModelConfig(ConfigModel):
    """Settings of every model. Recipes add the keys of their kinds of model."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("is_lora", "lora_rank"),
            lambda model, sizes: model.lora is not None and not _is_of_user(model),
            "`lora` has the settings of the adapters",
            because=("lora",),
        ),
        NoEffect(
            ("lora_rank",),
            lambda model, sizes: not model.is_lora and not _is_of_user(model),
            "all weights are trained",
            "remove it, or write `is_lora: true`",
            because=("is_lora",),
        ),
    )

    model_path: OptionalPath = Field(
        default=None, description="Folder or file of weights to start from. Default: the recipe builds its own model."
    )
    precision: Precision = Field(
        default="fp32",
        description="Type that layers compute in, and that rollout workers hold weights in: fp32 or bf16; fp16 is"
        " accepted only with `runner.only_eval`. Actors keep the weights that they train in fp32.",
    )
    is_lora: Bool = Field(default=False, description="Train low-rank adapters and leave the weights as they are.")
    lora_rank: Count = Field(default=32, description="Rank of the adapters; used when `is_lora`.")
    lora: LoraSettings | None = Field(
        default=None, description="Train low-rank adapters: rank, alpha, target_modules. Default: all weights."
    )

    def adapter(self) -> LoraSettings | None:
        """Return the settings of LoRA by either of its keys; None without it."""
        if self.lora is not None:
            return self.lora
        return LoraSettings(rank=self.lora_rank, alpha=2.0 * self.lora_rank) if self.is_lora else None


def _is_of_user(model: Any) -> bool:
    """Return whether a policy is the user's own, which may read any key."""
    return ":" in getattr(model, "model_type", "")


class OptimConfig(ConfigModel):
    """AdamW and the clipping of gradients."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("min_lr_ratio", "total_training_steps"),
            lambda optim, sizes: optim.lr_scheduler == "constant",
            "with `lr_scheduler: constant` learning rates do not fall",
            "remove it, or write `lr_scheduler: cosine`",
            because=("lr_scheduler",),
        ),
    )

    lr: PositiveFloat = Field(default=1e-4, description="Learning rate of the policy.")
    value_lr: PositiveFloat | None = Field(
        default=None, description="Learning rate of the value head. Default: the same as `lr`."
    )
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="What learning rates do after the warmup: constant, linear or cosine, which fall to"
        " `min_lr_ratio` of `lr`.",
    )
    lr_warmup_steps: NonNegativeInt = Field(
        default=0, description="Training steps in which learning rates rise to their full value."
    )
    total_training_steps: Count | None = Field(
        default=None,
        description="Training step at which `lr_scheduler` has fallen to its lowest. Default: the run's last.",
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="Lowest learning rate of `lr_scheduler`, by `lr`.")
    adam_beta1: Decay = Field(default=0.9, description="Decay of the mean of gradients.")
    adam_beta2: Decay = Field(default=0.999, description="Decay of the mean of squared gradients.")
    adam_eps: PositiveFloat = Field(default=1e-8, description="Added to the denominator.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay.")
    clip_grad: NonNegativeFloat = Field(default=1.0, description="Largest norm of a gradient; 0: not clipped.")


class MixedPrecisionConfig(ConfigModel):
    """Types used while computing, where they differ from the weights' own. Buffers are never cast."""

    param_dtype: Precision | None = Field(
        default=None,
        description="Type of gathered weights and of activations: fp32 or bf16; fp16 is accepted only with"
        " `runner.only_eval`. Default: `model.precision`.",
    )
    reduce_dtype: Precision | None = Field(
        default=None,
        description="Type in which gradients are summed over ranks: fp32 or bf16; fp16 is accepted only with"
        " `runner.only_eval`. Default: `param_dtype`; for language models fp32.",
    )


class FsdpConfig(ConfigModel):
    """The sharding of weights, gradients and optimizer state over the actor's ranks (FSDP2)."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "no_shard"] = Field(
        default="full_shard",
        description="full_shard: weights are gathered when needed; shard_grad_op: they stay gathered between forward"
        " and backward; no_shard: every rank holds everything.",
    )
    cpu_offload: Bool = Field(default=False, description="Keep shards in the host's memory while they are not used.")
    reshard_after_forward: Bool | None = Field(
        default=None, description="Drop gathered weights after the forward pass. Default: as `sharding_strategy` says."
    )
    mixed_precision: MixedPrecisionConfig = Field(
        default_factory=MixedPrecisionConfig, description="Types used while computing: param_dtype, reduce_dtype."
    )
    gradient_checkpointing: Bool = Field(
        default=False, description="Compute activations again in the backward pass instead of keeping them."
    )


class TokenizerConfig(ConfigModel):
    """The tokenizer of a language model."""

    tokenizer_model: OptionalPath = Field(
        default=None, description="Folder of the tokenizer. Default: the one in `actor.model.model_path`."
    )


class ActorConfig(ConfigModel):
    """The workers that train. Recipes add `model` and `optim`."""

    group_name: Text = Field(default="ActorGroup", description="Name of the worker group; others address it by this.")
    training_backend: Literal["fsdp"] = Field(
        default="fsdp", description="How training is spread over ranks; a single rank trains plainly."
    )
    seed: Seed = Field(default=1234, description="Seed of the initial weights and of the order of samples.")
    global_batch_size: Count = Field(description="Samples of one optimizer step, over all ranks.")
    micro_batch_size: Count | None = Field(
        default=None,
        description="Samples of one forward and backward pass on one rank. Default: a rank's whole share,"
        " global_batch_size / world size.",
    )
    enable_offload: Bool = Field(
        default=False, description="Move the actor off its accelerators while other components use them."
    )
    checkpoint_load_path: OptionalPath = Field(
        default=None, description="Checkpoint whose weights training starts from; the step count starts at 0."
    )
    checkpoint_save_path: OptionalPath = Field(
        default=None, description="Folder for checkpoints. Default: `checkpoints` in the run's folder."
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="Tokenizer of a language model: tokenizer_model."
    )
    fsdp_config: FsdpConfig = Field(default_factory=FsdpConfig, description="How the model is spread over ranks.")

    def micro_batch(self, world_size: int) -> int:
        """Return the number of samples of one forward and backward pass on one of `world_size` ranks."""
        return self.micro_batch_size or max(1, self.global_batch_size // world_size)
