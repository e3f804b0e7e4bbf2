"""Configuration of the embodied recipe: sections and defaults. `rules` holds the constraints between them.

The defaults train a Franka arm to pick a block, in about a minute on two CPU cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.config.embodied_no_effect import EMBODIED, SMALL_MODELS
from recipes.embodied.config.env_config import EnvironmentConfig, EnvSection
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.off_policy_config import OFF_POLICY_LOSSES, OffPolicyConfig
from recipes.sections.actor import ActorConfig, ModelConfig, OptimConfig
from recipes.sections.algorithm import (
    ADVANTAGES,
    GROUP_ADVANTAGES,
    LOSSES,
    OTHER_LOSSES,
    ActorCriticConfig,
    AdvantageType,
)
from recipes.sections.job import ActorRolloutJob
from recipes.sections.rollout import RolloutConfig
from recipes.sections.values import KnownOrOwn
from rlinf_core import RunnerConfig
from rlinf_core.config.model import NoEffect
from rlinf_core.config.sections.values import Count, NonNegativeFloat, NonNegativeInt, PositiveFloat, StepsOrNever
from rlinf_core.scalars import Bool, Data, Text

COMPONENTS = ("actor", "rollout", "env")
MODEL_TYPES = (*SMALL_MODELS, "vlm_policy", "pi0", "smolvla")
_OPENVLA = (
    "write `vlm_policy`, a vision-language model that predicts chunks of action tokens in one pass"
    " (docs/models/vlm_policy.md); OpenVLA's own weights cannot be loaded: start from a LLaVA and demonstrations"
    " (docs/from-a-checkpoint.md)"
)
_PI0 = "write `pi0`: it loads HuggingFace and lerobot folders, but not openpi's own checkpoints (docs/models/pi0.md)"
# Models of related projects, each with what there is in its place.
OTHER_MODELS = {
    **dict.fromkeys(("openvla", "openvla_oft", "openvla-oft"), _OPENVLA),
    **dict.fromkeys(("openpi", "pi05", "pi0_5", "pi0.5"), _PI0),
    "gr00t": "write `pi0` or `smolvla`, which also use flow matching; its own weights cannot be loaded",
}


class EmbodiedRunnerConfig(RunnerConfig):
    """Settings of the run."""

    task_type: Literal["embodied"] = Field(default="embodied", description="Kind of job; this recipe has one.")
    max_steps: StepsOrNever = 150


class EmbodiedModelConfig(ModelConfig):
    """The policy."""

    model_type: Annotated[Text, KnownOrOwn("model_type", MODEL_TYPES, instead=OTHER_MODELS)] = Field(
        default="mlp_policy",
        description="Policy: mlp_policy (states), cnn_policy (images), flow_policy (both, by flow matching),"
        " squashed_policy (either, for SAC and TD3), vlm_policy, pi0 and smolvla (images and an"
        " instruction), or `package.module:Class`, a subclass of BasePolicy.",
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
    num_action_chunks: Count = Field(default=1, description="Actions that the policy predicts per observation.")
    hidden_dim: Count = Field(
        default=128, description="Width of the hidden layers of the model built without `model_path`."
    )
    add_value_head: Bool = Field(default=True, description="Add a value head, as GAE needs.")
    compile: Bool = Field(
        default=False,
        description="Compile the training passes with torch.compile: the first step takes a minute or more, later ones"
        " are faster. Needs a C++ compiler on the actor's node, and triton on GPUs.",
    )


class EmbodiedOptimConfig(OptimConfig):
    """AdamW and the clipping of gradients."""

    lr: PositiveFloat = 1e-3
    adam_eps: PositiveFloat = 1e-5
    clip_grad: NonNegativeFloat = 0.5


class EmbodiedActorConfig(ActorConfig):
    """The workers that train."""

    global_batch_size: Count | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
        default=None,
        description="Samples per optimizer step, over all ranks. Default: about a quarter of a step's samples.",
    )
    model: EmbodiedModelConfig = Field(
        default_factory=EmbodiedModelConfig, description="The policy: model_type, hidden_dim, precision."
    )
    optim: EmbodiedOptimConfig = Field(
        default_factory=EmbodiedOptimConfig, description="Optimizer: lr, betas, clipping."
    )


class EmbodiedRolloutConfig(RolloutConfig):
    """The workers that run the policy."""

    backend: Literal["huggingface"] = Field(
        default="huggingface", description="Inference engine of the policy: its own torch module."
    )
    pipeline_stage_num: Count = Field(
        default=1,
        description="Groups of environments per env worker: while one waits for its actions, another steps.",
    )


class EmbodiedAlgorithmConfig(ActorCriticConfig):
    """PPO with GAE by default; `adv_type: grpo` and `loss_type: actor` for GRPO; `loss_type: sac` off policy."""

    critic_warmup_steps: NonNegativeInt = Field(
        default=0,
        description="Initial training steps that train only the value head, for a pretrained policy with an untrained"
        " head.",
    )
    adv_type: AdvantageType = "gae"
    loss_type: Annotated[Text, KnownOrOwn("loss_type", (*LOSSES, *OFF_POLICY_LOSSES), OTHER_LOSSES)] = Field(
        default="actor_critic",
        description="Loss. actor_critic: policy and value loss; actor: policy loss only; sac or td3: action critics"
        " trained from a replay buffer; or `package.module:name`.",
    )
    update_epoch: Count = 6
    bc_weight: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of the behavior-cloning loss on demonstrations (`data.train_data_paths`) relative to the"
        " policy loss; every micro batch adds as many demonstration rows. 0: none.",
    )
    off_policy: OffPolicyConfig = Field(
        default_factory=OffPolicyConfig,
        description="Settings of `loss_type: sac` and `td3`: replay buffer, critics, update ratios.",
    )


class EmbodiedConfig(ActorRolloutJob):
    """Configuration of the embodied recipe."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = EMBODIED

    runner: EmbodiedRunnerConfig = Field(
        default_factory=EmbodiedRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: EmbodiedActorConfig = Field(
        default_factory=EmbodiedActorConfig, description="The model that learns, its optimizer and its sharding."
    )
    rollout: EmbodiedRolloutConfig = Field(
        default_factory=EmbodiedRolloutConfig, description="The workers that run the policy in the environments."
    )
    env: EnvSection = Field(default_factory=EnvSection, description="The environments of training and evaluation.")
    algorithm: EmbodiedAlgorithmConfig = Field(
        default_factory=EmbodiedAlgorithmConfig,
        description="Advantages, losses, and how often samples are reused.",
    )
    data: DemonstrationsConfig = Field(
        default_factory=DemonstrationsConfig, description="Demonstrations: train_data_paths."
    )


def facts(config: EmbodiedConfig) -> dict[str, str | int | float | bool | None]:
    """Return the settings that must match to resume from a checkpoint: all that determine weight shapes."""
    model = config.actor.model.model_dump()
    shaping = ("model_type", "num_action_chunks", "hidden_dim", "add_value_head", "precision")
    named = {f"actor.model.{name}": model[name] for name in shaping if name in model}
    # The options of a custom model are assumed to determine its shapes.
    options = config.actor.model.options.items()
    named |= {f"actor.model.options.{key}": value for key, value in options if isinstance(value, str | int | float)}
    train = config.env.train
    return {**named, "env.train.env_type": train.env_type, "env.train.task": train.task}


def inputs(config: EmbodiedConfig) -> list[Path]:
    """Return the files and folders that a run reads."""
    return [Path(name) for name in (config.actor.model.model_path, config.actor.checkpoint_load_path) if name]


def group_size(config: EmbodiedConfig, environments: EnvironmentConfig) -> int:
    """Return how many environments share each start."""
    return environments.group_size or config.algorithm.group_size


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
