"""The section `algorithm` of language models' recipes; the rules between its values are in `algorithm_rules.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from recipes.sections.algorithm import (
    ADVANTAGES,
    LOSSES,
    OTHER_ADVANTAGES,
    OTHER_LOSSES,
    AlgorithmConfig,
)
from recipes.sections.values import KnownOrOwn
from rlinf_core import Count, Fraction, IgnoredKeys
from rlinf_core.config.sections.values import NonNegativeFloat, NonNegativeInt, PositiveFloat
from rlinf_core.scalars import Bool, Float, Text

VALUE_ADVANTAGES: Final = ("gae", "turn_gae")
DISTILLATION: Final = "distillation"
KNOWN_ADVANTAGES: Final = (*ADVANTAGES, "turn_gae", DISTILLATION)
# Losses of language models without PPO's clip: none has a dual clip, and the last has no bounds at all.
UNCLIPPED_LOSSES: Final = ("gmpo", "cispo", "sapo")
LANGUAGE_LOSSES: Final = (*LOSSES, "gspo", "decoupled_actor", *UNCLIPPED_LOSSES)

_ESTIMATORS: Final = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _estimator(value: Any) -> Any:
    return _ESTIMATORS.get(value, value) if isinstance(value, str) else value


KlEstimator = Annotated[
    Literal["k1", "k2", "k3"],
    BeforeValidator(_estimator),
    WithJsonSchema({"enum": ["k1", "k2", "k3", *_ESTIMATORS]}),
]


class LanguageAlgorithmConfig(AlgorithmConfig):
    """GRPO with a higher upper clip."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("clip_ratio_c",),
            lambda algorithm, sizes: algorithm.loss_type in UNCLIPPED_LOSSES,
            "the loss has no dual clip",
            "remove it",
            because=("loss_type",),
        ),
        IgnoredKeys(
            ("clip_ratio_low", "clip_ratio_high"),
            lambda algorithm, sizes: algorithm.loss_type == "sapo",
            "`loss_type: sapo` has a soft gate in the place of a clip",
            "remove it, or write `tau_pos` and `tau_neg`",
            because=("loss_type",),
        ),
        IgnoredKeys(
            ("tau_pos", "tau_neg"),
            lambda algorithm, sizes: algorithm.loss_type != "sapo",
            "the loss has no soft gate",
            "remove it, or write `loss_type: sapo`",
            because=("loss_type",),
        ),
        IgnoredKeys(
            ("kl_penalty", "kl_in_reward"),
            lambda algorithm, sizes: not algorithm.kl_beta,
            "the KL weight, `kl_beta`, is 0",
            "remove it, or write `kl_beta: 0.001`",
            because=("kl_beta",),
        ),
        IgnoredKeys(
            ("correction_level",),
            lambda algorithm, sizes: not algorithm.corrects,
            "no ratio of another policy is corrected for",
            "remove it, or write `tis_cap: 2`",
            because=("tis_cap", "reject_ratio_high"),
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
    group_size: Count = 8
    clip_ratio_high: NonNegativeFloat = 0.28
    tau_pos: PositiveFloat = Field(
        default=1.0, description="sapo: how fast gradients of positive advantages fade as the ratio leaves 1."
    )
    tau_neg: PositiveFloat = Field(default=1.05, description="sapo: the same for negative advantages.")
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
    n_minibatches: Count | None = Field(
        default=None, description="Optimizer steps in one pass over a training step's answers. Default: 1."
    )
    recompute_logprobs: Bool = Field(
        default=False, description="Compute ratios against the trainer's own log-probabilities before the update."
    )
    kl_beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL divergence from the reference model; 0: no reference is loaded."
    )
    kl_penalty: KlEstimator = Field(
        default="k3", description="Estimator of the KL divergence: k1 (or kl), k2 (or mse), k3 (or low_var_kl)."
    )
    kl_in_reward: Bool = Field(
        default=False, description="Subtract the KL penalty from the rewards instead of adding it to the loss."
    )
    gamma: Fraction = Field(default=1.0, description="Discount factor of rewards, per token; per turn with turn_gae.")
    gae_lambda: Fraction = Field(default=1.0, description="Lambda of gae and turn_gae.")
    clip_ratio_c: Annotated[Float, Field(gt=1)] | None = Field(
        default=3.0, description="Dual clip: bound of the ratio for negative advantages; null: none."
    )
    value_clip: PositiveFloat | None = Field(
        default=0.5,
        description="Value clipping: largest change of a value in one training step, in units of return; null: none.",
    )
    filter_groups: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal and generate replacements (DAPO)."
    )
    max_refills: NonNegativeInt = Field(default=4, description="Maximum rounds of replacement groups per step.")

    @property
    def needs_values(self) -> bool:
        """Whether the advantages are known to need a group `critic`."""
        return self.adv_type in VALUE_ADVANTAGES

    @property
    def corrects(self) -> bool:
        """Whether samples are weighted, or left out, for the policy that drew them."""
        limits = (self.tis_cap, self.reject_ratio_low, self.reject_ratio_high)
        return self.loss_type == "decoupled_actor" or any(limit is not None for limit in limits)

    @property
    def needs_teacher(self) -> bool:
        """Whether the advantages are the divergence from a group `teacher`."""
        return self.adv_type == DISTILLATION

    @property
    def wants_values(self) -> bool:
        """Whether the advantages may use values, as a user's own function may."""
        return self.needs_values or self.adv_type not in KNOWN_ADVANTAGES
