"""The section `algorithm` of language recipes; `job_rules.py` has the rules between its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from recipes.sections.algorithm import (
    ADVANTAGES,
    LOSSES,
    OTHER_ADVANTAGES,
    OTHER_LOSSES,
    AlgorithmConfig,
)
from recipes.sections.values import KnownOrOwn, unread_options
from rlinf_core import ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.config.model import NoOptions, Options
from rlinf_core.config.sections.values import NonNegativeFloat, NonNegativeInt, PositiveFloat
from rlinf_core.scalars import Bool, Float, Text

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
_UNREAD_OPTIONS: Final = (
    *unread_options("options", "adv_type", ADVANTAGE_OPTIONS),
    *unread_options("options", "loss_type", LOSS_OPTIONS),
)


_VALUE_ADVANTAGES: Final = ("gae", "turn_gae")
DISTILLATION: Final = "distillation"
KNOWN_ADVANTAGES: Final = (*ADVANTAGES, "turn_gae", DISTILLATION)
LANGUAGE_LOSSES: Final = (*LOSSES, "gspo", "decoupled_actor", "gmpo", "cispo", "sapo")


class LanguageAlgorithmConfig(AlgorithmConfig):
    """GRPO with a higher upper clip."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *_UNREAD_OPTIONS,
        IgnoredKeys(
            ("clip_ratio_low", "clip_ratio_high"),
            lambda algorithm, sizes: algorithm.loss_type == "sapo",
            "`loss_type: sapo` has a soft gate in the place of a clip",
            "remove it, or write `tau_pos` and `tau_neg` into `options`",
            because=("loss_type",),
        ),
        IgnoredKeys(
            ("options.kl_penalty", "options.kl_in_reward"),
            lambda algorithm, sizes: not algorithm.kl_beta,
            "the KL weight, `kl_beta`, is 0",
            "remove it, or write `kl_beta: 0.001`",
            because=("kl_beta",),
        ),
        IgnoredKeys(
            ("options.correction_level",),
            lambda algorithm, sizes: not algorithm.corrects,
            "no ratio of another policy is corrected for",
            "remove it, or write `tis_cap: 2`",
            because=("options.tis_cap", "options.reject_ratio_high"),
        ),
        IgnoredKeys(
            ("max_refills",),
            lambda algorithm, sizes: not algorithm.filter_groups,
            "no groups are dropped: `filter_groups` is false",
            "remove it, or write `filter_groups: true`",
            because=("filter_groups",),
        ),
    )

    adv_type: Annotated[Text, KnownOrOwn("adv_type", KNOWN_ADVANTAGES, OTHER_ADVANTAGES)] = Field(
        default="grpo",
        description="Advantage estimator: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline; with a group"
        " `critic`, gae or turn_gae; with a group `teacher`, distillation; or `package.module:name`.",
    )
    loss_type: Annotated[Text, KnownOrOwn("loss_type", LANGUAGE_LOSSES, {**OTHER_LOSSES, "geo_mean": "gmpo"})] = Field(
        default="actor",
        description="Loss. actor: clipped token ratios; gspo: clipped sequence ratios; decoupled_actor: weighted by"
        " the distance from the policy that sampled the tokens; gmpo: geometric mean of clipped ratios; cispo: clipped"
        " ratios as weights; sapo: a soft gate in the place of the clip; or `package.module:name`.",
    )
    options: Options[AlgorithmOptions] = Field(
        default_factory=dict[str, Any],
        description="Parameters of the advantage or the loss, by name (docs/reference/options.md): gamma, gae_lambda,"
        " clip_ratio_c, tau_pos, tis_cap and others; of a custom one those that its pydantic model, if any, validates.",
    )
    group_size: Count = 8
    clip_ratio_high: NonNegativeFloat = 0.28
    n_minibatches: Count | None = Field(
        default=None, description="Optimizer steps in one pass over a training step's answers. Default: 1."
    )
    recompute_logprobs: Bool = Field(
        default=False, description="Compute ratios against the trainer's own log-probabilities before the update."
    )
    kl_beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL divergence from the reference model; 0: no reference is loaded."
    )
    filter_groups: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal and generate replacements (DAPO)."
    )
    max_refills: NonNegativeInt = Field(default=4, description="Maximum rounds of replacement groups per step.")

    built_in: ClassVar[type[AlgorithmOptions]] = AlgorithmOptions

    @property
    def settings(self) -> AlgorithmOptions:
        return self.built_in.model_validate(self.options)

    @property
    def needs_values(self) -> bool:
        """Whether the advantages need a group `critic`."""
        return self.adv_type in _VALUE_ADVANTAGES

    @property
    def corrects(self) -> bool:
        """Whether samples are weighted or rejected to correct for the policy that drew them."""
        options = self.settings
        limits = (options.tis_cap, options.reject_ratio_low, options.reject_ratio_high)
        return self.loss_type == "decoupled_actor" or any(limit is not None for limit in limits)

    @property
    def needs_teacher(self) -> bool:
        """Whether the advantages need a group `teacher`."""
        return self.adv_type == DISTILLATION

    @property
    def wants_values(self) -> bool:
        """Whether the advantages may use values: a custom function may, too."""
        return self.needs_values or self.adv_type not in KNOWN_ADVANTAGES
