"""The configuration of recipe `math`: its sections, defaults and validation rules.

The defaults build a Qwen2 of 0.3 M parameters, show it sums for a second, and improve it by GRPO in about half a minute
on two CPU cores.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from recipes.language.config.language_config import LanguageConfig, LanguageRunnerConfig
from recipes.language.config.language_no_effect import DISTILS, LANGUAGE, distils
from recipes.language.config.problem_config import MathDataConfig, MathRewardConfig
from recipes.language.rules.job_rules import check_job, check_lengths
from recipes.language.rules.problem_rules import check_rewards
from recipes.sections.checks import Report, WorldSizes
from rlinf_core import IgnoredKeys
from rlinf_core.config.sections.values import StepsOrNever

COMPONENTS = ("actor", "rollout", "reward")


class MathRunnerConfig(LanguageRunnerConfig):
    """Settings of the run."""

    max_steps: StepsOrNever = 250


class MathConfig(LanguageConfig):
    """Configuration of the math recipe."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *LANGUAGE,
        IgnoredKeys(("reward.soft_overlong",), distils, DISTILS, because=("algorithm.adv_type",)),
    )

    runner: MathRunnerConfig = Field(
        default_factory=MathRunnerConfig, description="Run length, what is saved, and where results go."
    )
    reward: MathRewardConfig = Field(default_factory=MathRewardConfig, description="How answers are scored.")
    data: MathDataConfig = Field(default_factory=MathDataConfig, description="The problems.")


def check(config: MathConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_job(config, COMPONENTS, world_sizes, report)
    check_lengths(config, report, "`runner.seq_length`")
    check_rewards(config, report)
