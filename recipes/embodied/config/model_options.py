"""`actor.model.options` of the built-in policies. Validation needs neither torch nor models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, Field

from rlinf_core import ConfigModel, Count
from rlinf_core.scalars import Bool, Data, Float, Int, Text

# The ways to turn images into features.
ImageFeatures: TypeAlias = Literal["convolutions", "keypoints"]
CONVOLUTIONS: Final = "convolutions"


class EnsembleOptions(ConfigModel):
    """Options of policies that predict more actions than are carried out."""

    ensemble: Bool = Field(
        default=False,
        description="Carry out the mean over the chunks that predict an action (arXiv 2304.13705), of which the i-th"
        " oldest weighs exp(-0.01 i), in evaluations and videos.",
    )


class FlowOptions(EnsembleOptions):
    """Options of `flow_policy`."""

    steps: Count = Field(default=4, description="K, from noise to actions.")
    noise: Annotated[Float, Field(gt=0)] = Field(
        default=0.5, description="Scale of what is drawn at each step while the policy acts; evaluations draw nothing."
    )
    noisy_steps: Literal["all", "one"] = Field(
        default="all",
        description="all: noise at each step; one: at one of them, drawn for each observation (pi_RL, arXiv"
        " 2510.25889), so that training computes one velocity for a chunk, and not K.",
    )
    action_horizon: Count | None = Field(
        default=None,
        description="Actions that are predicted together, of which the first `num_action_chunks` are carried out; null:"
        " these alone.",
    )


class SquashedOptions(ConfigModel):
    """Options of `squashed_policy`."""

    num_layers: Count = Field(default=2, description="Hidden layers of the policy.")
    exploration_noise: Annotated[Float, Field(gt=0)] | None = Field(
        default=None,
        description="Standard deviation of the noise that is added to actions while training, as TD3 does; null: the"
        " policy learns it, as in SAC.",
    )
    images: ImageFeatures = Field(
        default=CONVOLUTIONS,
        description="convolutions: as `cnn_policy` encodes them; keypoints: the places of a few learned colours in"
        " each, for things that have a colour of their own. The critics encode images the same way, and their loss"
        " alone trains the encoder.",
    )


class SteeredOptions(ConfigModel):
    """Options of `steered_policy`."""

    policy: dict[str, Data] = Field(
        default_factory=dict,
        description="The policy in `model_path` that is steered, by keys of `actor.model`: `model_type`, `hidden_dim`,"
        " `options`; by default as a folder of `rlinf export` says.",
    )
    noise_bound: Annotated[Float, Field(gt=0)] = Field(
        default=1.5, description="Largest size of a number of the noise."
    )
    repeats_noise: Bool = Field(
        default=False,
        description="Whether all actions of a chunk begin with the same noise, so that less of it is chosen.",
    )
    num_layers: Count = Field(default=2, description="Hidden layers of the policy that chooses the noise.")


class FlowVlaOptions(EnsembleOptions):
    """Options of the vision-language-action models by flow matching."""

    steps: Count | None = Field(
        default=None, description="K, from noise to actions; null: as many as the model's own configuration says."
    )
    noise: Annotated[Float, Field(gt=0)] = Field(
        default=0.5, description="Scale of what is drawn at each step while the policy acts; evaluations draw nothing."
    )
    noisy_steps: Literal["all", "one"] = Field(
        default="all",
        description="all: noise at each step; one: at one of them, drawn for each observation (pi_RL, arXiv"
        " 2510.25889), so that training computes one velocity for a chunk, and not K.",
    )
    action_horizon: Count | None = Field(
        default=None,
        description="Actions that the model predicts together, of which the first `num_action_chunks` are carried out;"
        " null: as many as the model in the folder learned, or `num_action_chunks` of one that is built. A model has"
        " to be fine-tuned to another number than it learned.",
    )
    prompt: Text = Field(
        default="{instruction}",
        description="The instruction as the model reads it; `{instruction}` stands for what the environment says.",
    )
    max_prompt_tokens: Count = Field(default=48, description="Room for the prompt, in tokens; shorter ones are padded.")
    statistics: Annotated[Text, Field(min_length=1)] = Field(
        default="folder",
        description="The statistics by which states and actions are normalized. folder: those that were saved with the"
        " model of another library, without which it is refused; none: none of these, but those of demonstrations, if"
        " there are some; or the path of openpi's `norm_stats.json` within the folder, where it has several.",
    )
    relative_actions: Annotated[Int, Field(ge=0)] = Field(
        default=0,
        description="How many of the first numbers of an action the model predicts relative to those of the state,"
        " which are added: 6 of a pi0 that openpi trained on LIBERO with `extra_delta_transform`. Statistics are of"
        " the relative ones.",
    )


class BuiltFlowVlaOptions(FlowVlaOptions):
    """Options of those that can be built without a folder."""

    num_layers: Count = Field(
        default=2,
        description="The number of layers of the model that is built without `model_path`, in language, expert and"
        " vision.",
    )
    patch_size: Count = Field(default=8, description="Pixels by which that model divides images.")


class Pi0Options(BuiltFlowVlaOptions):
    """Options of `pi0`."""


class Pi05Options(Pi0Options):
    """Options of `pi05`."""

    prompt: Text = Field(
        default="Task: {instruction}, State: {states};\nAction: ",
        description="What the model reads. `{states}` stands for the normalized state, each number as one of 256 from"
        " -1 to 1; without it the model knows of no state, as openpi trained `pi05_libero`: write"
        ' `"{instruction}\\n"`.',
    )
    max_prompt_tokens: Count = Field(
        default=200, description="Room for the prompt, in tokens; shorter ones are padded."
    )


class SmolVlaOptions(BuiltFlowVlaOptions):
    """Options of `smolvla`."""

    vlm_path: Text | None = Field(
        default=None,
        description="Folder of HuggingFace with configuration and tokenizer of the vision-language model that a folder"
        " of lerobot names; null: that of the model which is built.",
    )


class OpenVlaOptions(ConfigModel):
    """Options of `openvla` and `openvla_oft`."""

    prompt: Text = Field(
        default="In: What action should the robot take to {instruction}?\nOut:",
        description="What the model reads before the actions; `{instruction}` stands for what the environment says, in"
        " small letters.",
    )
    max_prompt_tokens: Count = Field(default=64, description="Room for the prompt, in tokens; shorter ones are padded.")
    cameras: list[Text] = Field(
        default_factory=list[str],
        description="The environment's cameras that the model sees, in order; by default its first one.",
    )
    centre_crop: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Share of the image's area that is seen, of its middle: 0.9 for a model that was fine-tuned on"
        " images cropped at random, as the published ones of LIBERO.",
    )
    data_set: Text | None = Field(
        default=None, description="The data set whose statistics in the folder normalize actions; null: the only one."
    )
    statistics: Literal["folder", "none"] = Field(
        default="folder",
        description="folder: those in `model_path`; none: none of these, but those of demonstrations, if there are"
        " some.",
    )
    gripper: Literal["as_is", "opening"] = Field(
        default="as_is",
        description="as_is: the last number of an action is taken as it is; opening: the model's is from 0 (closed) to"
        " 1 (open), and the environment takes -1 (open) or 1 (closed), as LIBERO does.",
    )
    temperature: Annotated[Float, Field(ge=1e-6)] = Field(
        default=1.0,
        description="What logits are divided by before actions are drawn, at least 1e-6; evaluations take the"
        " likeliest.",
    )
    value_gradient: Bool = Field(
        default=True,
        description="Let the loss of values train the layers below the value head, which actions come from, too.",
    )
    num_layers: Count = Field(
        default=2,
        description="The number of layers of the model that is built without `model_path`, in language and in vision.",
    )
    patch_size: Count = Field(default=8, description="Pixels by which that model divides images.")


class LerobotOptions(EnsembleOptions):
    """Options of `lerobot`."""

    type: Annotated[Text, Field(min_length=1)] = Field(
        default="act",
        description="lerobot's name of the policy that is built without `model_path`: act, diffusion, vqbet, ...; a"
        " folder names its own.",
    )
    config: dict[str, Data] = Field(
        default_factory=dict,
        description="Settings of lerobot's configuration of that type, by their names there, such as `{dim_model:"
        " 256}`.",
    )
    action_horizon: Count | None = Field(
        default=None,
        description="Actions that the policy predicts together, lerobot's `chunk_size` or `horizon`, of which the first"
        " `num_action_chunks` are carried out; null: as many as lerobot says for the type.",
    )
    cameras: dict[str, Text] = Field(
        default_factory=dict,
        description="The environment's camera for each image that the policy takes; by default the one of the same"
        " name.",
    )
    noise: Annotated[Float, Field(gt=0)] = Field(
        default=0.1,
        description="Standard deviation of what is added to the normalized actions of a policy that learns from"
        " rewards, at the beginning.",
    )
    statistics: Literal["folder", "none"] = Field(
        default="folder",
        description="The statistics by which states and actions are normalized. folder: those in `model_path`; none:"
        " none of these, but those of demonstrations, if there are some.",
    )


# lerobot types for which this package has a density of actions, so that rewards can train them.
RANDOM_LEROBOT: Final = ("act",)
# lerobot types whose actions are a function of noise alone, and the sampler that ensures it.
NOISE_LEROBOT: Final = ("diffusion",)
DETERMINISTIC_SCHEDULER: Final = "DDIM"
# Options by `model_type`; other types have none.
MODEL_OPTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "flow_policy": FlowOptions,
    "squashed_policy": SquashedOptions,
    "steered_policy": SteeredOptions,
    "pi0": Pi0Options,
    "pi05": Pi05Options,
    "smolvla": SmolVlaOptions,
    "openvla": OpenVlaOptions,
    "openvla_oft": OpenVlaOptions,
    "lerobot": LerobotOptions,
}
