"""The file of the math recipe: its sections, its defaults, and the rules between its values.

The defaults build a Qwen2 of 0.3 M parameters, show it sums for a second, and improve it by GRPO in about half a minute
on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from pydantic import Field

from recipes.language.config.engine_facts import BACKENDS
from recipes.language.config.language_config import AnswerActorConfig, LanguageConfig, LanguageRunnerConfig
from recipes.language.config.language_no_effect import DISTILS, LANGUAGE, distils
from recipes.language.config.problem_config import MathDataConfig, MathRewardConfig
from recipes.language.models.expert_sizes import expert_sizes
from recipes.language.rules.job_rules import check_job
from recipes.sections.checks import Report, WorldSizes, blame
from recipes.sections.model_folders import SETTINGS, read_object
from rlinf_core import IgnoredKeys
from rlinf_core.config.sections.values import StepsOrNever
from rlinf_core.scalars import Bool

COMPONENTS = ("actor", "rollout", "reward")
# Model types that choose experts without `torch.topk`, or twice in a layer.
NOT_REPLAYED: Final = frozenset(("beam", "flint", "jetmoe", "longcat_flash", "phimoe"))
_KEY: Final = ("actor", "router_replay")
_MODEL: Final = ("actor", "model", "model_path")


class MathRunnerConfig(LanguageRunnerConfig):
    """Settings of the run."""

    max_steps: StepsOrNever = 250


class MathActorConfig(AnswerActorConfig):
    """The workers that train."""

    # Not for agents, whose answers are put together from several requests.
    router_replay: Bool = Field(
        default=False,
        description="Mixture of experts: train each token with the experts that the engine chose for it (backend"
        " torch).",
    )

    @property
    def replays_routers(self) -> bool:
        """See `AnswerActorConfig`."""
        return self.router_replay


class MathConfig(LanguageConfig):
    """Configuration of the math recipe."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *LANGUAGE,
        IgnoredKeys(("reward.soft_overlong",), distils, DISTILS, because=("algorithm.adv_type",)),
    )

    runner: MathRunnerConfig = Field(
        default_factory=MathRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: MathActorConfig = Field(
        default_factory=MathActorConfig,
        description="The model that learns, its optimizer and its sharding.",
    )
    reward: MathRewardConfig = Field(default_factory=MathRewardConfig, description="How answers are scored.")
    data: MathDataConfig = Field(default_factory=MathDataConfig, description="The problems.")


def check(config: MathConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_job(config, COMPONENTS, world_sizes, report)
    check_router_replay(config, report)
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
        f"max_prompt_length {prompt} + max_new_tokens {answer} = {prompt + answer} tokens exceed `runner.seq_length`"
        f" {config.runner.seq_length}",
        f"raise `runner.seq_length` to {prompt + answer}",
    )


def check_router_replay(config: LanguageConfig, report: Report) -> None:
    """Report what the choices of experts cannot be replayed with."""
    if not config.actor.replays_routers:
        return
    remedy, folder = "write `router_replay: false`", config.actor.model.model_path
    backend = BACKENDS[config.rollout.backend].name
    if backend != "torch":
        report(
            blame(config, _KEY, ("rollout", "backend")),
            "conflicting-settings",
            f"engine `{backend}` does not report the experts that it chose",
            f"{remedy}, or `rollout.backend: torch`",
        )
    fault = "a model built from scratch has no experts" if folder is None else _fault(folder)
    if fault is not None:
        report(_KEY, "conflicting-settings", fault, remedy, about=[_MODEL])


def _fault(folder: str) -> str | None:
    """Return why the experts of the model in a folder cannot be replayed; None: nothing is known against it."""
    settings = read_object(Path(folder) / SETTINGS)
    return fault_of_replay(settings) if settings else None


def fault_of_replay(settings: Mapping[str, Any]) -> str | None:
    """Return why the choices of a model's routers cannot be replayed; None: nothing is known against it.

    Args:
        settings: config.json of its folder.
    """
    kind, text = settings.get("model_type"), settings.get("text_config")
    text = cast("Mapping[str, Any]", text) if isinstance(text, dict) else settings
    if kind in NOT_REPLAYED:
        return f"the choices of experts of models of type `{kind}` cannot be replayed"
    if text.get("topk_method") == "group_limited_greedy":
        return "experts that are chosen by groups (`topk_method: group_limited_greedy`) cannot be replayed"
    return None if expert_sizes(text) else f"the model, of type `{kind}`, has no experts"
