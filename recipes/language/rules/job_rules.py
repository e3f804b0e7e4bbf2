"""Validation rules that all language recipes share, and facts for resuming."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Final

from recipes.language.answers.sequences import sampling_params
from recipes.language.config.described_models import ModelJobConfig
from recipes.language.config.language_config import OPTIONAL_COMPONENTS, LanguageConfig, check_minibatches
from recipes.language.rewards.scoring import PROGRAMS
from recipes.language.rules.algorithm_rules import check_algorithm
from recipes.language.rules.engine_rules import check_engine
from recipes.language.rules.judge_rules import check_judge
from recipes.language.rules.model_rules import check_model
from recipes.language.rules.problem_rules import check_data
from recipes.sections.checks import (
    Report,
    WorldSizes,
    check_sections,
)
from rlinf_core.config.sections.hub_names import on_any_machine
from rlinf_core.config.tree import Path
from rlinf_core.job.recipe import Trial

# The program that tests the sandbox.
SANDBOX_PROBE: Final = "recipes.language.sandbox.sandbox_probe"
_AT: Final[Path] = ("rollout", "sampling_params")
# vLLM raises lower temperatures to this value, or treats them as 0.
_LOWEST_TEMPERATURE: Final = 0.01
# The most likely token always has a larger probability, as no vocabulary has a million tokens.
_LEAST_SHARE: Final = 1e-6


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
    check_algorithm(config, report)
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
