"""`actor.model` of the embodied recipes: a policy, whose `model_type` chooses the keys that it has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BaseModel, Field

from recipes.embodied.config.embodied_no_effect import SMALL_MODELS
from recipes.sections.actor import AdaptedConfig, BareModelConfig
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel, Count
from rlinf_core.config.model import NoOptions, Variant, chosen, kind_of_section, one_of
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


_LOGGER = logging.getLogger(__name__)
MODEL_TYPES = (*SMALL_MODELS, "openvla", "openvla_oft", "pi0", "pi05", "smolvla", "lerobot")
_PI0 = "write `pi0` or `pi05`: they load folders of HuggingFace, lerobot and openpi's PyTorch (docs/models.md)"
# Names of models in related projects, each with advice on what to write instead.
OTHER_MODELS = {
    "openvla-oft": "write `openvla_oft`",
    **dict.fromkeys(("openpi", "pi0_5", "pi0.5"), _PI0),
    "vlm_policy": "write `openvla`, or `openvla_oft`, which reads a chunk in one pass: both spell actions as tokens",
    "gr00t": "write `pi0` or `smolvla`, which also use flow matching; its own weights cannot be loaded",
}


ModelType = Annotated[Text, KnownOrOwn("model_type", MODEL_TYPES, instead=OTHER_MODELS)]


class EmbodiedModelConfig(Variant, BareModelConfig):
    """The policy."""

    chosen_by: ClassVar[str] = "model_type"

    model_type: ModelType = Field(
        default="mlp_policy",
        description="Policy: mlp_policy (states), cnn_policy (images), flow_policy (both, by flow matching),"
        " squashed_policy (either, for SAC and TD3), steered_policy (a trained one by diffusion or flow, for DSRL),"
        " openvla, openvla_oft, pi0, pi05 and smolvla (images and an instruction), lerobot (ACT,"
        " diffusion and other policies of lerobot), or `package.module:Class`, a subclass of BasePolicy.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="The keys of this kind alone (docs/models.md); of your own policy its `options_model`, a pydantic"
        " model, validates them.",
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


_LACKING: Final = {
    **dict.fromkeys(SMALL_MODELS, "its layers are so small that all of them are trained"),
    "lerobot": "lerobot's policies are trained as they are",
}
# Policies that low-rank adapters can train.
_ADAPTED: Final = ("openvla", "openvla_oft", "pi0", "pi05", "smolvla")


def _kinds() -> tuple[type[EmbodiedModelConfig], ...]:
    """Return a section for each model of options, and one for custom policies, which may read any key."""
    by_keys: dict[tuple[type[BaseModel], bool], list[str]] = {}
    for name in MODEL_TYPES:
        by_keys.setdefault((MODEL_OPTIONS.get(name, NoOptions), name in _ADAPTED), []).append(name)
    kinds = [
        kind_of_section(EmbodiedModelConfig, tuple(names), options, mixins=(AdaptedConfig,) if adapted else ())
        for (options, adapted), names in by_keys.items()
    ]
    for kind in kinds:
        if (why := _LACKING.get(kind.names()[0])) is not None:
            kind.lacking = dict.fromkeys(AdaptedConfig.model_fields.keys() - kind.model_fields.keys(), why)
    others = ("package.module:Class",)
    own = kind_of_section(EmbodiedModelConfig, (), None, mixins=(AdaptedConfig,), form="[^:]*:.*", others=others)
    return (*kinds, own)


POLICY_MODELS: Final = _kinds()
if TYPE_CHECKING:
    PolicyModel: TypeAlias = EmbodiedModelConfig
else:
    PolicyModel = one_of(POLICY_MODELS)


def _with_lora(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with `lora` in the place of the switch and the rank of earlier versions."""
    now = {key: value for key, value in written.items() if key not in ("is_lora", "lora_rank")}
    if written.get("is_lora") and not now.get("lora"):
        rank = written.get("lora_rank", 32)
        now["lora"] = {"rank": rank, "alpha": 2.0 * rank}
    return now


def policy_model(
    written: Mapping[str, Any], saved: Mapping[str, Any] | None = None, file: str = ""
) -> EmbodiedModelConfig:
    """Return the section of a policy from plain data.

    Keys of other kinds of model are dropped if they have the default value: earlier versions wrote them all. In a
    folder they had no effect, and are dropped with a warning, whatever their value.

    Args:
        written: the settings by a person or by code.
        saved: the settings in a folder, used where `written` has none.
        file: the file of the folder's settings.

    Raises:
        ValidationError: a key or its value is wrong.
    """
    written, saved = _with_lora(written), _with_lora(saved or {})
    values = {**saved, **written}
    kind = chosen(POLICY_MODELS, values)

    def is_kept(key: str, value: Any) -> bool:
        owners = [other for other in POLICY_MODELS if key in other.model_fields]
        if kind in owners or not owners:
            return True
        if any(owner.model_fields[key].get_default(call_default_factory=True) == value for owner in owners):
            return False
        if key not in written:
            called = values.get(kind.chosen_by)
            _LOGGER.warning("%s: `%s` is left out: it has no effect with `model_type: %s`", file, key, called)
        return key in written

    return kind.model_validate({key: value for key, value in values.items() if is_kept(key, value)})
