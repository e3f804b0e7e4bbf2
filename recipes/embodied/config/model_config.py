"""`actor.model` of the embodied recipes: a policy, whose `model_type` chooses the keys that it has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import BaseModel, Field

from recipes.embodied.config.embodied_no_effect import SMALL_MODELS
from recipes.embodied.config.model_options import MODEL_OPTIONS
from recipes.sections.actor import AdaptedConfig, BareModelConfig
from recipes.sections.values import KnownOrOwn
from rlinf_core import Count
from rlinf_core.config.model import NoOptions, Variant, chosen, kind_of_section, one_of
from rlinf_core.scalars import Bool, Data, Text

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
