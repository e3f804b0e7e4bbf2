"""The section `algorithm` of language recipes; `algorithm_rules.py` has the rules between its values."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from recipes.language.config.algorithm_options import UNREAD_OPTIONS, AlgorithmOptions
from recipes.sections.algorithm import (
    ADVANTAGES,
    LOSSES,
    OTHER_ADVANTAGES,
    OTHER_LOSSES,
    AlgorithmConfig,
)
from recipes.sections.values import KnownOrOwn
from rlinf_core import Count, IgnoredKeys
from rlinf_core.config.model import Options
from rlinf_core.config.sections.values import NonNegativeFloat, NonNegativeInt
from rlinf_core.scalars import Bool, Text

VALUE_ADVANTAGES: Final = ("gae", "turn_gae")
DISTILLATION: Final = "distillation"
KNOWN_ADVANTAGES: Final = (*ADVANTAGES, "turn_gae", DISTILLATION)
LANGUAGE_LOSSES: Final = (*LOSSES, "gspo", "decoupled_actor", "gmpo", "cispo", "sapo")


class LanguageAlgorithmConfig(AlgorithmConfig):
    """GRPO with a higher upper clip."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *UNREAD_OPTIONS,
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
        return self.adv_type in VALUE_ADVANTAGES

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
