"""The rules between the values of `algorithm`, `critic` and `reference` of language models' recipes."""

from __future__ import annotations

from typing import Final

from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.language_no_effect import OPTIONAL
from recipes.sections.algorithm import GROUP_ADVANTAGES
from recipes.sections.checks import Report, blame, place_entry
from recipes.sections.imports import check_own_algorithm
from rlinf_core.config.diagnostics import Severity

# What losses and keys compare with the policy that drew the tokens.
_PROXIMAL: Final = "the trainer's own log-probabilities before the update"


def check_algorithm(config: LanguageConfig, report: Report) -> None:
    """Report settings of `algorithm` that contradict each other, or need a group that has no place."""
    algorithm = config.algorithm
    check_own_algorithm(config, algorithm.adv_type, algorithm.loss_type, report)
    if algorithm.loss_type == "actor_critic":
        report(
            ("algorithm", "loss_type"),
            "conflicting-settings",
            "`loss_type: actor_critic` is for policies with a value head; here the group `critic` estimates values",
            "write `loss_type: actor`, with `adv_type: gae` and a placement for `critic`",
        )
    if algorithm.adv_type in GROUP_ADVANTAGES and algorithm.group_size < 2:
        report(
            blame(config, ("algorithm", "group_size"), ("algorithm", "adv_type")),
            "conflicting-settings",
            f"`adv_type: {algorithm.adv_type}` compares the members of a group, but every group has one",
            "write `algorithm.group_size: 8`",
        )
    _check_components(config, report)
    _check_teacher(config, report)
    _check_proximal(config, report)
    _check_aggregation(config, report)


def _check_components(config: LanguageConfig, report: Report) -> None:
    """Report optional components that a value needs and that have no place, and those that no value asks for."""
    for name, component in OPTIONAL.items():
        section, key, _ = component.key
        if name in config.cluster.component_placement:
            why = component.unneeded(config)
            if why:
                report(
                    ("cluster", "component_placement", name),
                    "unused-component",
                    f"{why}: the group `{name}` would be idle",
                    f"write `{component.setting}`, or remove its placement",
                    about=[(section, key)],
                    severity=Severity.WARNING,
                )
        elif component.needed(config):
            report(
                (section, key),
                "missing-component",
                f"`{key}: {getattr(getattr(config, section), key)}` needs the group `{name}`, {component.does}, and it"
                " has no placement",
                f"add {place_entry(config.cluster, name)} to `cluster.component_placement`{component.also}",
            )


def _check_teacher(config: LanguageConfig, report: Report) -> None:
    """Report a teacher that has nothing to teach, and keys that contradict distillation."""
    algorithm, at = config.algorithm, ("algorithm", "adv_type")
    if not algorithm.needs_teacher:
        return
    if config.actor.model.model_path is not None and config.teacher.model_path is None:
        report(
            blame(config, ("teacher", "model_path"), at),
            "conflicting-settings",
            "there is no `teacher.model_path`: a teacher built from scratch has nothing to teach a pretrained model",
            "write `teacher.model_path: FOLDER`",
        )
    contradicts = {
        "kl_in_reward": (algorithm.kl_beta > 0 and algorithm.kl_in_reward, "write `kl_in_reward: false`"),
        "filter_groups": (algorithm.filter_groups, "write `filter_groups: false`"),
    }
    for name, (is_asked, help) in contradicts.items():
        if is_asked:
            report(
                ("algorithm", name),
                "conflicting-settings",
                f"`{name}` is about rewards, and `adv_type: distillation` learns from the teacher alone",
                help,
                about=[at],
            )


def _check_proximal(config: LanguageConfig, report: Report) -> None:
    """Report corrections for other policies where ratios are taken against the one that drew the tokens, and bounds of
    which nothing is left."""
    algorithm = config.algorithm
    low, high = algorithm.reject_ratio_low, algorithm.reject_ratio_high
    if low is not None and high is not None and low >= high:
        report(
            ("algorithm", "reject_ratio_low"),
            "conflicting-settings",
            f"`reject_ratio_low: {low:g}` is not below `reject_ratio_high: {high:g}`: nothing would be trained on",
            "write `reject_ratio_low: 0.5` and `reject_ratio_high: 2`",
            about=[("algorithm", "reject_ratio_high")],
        )
    if algorithm.recompute_logprobs:
        return
    asked = {
        name: getattr(algorithm, name) is not None for name in ("tis_cap", "reject_ratio_low", "reject_ratio_high")
    }
    asked["loss_type"] = algorithm.loss_type == "decoupled_actor"
    for name, needs in asked.items():
        if needs:
            what = f"`{name}: {getattr(algorithm, name)}`"
            report(
                ("algorithm", name),
                "conflicting-settings",
                f"{what} compares the policy that sampled the tokens with {_PROXIMAL}",
                "write `algorithm.recompute_logprobs: true`",
                about=[("algorithm", "recompute_logprobs")],
            )


def _check_aggregation(config: LanguageConfig, report: Report) -> None:
    """Warn of a sequence-level ratio whose losses are not averaged over sequences."""
    algorithm = config.algorithm
    bounds = "3e-4" if algorithm.loss_type == "gspo" else "0.4"
    if algorithm.loss_type in ("gspo", "gmpo") and algorithm.loss_agg_func != "seq-mean-token-mean":
        report(
            blame(config, ("algorithm", "loss_agg_func"), ("algorithm", "loss_type")),
            "conflicting-settings",
            f"`loss_type: {algorithm.loss_type}` averages over sequences, but `loss_agg_func` is"
            f" `{algorithm.loss_agg_func}`",
            f"write `loss_agg_func: seq-mean-token-mean`; clip bounds are about {bounds} there",
            severity=Severity.WARNING,
        )
