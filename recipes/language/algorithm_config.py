"""`algorithm`, `critic` and `reference` of language models' recipes, and the rules between their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field, model_validator

from recipes.sections.algorithm import (
    ADVANTAGES,
    GROUP_ADVANTAGES,
    LOSSES,
    OTHER_ADVANTAGES,
    OTHER_LOSSES,
    AlgorithmConfig,
)
from recipes.sections.checks import Report, blame, is_given
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.values import (
    Count,
    Fraction,
    KnownOrOwn,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
)
from rlinf_core.scalars import Bool, Text

if TYPE_CHECKING:
    from recipes.language.config import LanguageConfig

VALUE_ADVANTAGES: Final = ("gae", "turn_gae")
_ADVANTAGES: Final = (*ADVANTAGES, "turn_gae")
_LOSSES: Final = (*LOSSES, "gspo", "decoupled_actor")
# Losses and keys that compare the policy before the update with the one that drew the tokens.
_PROXIMAL: Final = "the trainer's own log-probabilities before the update"


class LanguageAlgorithmConfig(AlgorithmConfig):
    """GRPO with a higher upper clip."""

    other_names: ClassVar[Mapping[str, str]] = {
        **AlgorithmConfig.other_names,
        "clip_ratio": "ratio_clip_eps",
        "cliprange": "ratio_clip_eps",
        "cliprange_value": "value_clip",
        "lam": "gae_lambda",
        "loss_mode": "loss_type",
        "tis_imp_ratio_cap": "tis_cap",
        "use_kl_in_reward": "kl_in_reward",
    }
    not_available: ClassVar[Mapping[str, str]] = {
        **{
            name: remedy
            for name, remedy in AlgorithmConfig.not_available.items()
            if name not in ("n_minibatches", "recompute_logprobs", "ratio_clip_eps", "clip_ratio", "use_kl_in_reward")
        },
        "norm_adv_by_std_in_grpo": "`adv_type: dr_grpo` compares without dividing by the standard deviation",
        "kl_ctrl": "`kl_beta` is the weight of the divergence; `kl_in_reward` says where it counts",
        "use_reinpp_baseline": "`adv_type: reinforce_pp_baseline` takes the mean of the group off",
        "use_kl_loss": "`kl_beta` above 0 adds the divergence to the loss",
    }

    adv_type: Annotated[Text, KnownOrOwn("adv_type", _ADVANTAGES, OTHER_ADVANTAGES)] = Field(
        default="grpo",
        description="How advantages are computed: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, or, with"
        " a group `critic`, gae or turn_gae; or `package.module:name`.",
    )
    loss_type: Annotated[Text, KnownOrOwn("loss_type", _LOSSES, OTHER_LOSSES)] = Field(
        default="actor",
        description="actor: clipped ratios of tokens; gspo: of sequences; decoupled_actor: weighted by the distance"
        " from the policy that drew the tokens; or `package.module:name`.",
    )
    group_size: Count = 8
    ratio_clip_eps: NonNegativeFloat | None = Field(
        default=None, description="Sets `clip_ratio_low` and `clip_ratio_high` to the same value."
    )
    clip_ratio_high: NonNegativeFloat = 0.28
    tis_cap: PositiveFloat | None = Field(
        default=None,
        description="Largest weight of a token by which samples of another engine or of older weights are corrected"
        " (truncated importance sampling); null: not corrected.",
    )
    n_minibatches: Count | None = Field(
        default=None, description="Optimizer steps of one pass over a training step's answers. Default: 1."
    )
    recompute_logprobs: Bool = Field(
        default=False, description="Take ratios against the trainer's own log-probabilities before the update."
    )
    kl_in_reward: Bool = Field(
        default=False, description="Take the divergence from the reference off the rewards, not into the loss."
    )
    gamma: Fraction = Field(default=1.0, description="Discount of rewards, by token; by turn with turn_gae.")
    gae_lambda: Fraction = Field(default=1.0, description="Decay of temporal differences in gae and turn_gae.")
    value_clip: PositiveFloat | None = Field(
        default=0.5, description="Largest change of a value in one training step, in units of return; null: none."
    )
    huber_delta: PositiveFloat = Field(
        default=10.0, description="Error of a value from which its loss grows linearly, in units of return."
    )
    filter_groups: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal, and generate others in their place (DAPO)."
    )
    max_refills: NonNegativeInt = Field(
        default=4, description="How often a step generates further groups for those that were dropped."
    )

    @model_validator(mode="before")
    @classmethod
    def _both_clips(cls, written: Any) -> Any:
        """Let `ratio_clip_eps` give the bounds that are not written themselves."""
        eps = written.get("ratio_clip_eps") if isinstance(written, dict) else None
        return written if eps is None else {"clip_ratio_low": eps, "clip_ratio_high": eps, **written}

    @property
    def needs_values(self) -> bool:
        """Whether the advantages are known to need a group `critic`."""
        return self.adv_type in VALUE_ADVANTAGES


def check_algorithm(config: LanguageConfig, report: Report) -> None:
    """Report settings of `algorithm` that contradict each other, or need a group that has no place."""
    algorithm = config.algorithm
    if algorithm.loss_type == "actor_critic":
        report(
            ("algorithm", "loss_type"),
            "conflicting-settings",
            "`loss_type: actor_critic` is for policies that estimate values themselves; here the group `critic` does",
            "write `loss_type: actor`, with `adv_type: gae` and a place for `critic`",
        )
    if algorithm.adv_type in GROUP_ADVANTAGES and algorithm.group_size < 2:
        report(
            blame(config, ("algorithm", "group_size"), ("algorithm", "adv_type")),
            "conflicting-settings",
            f"`adv_type: {algorithm.adv_type}` compares the members of a group, and each group has one",
            "write `algorithm.group_size: 8`",
        )
    eps = algorithm.ratio_clip_eps
    if eps is not None and (algorithm.clip_ratio_low, algorithm.clip_ratio_high) != (eps, eps):
        report(
            ("algorithm", "ratio_clip_eps"),
            "conflicting-settings",
            f"`ratio_clip_eps: {eps:g}` sets both bounds of the ratio, and `clip_ratio_low` or `clip_ratio_high` is"
            " given as well",
            "remove `ratio_clip_eps`, or the other",
        )
    _check_groups(config, report)
    _check_proximal(config, report)
    _check_without_effect(config, report)


def _check_groups(config: LanguageConfig, report: Report) -> None:
    """Report keys that need a group `critic` or `reference`, and such groups that no key needs."""
    algorithm, placed = config.algorithm, config.cluster.component_placement
    places = ("cluster", "component_placement")
    if algorithm.needs_values and "critic" not in placed:
        report(
            ("algorithm", "adv_type"),
            "missing-component",
            f"`adv_type: {algorithm.adv_type}` needs values, and the group `critic`, which estimates them, has no"
            " place",
            "add `critic: 0` to `cluster.component_placement`, or write `adv_type: grpo`",
        )
    if "critic" in placed and algorithm.adv_type in _ADVANTAGES and not algorithm.needs_values:
        report(
            (*places, "critic"),
            "unused-component",
            f"`adv_type: {algorithm.adv_type}` asks for no values: the group `critic` would have nothing to do",
            "write `algorithm.adv_type: gae`, or remove its place",
            about=[("algorithm", "adv_type")],
            severity=Severity.WARNING,
        )
    if algorithm.kl_beta and "reference" not in placed and config.actor.model.adapter() is None:
        report(
            ("algorithm", "kl_beta"),
            "missing-component",
            "`kl_beta` needs the log-probabilities of a reference model, and the group `reference` has no place",
            "add `reference: 0` to `cluster.component_placement`; with `actor.model.lora` the actor without its"
            " adapters is the reference",
        )
    if "reference" in placed and not algorithm.kl_beta:
        report(
            (*places, "reference"),
            "unused-component",
            "`algorithm.kl_beta` is 0: the group `reference` would have nothing to do",
            "write `algorithm.kl_beta: 0.001`, or remove its place",
            about=[("algorithm", "kl_beta")],
            severity=Severity.WARNING,
        )


def _check_proximal(config: LanguageConfig, report: Report) -> None:
    """Report corrections for other policies where ratios are taken against the one that drew the tokens."""
    algorithm = config.algorithm
    if algorithm.recompute_logprobs:
        return
    asked = {"tis_cap": algorithm.tis_cap is not None, "loss_type": algorithm.loss_type == "decoupled_actor"}
    for name, needs in asked.items():
        if needs:
            what = f"`{name}: {getattr(algorithm, name)}`"
            report(
                ("algorithm", name),
                "conflicting-settings",
                f"{what} compares the policy that drew the tokens with {_PROXIMAL}",
                "write `algorithm.recompute_logprobs: true`",
                about=[("algorithm", "recompute_logprobs")],
            )


def _check_without_effect(config: LanguageConfig, report: Report) -> None:
    """Warn of settings that change nothing, or not what their reader may expect."""
    algorithm = config.algorithm
    scaled = ("algorithm", "normalize_advantages")
    if algorithm.adv_type in GROUP_ADVANTAGES[:3] and is_given(config, scaled):
        instead = "write `adv_type: dr_grpo`" if algorithm.adv_type == "grpo" else "remove it"
        report(
            scaled,
            "conflicting-settings",
            f"`normalize_advantages` has no effect with `adv_type: {algorithm.adv_type}`, which compares within groups",
            f"{instead}{' to compare without dividing by the deviation' if algorithm.adv_type == 'grpo' else ''}",
            about=[("algorithm", "adv_type")],
            severity=Severity.WARNING,
        )
    if algorithm.kl_in_reward and not algorithm.kl_beta:
        report(
            ("algorithm", "kl_in_reward"),
            "conflicting-settings",
            "`kl_in_reward` has no effect while `kl_beta` is 0",
            "write `algorithm.kl_beta: 0.001`",
            about=[("algorithm", "kl_beta")],
        )
    if algorithm.loss_type == "gspo" and algorithm.loss_agg_func != "seq-mean-token-mean":
        report(
            blame(config, ("algorithm", "loss_agg_func"), ("algorithm", "loss_type")),
            "conflicting-settings",
            f"`loss_type: gspo` is a mean over sequences, and `loss_agg_func` is `{algorithm.loss_agg_func}`",
            "write `loss_agg_func: seq-mean-token-mean`; bounds of the ratio are about 3e-4 there",
            severity=Severity.WARNING,
        )
