"""Validation rules for the sections `algorithm`, `critic`, `reference` and `teacher` of language recipes."""

from __future__ import annotations

from typing import Final

from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.language_no_effect import OPTIONAL
from recipes.sections.algorithm import GROUP_ADVANTAGES
from recipes.sections.checks import Report, place_entry
from recipes.sections.imports import check_own_algorithm
from rlinf_core.config.diagnostics import Severity

# What some losses and keys compare the sampling policy with, for messages.
_PROXIMAL: Final = "the trainer's own log-probabilities before the update"


def check_algorithm(config: LanguageConfig, report: Report) -> None:
    """Report settings of `algorithm` that contradict each other, or need a group without placement."""
    algorithm = config.algorithm
    check_own_algorithm(config, algorithm.adv_type, algorithm.loss_type, report)
    if algorithm.loss_type == "actor_critic":
        report.conflict(
            "algorithm.loss_type",
            "`loss_type: actor_critic` is for policies with a value head; here the group `critic` estimates values",
            "write `loss_type: actor`, with `adv_type: gae` and a placement for `critic`",
        )
    compares = algorithm.adv_type in GROUP_ADVANTAGES
    if (compares or algorithm.filter_groups) and algorithm.group_size < 2:
        key, value = ("adv_type", algorithm.adv_type) if compares else ("filter_groups", "true")
        report.conflict(
            f"algorithm.group_size algorithm.{key}",
            f"`{key}: {value}` compares the members of a group, but every group has one",
            "write `algorithm.group_size: 8`",
        )
    _check_components(config, report)
    _check_teacher(config, report)
    _check_proximal(config, report)
    _check_aggregation(config, report)


def _check_components(config: LanguageConfig, report: Report) -> None:
    """Report optional components that are needed but not placed, or placed but not needed."""
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
    """Report a useless teacher, and keys that contradict distillation."""
    algorithm = config.algorithm
    if not algorithm.needs_teacher:
        return
    if config.actor.model.model_path is not None and config.teacher.model_path is None:
        report.conflict(
            "teacher.model_path algorithm.adv_type",
            "there is no `teacher.model_path`: a teacher built from scratch has nothing to teach a pretrained model",
            "write `teacher.model_path: FOLDER`",
        )
    contradicts = {
        "options.kl_in_reward": algorithm.kl_beta > 0 and algorithm.settings.kl_in_reward,
        "filter_groups": algorithm.filter_groups,
    }
    for key, is_asked in contradicts.items():
        if is_asked:
            name = key.rpartition(".")[2]
            report.conflict(
                f"algorithm.{key}",
                f"`{name}` is about rewards, and `adv_type: distillation` learns from the teacher alone",
                f"write `{name}: false`",
                about="algorithm.adv_type",
            )


def _check_proximal(config: LanguageConfig, report: Report) -> None:
    """Report off-policy corrections without recomputed log-probabilities, and rejection bounds that exclude 1."""
    algorithm, options = config.algorithm, config.algorithm.settings
    low, high = options.reject_ratio_low, options.reject_ratio_high
    for name, bound, rejects in (
        ("reject_ratio_low", low, low is not None and low >= 1),
        ("reject_ratio_high", high, high is not None and high <= 1),
    ):
        if rejects:
            report.conflict(
                f"algorithm.options.{name}",
                f"`{name}: {bound:g}` rejects samples of the weights before the update themselves, whose ratio is 1",
                "write `reject_ratio_low: 0.5` and `reject_ratio_high: 2`",
            )
    if algorithm.recompute_logprobs:
        return
    asked: dict[str, object] = {
        "options.tis_cap": options.tis_cap,
        "options.reject_ratio_low": low,
        "options.reject_ratio_high": high,
        "loss_type": algorithm.loss_type if algorithm.loss_type == "decoupled_actor" else None,
    }
    for key, value in asked.items():
        if value is not None:
            report.conflict(
                f"algorithm.{key}",
                f"`{key.rpartition('.')[2]}: {value}` compares the policy that sampled the tokens with {_PROXIMAL}",
                "write `algorithm.recompute_logprobs: true`",
                about="algorithm.recompute_logprobs",
            )


def _check_aggregation(config: LanguageConfig, report: Report) -> None:
    """Warn of a sequence-level ratio whose losses are not averaged over sequences."""
    algorithm = config.algorithm
    bounds = "3e-4" if algorithm.loss_type == "gspo" else "0.4"
    if algorithm.loss_type in ("gspo", "gmpo") and algorithm.loss_agg_func != "seq-mean-token-mean":
        report.conflict(
            "algorithm.loss_agg_func algorithm.loss_type",
            f"`loss_type: {algorithm.loss_type}` averages over sequences, but `loss_agg_func` is"
            f" `{algorithm.loss_agg_func}`",
            f"write `loss_agg_func: seq-mean-token-mean`; clip bounds are about {bounds} there",
            severity=Severity.WARNING,
        )
