"""Validation rules that all language recipes share, among them those of `algorithm`, and facts for resuming."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Final

from recipes.language.answers.sequences import sampling_params
from recipes.language.config.described_models import ModelJobConfig
from recipes.language.config.language_config import OPTIONAL_COMPONENTS, LanguageConfig, check_minibatches
from recipes.language.config.language_no_effect import OPTIONAL
from recipes.language.rewards.scoring import PROGRAMS
from recipes.language.rules.engine_rules import check_engine, check_judge
from recipes.language.rules.model_rules import check_model
from recipes.language.rules.problem_rules import check_data
from recipes.sections.algorithm import GROUP_ADVANTAGES
from recipes.sections.checks import Report, WorldSizes, check_sections, place_entry
from recipes.sections.imports import check_own_algorithm
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.values import on_any_machine
from rlinf_core.config.tree import Path
from rlinf_core.job.recipe import Trial

# The program that tests the sandbox.
SANDBOX_PROBE: Final = "recipes.language.sandbox.sandbox"


_AT: Final[Path] = ("rollout", "sampling_params")


# vLLM raises lower temperatures to this value, or treats them as 0.
_LOWEST_TEMPERATURE: Final = 0.01


# The most likely token always has a larger probability, as no vocabulary has a million tokens.
_LEAST_SHARE: Final = 1e-6


# What some losses and keys compare the sampling policy with, for messages.
_PROXIMAL: Final = "the trainer's own log-probabilities before the update"


def check_job(
    config: LanguageConfig,
    components: Sequence[str],
    world_sizes: WorldSizes,
    report: Report,
    optional: Sequence[str] = OPTIONAL_COMPONENTS,
) -> None:
    """Report conflicts in a job's configuration.

    Args:
        config: the configuration.
        components: the components that the recipe always has.
        world_sizes: see `recipes.sections.checks`.
        report: receives the findings.
        optional: the components that the recipe may have.
    """
    check_sections(config, config.runner, facts(config), tuple(components), report, optional=tuple(optional))
    check_minibatches(config, report)
    check_data(config, report)
    check_model(config, report)
    check_engine(config, world_sizes, report)
    check_sampling(config, report)
    _check_algorithm(config, report)
    check_judge(config, report)


def trials(config: LanguageConfig) -> list[Trial]:
    """Return the checks of `rlinf doctor` on reward nodes: the sandbox of `reward_type: code`."""
    return [Trial("reward", "sandbox", SANDBOX_PROBE)] if config.reward.reward_type == PROGRAMS else []


def facts(config: ModelJobConfig) -> dict[str, str | int | float | bool | None]:
    """Return the settings that must match to resume from a checkpoint: all that determine weight shapes."""
    model = config.actor.model
    lora = model.adapter()
    return {
        "actor.model.model_path": on_any_machine(model.model_path),
        "actor.model.hidden_dim": model.hidden_dim,
        "actor.model.num_layers": model.num_layers,
        "actor.model.lora.rank": lora.rank if lora else None,
    }


def inputs(config: ModelJobConfig) -> list[FilePath]:
    """Return the files and folders that a run reads."""
    data, model = config.data, config.actor.model
    names = [*data.train_files, *data.val_data_paths, *filter(None, [model.model_path])]
    return [FilePath(name) for name in names]


def _check_algorithm(config: LanguageConfig, report: Report) -> None:
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


def check_sampling(config: LanguageConfig, report: Report) -> None:
    """Report invalid sampling settings, and in training settings that always give the same answer or never end one."""
    sampling = config.rollout.sampling_params
    try:
        sampling_params(config, sampling.temperature, seed=0)
    except ValueError as error:
        key = str(error).split("`")[1]
        place: Path = (*_AT, key, sampling.stop.index("")) if key == "stop" else (*_AT, key)
        report(place, "bad-value", str(error))
        return
    if config.runner.only_eval:
        return
    greedy = {
        "temperature": (sampling.temperature < _LOWEST_TEMPERATURE, sampling.temperature, "1"),
        "top_k": (sampling.top_k == 1, sampling.top_k, "-1"),
        "top_p": (sampling.top_p <= _LEAST_SHARE, sampling.top_p, "1"),
    }
    for key, (is_greedy, value, usual) in greedy.items():
        if is_greedy:
            report(
                (*_AT, key),
                "cannot-train",
                f"`{key}: {value:g}` always draws the most likely token: all answers to a prompt are equal, and"
                " training has nothing to compare",
                f"write `{key}: {usual}`; an evaluation with one answer to each problem is greedy by itself",
                about=[("runner", "only_eval")],
            )
    if sampling.min_new_tokens == sampling.max_new_tokens > 1:
        report(
            (*_AT, "min_new_tokens"),
            "cannot-train",
            f"`min_new_tokens: {sampling.min_new_tokens}` is `max_new_tokens`: no answer may end, every one is cut off",
            "remove it, or write a smaller number",
            about=[(*_AT, "max_new_tokens"), ("runner", "only_eval")],
        )


def check_lengths(config: LanguageConfig, report: Report, bound: str, further: str = "") -> None:
    """Report a prompt and an answer that do not fit into a sequence.

    Args:
        config: the job.
        report: receives the finding.
        bound: the description of `runner.seq_length` for the message.
        further: the end of the advice, about other contents of a sequence.
    """
    prompt, answer = config.data.max_prompt_length, config.rollout.sampling_params.max_new_tokens
    if prompt + answer <= config.runner.seq_length:
        return
    report.conflict(
        "runner.seq_length rollout.sampling_params.max_new_tokens data.max_prompt_length",
        f"max_prompt_length {prompt} + max_new_tokens {answer} = {prompt + answer} tokens exceed {bound}"
        f" {config.runner.seq_length}",
        f"raise `runner.seq_length` to {prompt + answer}{further}",
    )
