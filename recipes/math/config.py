"""The file of the math recipe: its sections, its defaults, and the rules between its values.

The defaults build a Qwen2 of 0.3 M parameters, show it sums for a second, and improve it by GRPO in about half a minute
on two CPU cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from recipes.language.algorithm_rules import check_algorithm
from recipes.language.config import LanguageConfig, LanguageRunnerConfig, check_minibatches
from recipes.language.data_rules import check_data
from recipes.language.engine_rules import check_engine
from recipes.language.model_rules import check_model
from recipes.sections.checks import (
    Report,
    WorldSizes,
    blame,
    check_components,
    check_folders,
    check_fsdp,
    check_group_names,
    check_half_precision,
    check_loggers,
)
from rlinf_core.config.sections.values import StepsOrNever

COMPONENTS = ("actor", "rollout", "reward")
# Placed where the algorithm asks for them.
OPTIONAL_COMPONENTS = ("critic", "reference")


class MathRunnerConfig(LanguageRunnerConfig):
    """The run as a whole."""

    task_type: Literal["math", "reasoning"] = Field(
        default="math", description="Kind of job; `reasoning` is another word for it."
    )
    max_steps: StepsOrNever = 250


class MathConfig(LanguageConfig):
    """The whole file."""

    runner: MathRunnerConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
        default_factory=MathRunnerConfig, description="How long the run lasts, what it keeps, where results go."
    )


def check(config: MathConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report what does not fit together in a file of this recipe."""
    check_components(config.cluster, config.recipe, COMPONENTS, report, OPTIONAL_COMPONENTS)
    names = {
        "actor": config.actor.group_name,
        "rollout": config.rollout.group_name,
        "reward": config.reward.group_name,
        "critic": config.critic.group_name,
        "reference": config.reference.group_name,
    }
    check_group_names(config, names, report)
    check_fsdp(config.actor.fsdp_config, report)
    check_half_precision(config, ("actor", "critic"), report)
    check_loggers(config.runner, report)
    check_folders(config.runner, report)
    check_minibatches(config, report)
    check_data(config, report)
    check_model(config, report)
    check_engine(config, world_sizes, report)
    check_algorithm(config, report)
    _check_lengths(config, report)


def _check_lengths(config: MathConfig, report: Report) -> None:
    prompt, answer = config.data.max_prompt_length, config.rollout.sampling_params.max_new_tokens
    if prompt + answer <= config.runner.seq_length:
        return
    report(
        blame(
            config,
            ("runner", "seq_length"),
            ("rollout", "sampling_params", "max_new_tokens"),
            ("data", "max_prompt_length"),
        ),
        "conflicting-settings",
        f"max_prompt_length {prompt} + max_new_tokens {answer} = {prompt + answer} tokens, more than"
        f" `runner.seq_length` {config.runner.seq_length}",
        f"`runner.seq_length` could be {prompt + answer}",
    )


def facts(config: MathConfig) -> dict[str, str | int | float | bool | None]:
    """Return what a run must agree in to continue from a checkpoint: whatever shapes the weights."""
    model = config.actor.model
    lora = model.adapter()
    return {
        "actor.model.model_path": model.model_path,
        "actor.model.hidden_dim": model.hidden_dim,
        "actor.model.num_layers": model.num_layers,
        "actor.model.lora.rank": lora.rank if lora else None,
    }


def inputs(config: MathConfig) -> list[Path]:
    """Return the files and folders that a run reads."""
    data, model = config.data, config.actor.model
    names = [*data.train_data_paths, *data.val_data_paths, *filter(None, [model.model_path])]
    return [Path(name) for name in names]
