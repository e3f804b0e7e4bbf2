"""Configuration shared by recipes `embodied` and `sft`: a policy, and environments that it acts in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.config.embodied_no_effect import SMALL_MODELS
from recipes.embodied.config.env_config import EnvSection
from recipes.sections.actor import (
    ActorConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
)
from recipes.sections.values import KnownOrOwn
from rlinf_core import Count, JobConfig, RunnerConfig
from rlinf_core.config.sections.values import NonNegativeFloat, OptionalPath, PositiveFloat, Precision
from rlinf_core.scalars import Bool, Data, Text

MODEL_TYPES = (*SMALL_MODELS, "openvla", "openvla_oft", "pi0", "pi05", "smolvla", "lerobot")
_PI0 = "write `pi0` or `pi05`: they load folders of HuggingFace, lerobot and openpi's PyTorch (docs/models.md)"
# Models of related projects, each with what there is in its place.
OTHER_MODELS = {
    "openvla-oft": "write `openvla_oft`",
    **dict.fromkeys(("openpi", "pi0_5", "pi0.5"), _PI0),
    "vlm_policy": "write `openvla`, or `openvla_oft`, which reads a chunk in one pass: both spell actions as tokens",
    "gr00t": "write `pi0` or `smolvla`, which also use flow matching; its own weights cannot be loaded",
}


class EmbodiedModelConfig(ModelConfig):
    """The policy."""

    model_type: Annotated[Text, KnownOrOwn("model_type", MODEL_TYPES, instead=OTHER_MODELS)] = Field(
        default="mlp_policy",
        description="Policy: mlp_policy (states), cnn_policy (images), flow_policy (both, by flow matching),"
        " squashed_policy (either, for SAC and TD3), steered_policy (a trained one by diffusion or flow, for DSRL),"
        " openvla, openvla_oft, pi0, pi05 and smolvla (images and an instruction), lerobot (ACT,"
        " diffusion and other policies of lerobot), or `package.module:Class`, a subclass of BasePolicy.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="Additional parameters of the policy, by name (docs/models.md); the `options_model` of your own"
        " policy, a pydantic model, validates them.",
    )
    trainable: tuple[Text, ...] = Field(
        default=(),
        description="Name patterns of the weights that are trained, such as `critic.*`; all others are frozen."
        " Default: all.",
    )
    num_action_chunks: Count = Field(default=1, description="Actions that are carried out per observation.")
    hidden_dim: Count = Field(
        default=128, description="Width of the hidden layers of the model built without `model_path`."
    )
    add_value_head: Bool = Field(default=True, description="Add a value head, as GAE needs.")
    compile: Bool = Field(
        default=False,
        description="Compile the training passes with torch.compile: the first step takes a minute or more, later ones"
        " are faster. Needs a C++ compiler on the actor's node, and triton on GPUs.",
    )


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
        """See `MixedPrecisionConfig`."""
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
        " different episodes; count goes on.",
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
    model: EmbodiedModelConfig = Field(
        default_factory=EmbodiedModelConfig, description="The policy: model_type, hidden_dim, precision."
    )
    optim: PolicyOptimConfig = Field(default_factory=PolicyOptimConfig, description="Optimizer: lr, betas, clipping.")


class PolicyRolloutConfig(RolloutConfig):
    """The workers that run the policy."""

    pipeline_stage_num: Count = Field(
        default=1,
        description="Groups of environments per env worker: while one waits for its actions, another steps.",
    )


class PolicyJob(JobConfig):
    """A whole file. A recipe adds what it learns by."""

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
    # The options of a custom model are assumed to determine its shapes.
    options = config.actor.model.options.items()
    named |= {f"actor.model.options.{key}": value for key, value in options if isinstance(value, str | int | float)}
    train = config.env.train
    return {**named, "env.train.env_type": train.env_type, "env.train.task": train.task}


def inputs(config: PolicyJob) -> list[Path]:
    """Return the files and folders that a run reads."""
    return [Path(name) for name in (config.actor.model.model_path, config.actor.checkpoint_load_path) if name]
