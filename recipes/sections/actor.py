"""`actor`: the model that learns, its optimizer, and its spread over accelerators; and rules on keys without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from recipes.sections.values import one_or_many
from rlinf_core import ConfigModel, Count, Fraction, IgnoredKeys, Seed
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.values import (
    GroupName,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalModelPath,
    OptionalPath,
    PositiveFloat,
    Precision,
)
from rlinf_core.scalars import Bool, Float, Text

# What peft calls all linear layers except the last.
ALL_LINEAR: Final = ("all-linear",)
Decay = Annotated[Float, Field(ge=0, lt=1)]


_LAYERS_SCHEMA = WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}})


class LoraSettings(ConfigModel):
    """Low-rank adapters: the weights of the model stay as they are."""

    rank: Count = Field(default=16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(default=32.0, description="Scale of the adapters (alpha), divided by the rank.")
    target_modules: Annotated[tuple[Text, ...], BeforeValidator(one_or_many), _LAYERS_SCHEMA] = Field(
        default=(),
        description="Names of the layers that get adapters, or all-linear. Default: all linear layers except the last.",
    )


class BareModelConfig(ConfigModel):
    """Settings of every model. Recipes add the keys of their kinds of model."""

    model_path: OptionalModelPath = Field(
        default=None,
        description="Folder or file of the initial weights, or a model's name in the HuggingFace Hub, `ORG/NAME`."
        " Default: the recipe builds its own model.",
    )
    precision: Precision = Field(
        default="fp32",
        description="Compute type, and the type in which rollout workers hold weights: fp32 or bf16; fp16 only with"
        " `runner.only_eval`. Actors keep trained weights in fp32.",
    )

    def adapter(self) -> LoraSettings | None:
        """Return the settings of LoRA; None without it."""
        return None


class AdaptedConfig(ConfigModel):
    """Settings of models that low-rank adapters can train."""

    lora: LoraSettings | None = Field(
        default=None, description="Train low-rank adapters: rank, alpha, target_modules. Default: all weights."
    )

    def adapter(self) -> LoraSettings | None:
        """Return the settings of LoRA; None without it."""
        return self.lora


class ModelConfig(AdaptedConfig, BareModelConfig):
    """Settings of models that low-rank adapters can train. Recipes add the keys of their kinds of model."""


class OptimConfig(ConfigModel):
    """AdamW and the clipping of gradients."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("min_lr_ratio", "total_training_steps"),
            lambda optim, sizes: optim.lr_scheduler == "constant",
            "`lr_scheduler: constant` does not decay learning rates",
            "remove it, or write `lr_scheduler: cosine`",
            because=("lr_scheduler",),
        ),
    )

    lr: PositiveFloat = Field(default=1e-4, description="Learning rate of the policy.")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning-rate schedule after warmup: constant, linear or cosine; the last two decay to"
        " `min_lr_ratio` of `lr`.",
    )
    lr_warmup_steps: NonNegativeInt = Field(
        default=0, description="Training steps over which learning rates rise to their full value."
    )
    total_training_steps: Count | None = Field(
        default=None,
        description="Training step at which `lr_scheduler` reaches its minimum. Default: the run's last.",
    )
    min_lr_ratio: Fraction = Field(
        default=0.0, description="Minimum learning rate of `lr_scheduler`, as a fraction of `lr`."
    )
    adam_beta1: Decay = Field(default=0.9, description="Adam's beta 1: decay of the mean of gradients.")
    adam_beta2: Decay = Field(default=0.999, description="Adam's beta 2: decay of the mean of squared gradients.")
    adam_eps: PositiveFloat = Field(default=1e-8, description="Adam's epsilon, added to the denominator.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay.")
    state_dtype: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="Type of Adam's two moments: fp32, bf16 in half the memory, or int8 in a quarter, with a scale for"
        " each block of 256 numbers; both are rounded at random so that small changes are not lost on average.",
    )
    clip_grad: NonNegativeFloat = Field(default=1.0, description="Maximum gradient norm; 0: no clipping.")

    @property
    def rate_of_values(self) -> float:
        """Learning rate of the weights that only values depend on."""
        return self.lr


class ValueOptimConfig(OptimConfig):
    """AdamW and the clipping of gradients, with its own learning rate for values."""

    value_lr: PositiveFloat | None = Field(default=None, description="Learning rate of the value head. Default: `lr`.")

    @property
    def rate_of_values(self) -> float:
        return self.value_lr or self.lr


class MixedPrecisionConfig(ConfigModel):
    """Types used while computing, where they differ from the weights' own. Buffers are never cast."""

    reduce_dtype: Precision | None = Field(
        default=None,
        description="Type in which gradients are summed over ranks: fp32 or bf16; fp16 is accepted only with"
        " `runner.only_eval`. Default: the type that layers compute in; for language models fp32.",
    )

    @property
    def computing(self) -> Precision | None:
        """Type that layers compute in; None: that of their weights."""
        return None


class FsdpConfig(ConfigModel):
    """The sharding of weights, gradients and optimizer state over the actor's ranks (FSDP2)."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "no_shard"] = Field(
        default="full_shard",
        description="full_shard: gather weights when needed; shard_grad_op: keep them gathered between forward and"
        " backward; no_shard: every rank holds everything.",
    )
    cpu_offload: Bool = Field(default=False, description="Keep unused shards in host memory.")
    mixed_precision: MixedPrecisionConfig = Field(
        default_factory=MixedPrecisionConfig, description="Types used while computing: reduce_dtype."
    )
    gradient_checkpointing: Bool = Field(
        default=False,
        description="Activation checkpointing: recompute activations in the backward pass instead of storing them.",
    )


class ActorConfig(ConfigModel):
    """The workers that train. Recipes add `model`, `optim` and the sizes of batches."""

    group_name: GroupName = Field(
        default="ActorGroup", description="Name of the worker group, by which other components address it."
    )
    seed: Seed = Field(default=1234, description="Seed of the initial weights and of the sample order.")
    enable_offload: Bool = Field(
        default=False, description="Offload the actor from its accelerators while other components use them."
    )
    checkpoint_save_path: OptionalPath = Field(
        default=None, description="Folder for checkpoints. Default: `checkpoints` in the run folder."
    )
    fsdp_config: FsdpConfig = Field(default_factory=FsdpConfig, description="How the model is spread over ranks.")


class RolloutConfig(ConfigModel):
    """Settings of every rollout. Recipes add those of their engines."""

    group_name: GroupName = Field(
        default="RolloutGroup", description="Name of the worker group, by which other components address it."
    )
    enable_offload: Bool = Field(
        default=False, description="Offload the policy from its accelerators while other components use them."
    )


def of_one_rank(component: str, *others: str, reads: Callable[[Any], bool] = lambda config: False) -> IgnoredKeys:
    """Return the rule about `fsdp_config` of a component that has a single process.

    Args:
        component: the section.
        others: further components that read `fsdp_config`; each must have a single process, too.
        reads: returns whether a single process reads it nevertheless in a given job.
    """
    alone = (component, *others)
    names = ("sharding_strategy", "cpu_offload", "mixed_precision.reduce_dtype")
    return IgnoredKeys(
        tuple(f"{component}.fsdp_config.{name}" for name in names),
        lambda config, sizes: (
            component in sizes and all(sizes.get(other, 1) == 1 for other in alone) and not reads(config)
        ),
        f"`{component}` is a single process and shares weights with no other",
        f"it takes effect when `{component}` has several processes",
        because=("cluster.component_placement",),
        severity=Severity.NOTE,
    )


def without_shards(component: str, reads: Callable[[Any], bool]) -> IgnoredKeys:
    """Return the rule about `cpu_offload` of a component each of whose ranks holds all weights.

    Args:
        component: the section.
        reads: returns whether `cpu_offload` is read nevertheless in a given job.
    """
    strategy = f"{component}.fsdp_config.sharding_strategy"
    return IgnoredKeys(
        (f"{component}.fsdp_config.cpu_offload",),
        lambda config, sizes: (
            getattr(config, component).fsdp_config.sharding_strategy == "no_shard" and not reads(config)
        ),
        "it is about shards of weights and gradients, and `sharding_strategy: no_shard` makes none",
        because=(strategy,),
    )


def checkpoints_of(component: str) -> IgnoredKeys:
    """Return the rule about the folder of checkpoints in a run that writes none."""
    return IgnoredKeys(
        (f"{component}.checkpoint_save_path",),
        lambda config, sizes: config.runner.save_interval == -1 and not config.runner.save_on_interrupt,
        "the run writes no checkpoints",
        "remove it, or write `runner.save_interval: 100`",
        because=("runner.save_interval",),
    )
