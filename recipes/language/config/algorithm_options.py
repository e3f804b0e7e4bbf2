"""`algorithm.options` of the built-in advantages and losses of language models. Validation needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from recipes.sections.values import unread_options
from rlinf_core import ConfigModel, Fraction
from rlinf_core.config.model import NoOptions
from rlinf_core.config.sections.values import PositiveFloat
from rlinf_core.scalars import Bool, Float

_ESTIMATORS: Final = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _estimator(value: Any) -> Any:
    return _ESTIMATORS.get(value, value) if isinstance(value, str) else value


KlEstimator = Annotated[
    Literal["k1", "k2", "k3"],
    BeforeValidator(_estimator),
    WithJsonSchema({"enum": ["k1", "k2", "k3", *_ESTIMATORS]}),
]


class NormalizedOptions(ConfigModel):
    """Options of `distillation`."""

    normalize_advantages: Bool = Field(
        default=True,
        description="Normalize the advantages of a step to mean 0 and standard deviation 1; of `distillation` to mean"
        " 0.",
    )


class DiscountedOptions(NormalizedOptions):
    """Options of `reinforce_pp` and `reinforce_pp_baseline`."""

    gamma: Fraction = Field(default=1.0, description="Discount factor of rewards, per token; per turn with turn_gae.")


class ValueOptions(DiscountedOptions):
    """Options of `gae` and `turn_gae`."""

    gae_lambda: Fraction = Field(default=1.0, description="Lambda of gae and turn_gae.")
    value_clip: PositiveFloat | None = Field(
        default=0.5,
        description="Value clipping: largest change of a value in one training step, in units of return; null: none.",
    )


class LossOptions(ConfigModel):
    """Options of every loss."""

    kl_penalty: KlEstimator = Field(
        default="k3",
        description="Estimator of the KL divergence of `kl_beta`: k1 (or kl), k2 (or mse), k3 (or low_var_kl).",
    )
    kl_in_reward: Bool = Field(
        default=False, description="Subtract the KL penalty from the rewards instead of adding it to the loss."
    )
    tis_cap: PositiveFloat | None = Field(
        default=None,
        description="Upper bound of the token weights that correct for another engine or older weights (truncated"
        " importance sampling); null: no correction.",
    )
    correction_level: Literal["token", "sequence"] = Field(
        default="token",
        description="Unit of the ratios of `tis_cap` and of rejection: token, or sequence, the product over its tokens"
        " (for rejection, their geometric mean).",
    )
    reject_ratio_low: PositiveFloat | None = Field(
        default=None,
        description="Lower bound of the ratio of the probability before the update to that when sampled; tokens (or"
        " answers, with `correction_level: sequence`) below it are not trained on. null: none.",
    )
    reject_ratio_high: PositiveFloat | None = Field(
        default=None,
        description="Upper bound of the same ratio, such as 2, for samples that are too stale; null: none.",
    )


class ClippedOptions(LossOptions):
    """Options of losses with PPO's clip."""

    clip_ratio_c: Annotated[Float, Field(gt=1)] | None = Field(
        default=3.0, description="Dual clip: bound of the ratio for negative advantages; null: none."
    )


class GatedOptions(LossOptions):
    """Options of `sapo`."""

    tau_pos: PositiveFloat = Field(
        default=1.0, description="How fast gradients of positive advantages fade as the ratio leaves 1."
    )
    tau_neg: PositiveFloat = Field(default=1.05, description="The same for negative advantages.")


class AlgorithmOptions(ValueOptions, ClippedOptions, GatedOptions, extra="allow"):
    """All options of built-in advantages and losses. Those of a component of your own may have any name."""


ADVANTAGE_OPTIONS: Final[Mapping[str, type[ConfigModel]]] = {
    "gae": ValueOptions,
    "turn_gae": ValueOptions,
    **dict.fromkeys(("grpo", "dr_grpo", "rloo"), NoOptions),
    "reinforce_pp": DiscountedOptions,
    "reinforce_pp_baseline": DiscountedOptions,
    "distillation": NormalizedOptions,
}
LOSS_OPTIONS: Final[Mapping[str, type[ConfigModel]]] = {
    **dict.fromkeys(("actor", "gspo", "decoupled_actor"), ClippedOptions),
    **dict.fromkeys(("gmpo", "cispo"), LossOptions),
    "sapo": GatedOptions,
}
UNREAD_OPTIONS: Final = (
    *unread_options("options", "adv_type", ADVANTAGE_OPTIONS),
    *unread_options("options", "loss_type", LOSS_OPTIONS),
)
