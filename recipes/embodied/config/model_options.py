"""`actor.model.options` of the built-in policies. Validation needs neither torch nor models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=1)]
# How images become features.
ImageFeatures: TypeAlias = Literal["convolutions", "keypoints"]
CONVOLUTIONS: Final = "convolutions"


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FlowOptions(_Options):
    """Options of `flow_policy`.

    Attributes:
        steps: K, from noise to actions.
        noise: scale of what is drawn at each step while the policy acts; evaluations draw nothing.
        noisy_steps: all: noise at each step; one: at one of them, drawn for each observation (pi_RL, arXiv 2510.25889),
            so that training computes one velocity for a chunk, and not K.
        action_horizon: actions that are predicted together, of which the first `num_action_chunks` are carried out;
            None: these alone.
    """

    steps: _Count = 4
    noise: Annotated[float, Field(gt=0)] = 0.5
    noisy_steps: Literal["all", "one"] = "all"
    action_horizon: _Count | None = None


class SquashedOptions(_Options):
    """Options of `squashed_policy`.

    Attributes:
        num_layers: hidden layers of the policy.
        exploration_noise: standard deviation of the noise that is added to actions while training, as TD3 does; None:
            the policy learns it, as in SAC.
        images: convolutions: as `cnn_policy` encodes them; keypoints: the places of a few learned colours in each,
            for things that have a colour of their own. The critics encode images the same way, and their loss alone
            trains the encoder.
    """

    num_layers: _Count = 2
    exploration_noise: Annotated[float, Field(gt=0)] | None = None
    images: ImageFeatures = CONVOLUTIONS


class SteeredOptions(_Options):
    """Options of `steered_policy`.

    Attributes:
        policy: the policy in `model_path` that is steered, by keys of `actor.model`: `model_type`, `hidden_dim`,
            `options`; by default as a folder of `rlinf export` says.
        noise_bound: largest size of a number of the noise.
        repeats_noise: whether all actions of a chunk begin with the same noise, so that less of it is chosen.
        num_layers: hidden layers of the policy that chooses the noise.
    """

    policy: dict[str, Any] = Field(default_factory=dict)
    noise_bound: Annotated[float, Field(gt=0)] = 1.5
    repeats_noise: bool = False
    num_layers: _Count = 2


class FlowVlaOptions(_Options):
    """Options of the vision-language-action models by flow matching.

    Attributes:
        steps: K, from noise to actions; None: as many as the model's own configuration says.
        noise: scale of what is drawn at each step while the policy acts; evaluations draw nothing.
        noisy_steps: see `FlowOptions`.
        action_horizon: actions that the model predicts together, of which the first `num_action_chunks` are carried
            out; None: as many as the model in the folder learned, or `num_action_chunks` of one that is built. A model
            has to be fine-tuned to another number than it learned.
        prompt: the instruction as the model reads it; `{instruction}` stands for what the environment says.
        max_prompt_tokens: room for it, in tokens; shorter ones are padded.
        statistics: the statistics by which states and actions are normalized. folder: those that were saved with the
            model of another library, without which it is refused; none: none of these, but those of demonstrations, if
            there are some; or the path of openpi's `norm_stats.json` within the folder, where it has several.
        relative_actions: how many of the first numbers of an action the model predicts relative to those of the state,
            which are added: 6 of a pi0 that openpi trained on LIBERO with `extra_delta_transform`. Statistics are of
            the relative ones.
    """

    steps: _Count | None = None
    noise: Annotated[float, Field(gt=0)] = 0.5
    noisy_steps: Literal["all", "one"] = "all"
    action_horizon: _Count | None = None
    prompt: str = "{instruction}"
    max_prompt_tokens: _Count = 48
    statistics: Annotated[str, Field(min_length=1)] = "folder"
    relative_actions: Annotated[int, Field(ge=0)] = 0


class Pi0Options(FlowVlaOptions):
    """Options of `pi0`.

    Attributes:
        num_layers: the number of layers of the model that is built without `model_path`, in language, expert and
            vision.
        patch_size: pixels by which that model divides images.
    """

    num_layers: _Count = 2
    patch_size: _Count = 8


class Pi05Options(Pi0Options):
    """Options of `pi05`.

    Attributes:
        prompt: what the model reads. `{states}` stands for the normalized state, each number as one of 256 from -1 to
            1; without it the model knows of no state, as openpi trained `pi05_libero`: write `"{instruction}\\n"`.
        max_prompt_tokens: room for it, in tokens; shorter ones are padded.
    """

    prompt: str = "Task: {instruction}, State: {states};\nAction: "
    max_prompt_tokens: _Count = 200


class SmolVlaOptions(FlowVlaOptions):
    """Options of `smolvla`.

    Attributes:
        vlm_path: folder of HuggingFace with configuration and tokenizer of the vision-language model that a folder of
            lerobot names; None: that of the model which is built.
        num_layers: the number of layers of the model that is built without `model_path`, in language, expert and
            vision.
        patch_size: pixels by which that model divides images.
    """

    vlm_path: str | None = None
    num_layers: _Count = 2
    patch_size: _Count = 8


class OpenVlaOptions(_Options):
    """Options of `openvla` and `openvla_oft`.

    Attributes:
        prompt: what the model reads before the actions; `{instruction}` stands for what the environment says, in small
            letters.
        max_prompt_tokens: room for it, in tokens; shorter ones are padded.
        cameras: the environment's cameras that the model sees, in order; by default its first one.
        centre_crop: share of the image's area that is seen, of its middle: 0.9 for a model that was fine-tuned on
            images cropped at random, as the published ones of LIBERO.
        data_set: the data set whose statistics in the folder normalize actions; None: the only one.
        statistics: folder: those in `model_path`; none: none of these, but those of demonstrations, if there are some.
        gripper: as_is: the last number of an action is taken as it is; opening: the model's is from 0 (closed) to 1
            (open), and the environment takes -1 (open) or 1 (closed), as LIBERO does.
        temperature: what logits are divided by before actions are drawn, at least 1e-6; evaluations take the likeliest.
        value_gradient: let the loss of values train the layers below the value head, which actions come from, too.
        num_layers: the number of layers of the model that is built without `model_path`, in language and in vision.
        patch_size: pixels by which that model divides images.
    """

    prompt: str = "In: What action should the robot take to {instruction}?\nOut:"
    max_prompt_tokens: _Count = 64
    cameras: list[str] = Field(default_factory=list[str])
    centre_crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    data_set: str | None = None
    statistics: Literal["folder", "none"] = "folder"
    gripper: Literal["as_is", "opening"] = "as_is"
    temperature: Annotated[float, Field(ge=1e-6)] = 1.0
    value_gradient: bool = True
    num_layers: _Count = 2
    patch_size: _Count = 8


class LerobotOptions(_Options):
    """Options of `lerobot`.

    Attributes:
        type: lerobot's name of the policy that is built without `model_path`: act, diffusion, vqbet, ...; a folder
            names its own.
        config: settings of lerobot's configuration of that type, by their names there, such as `{dim_model: 256}`.
        action_horizon: actions that the policy predicts together, lerobot's `chunk_size` or `horizon`, of which the
            first `num_action_chunks` are carried out; None: as many as lerobot says for the type.
        cameras: the environment's camera for each image that the policy takes; by default the one of the same name.
        noise: standard deviation of what is added to the normalized actions of a policy that learns from rewards, at
            the beginning.
        statistics: the statistics by which states and actions are normalized. folder: those in `model_path`; none: none
            of these, but those of demonstrations, if there are some.
    """

    type: Annotated[str, Field(min_length=1)] = "act"
    config: dict[str, Any] = Field(default_factory=dict)
    action_horizon: _Count | None = None
    cameras: dict[str, str] = Field(default_factory=dict)
    noise: Annotated[float, Field(gt=0)] = 0.1
    statistics: Literal["folder", "none"] = "folder"


# Types of lerobot that have a density of actions here, which rewards train.
RANDOM_LEROBOT: Final = ("act",)
# Those whose actions come from noise alone, and the sampler with which they do.
NOISE_LEROBOT: Final = ("diffusion",)
DETERMINISTIC_SCHEDULER: Final = "DDIM"
# By `model_type`; the others of the recipe have none.
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
