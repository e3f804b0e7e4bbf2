"""The keys of language recipes that have no effect in combination with others: the table of `LanguageConfig`.

Rules that concern a single section are in that section's class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from recipes.sections.actor import checkpoints_of, of_one_rank, without_shards
from recipes.sections.algorithm import NOT_TRAINED, adv_type
from rlinf_core import IgnoredKeys
from rlinf_core.config.model import WorldSizes


@dataclass(frozen=True, slots=True)
class OptionalComponent:
    """A component that is placed only if a value of the configuration asks for it.

    Attributes:
        does: the component's purpose, for messages.
        unneeded: returns why a configuration does not use the component; "" if it does.
        needed: returns whether a configuration cannot run without the component.
        key: section, key and value that ask for the component.
        also: the end of the advice: what else is needed, or an alternative.
    """

    does: str
    unneeded: Callable[[Any], str]
    needed: Callable[[Any], bool]
    key: tuple[str, str, str]
    also: str

    @property
    def setting(self) -> str:
        """The setting that asks for the component, as written in YAML."""
        return f"{self.key[0]}.{self.key[1]}: {self.key[2]}"


OPTIONAL: Final = {
    "critic": OptionalComponent(
        "which estimates values",
        lambda config: "" if config.algorithm.wants_values else f"{adv_type(config)} uses no value estimates",
        lambda config: config.algorithm.needs_values,
        ("algorithm", "adv_type", "gae"),
        ", or write `adv_type: grpo`",
    ),
    "reference": OptionalComponent(
        "which gives the log-probabilities of a reference model",
        lambda config: "" if config.algorithm.kl_beta else "`algorithm.kl_beta` is 0",
        lambda config: bool(config.algorithm.kl_beta) and config.actor.model.adapter() is None,
        ("algorithm", "kl_beta", "0.001"),
        "; with `actor.model.lora`, the actor without its adapters is the reference",
    ),
    "teacher": OptionalComponent(
        "which gives the log-probabilities of a teacher",
        lambda config: "" if config.algorithm.needs_teacher else f"{adv_type(config)} asks no teacher",
        lambda config: config.algorithm.needs_teacher,
        ("algorithm", "adv_type", "distillation"),
        ", and write `teacher.model_path: FOLDER`",
    ),
    "judge": OptionalComponent(
        "whose model judges answers",
        lambda config: "" if config.reward.asks_judge else f"`reward_type: {config.reward.reward_type}` asks no judge",
        lambda config: config.reward.asks_judge,
        ("reward", "reward_type", "judge"),
        ", and write `judge.model_path: FOLDER`",
    ),
}


def _read_by(component: str, *keys: str) -> IgnoredKeys:
    """Return the rule for keys that only an optional component reads."""
    optional = OPTIONAL[component]
    return IgnoredKeys(
        keys,
        lambda config, sizes: component not in config.cluster.component_placement or bool(optional.unneeded(config)),
        lambda config: optional.unneeded(config) or f"the group `{component}`, {optional.does}, has no placement",
        f"remove it, or write `{optional.setting}` and `{component}: 0` in `cluster.component_placement`",
        because=(".".join(optional.key[:2]),),
    )


def distils(config: Any, sizes: WorldSizes) -> bool:
    """Return whether a teacher is the only learning signal."""
    return config.algorithm.needs_teacher


def _builds_no_model(config: Any, sizes: WorldSizes) -> bool:
    return config.actor.model.model_path is not None


def has_no_end(component: str) -> IgnoredKeys:
    """Return the rule for a decaying learning rate in a run without a last step."""

    def when(config: Any, sizes: WorldSizes) -> bool:
        optim = getattr(config, component).optim
        return optim.lr_scheduler != "constant" and (optim.total_training_steps or config.runner.last_step) is None

    return IgnoredKeys(
        (f"{component}.optim.lr_scheduler", f"{component}.optim.min_lr_ratio"),
        when,
        "a learning rate decays until the last step, and this run has no last step",
        f"write `runner.max_steps`, `runner.max_epochs` or `{component}.optim.total_training_steps`",
        because=("runner.max_steps", "runner.max_epochs"),
    )


def keeps_masters(model: Any) -> bool:
    """Return whether layers compute with low-precision copies of the weights, which needs FSDP2 even on one rank."""
    return model.precision != "fp32"


DISTILS: Final = "`adv_type: distillation` learns from the teacher, token by token, and from no reward"
LANGUAGE: Final = (
    NOT_TRAINED,
    _read_by("critic", "critic"),
    _read_by("reference", "reference"),
    _read_by("teacher", "teacher"),
    _read_by("judge", "judge"),
    has_no_end("actor"),
    IgnoredKeys(
        ("actor.warm_start",),
        _builds_no_model,
        "only a model built from scratch gets a supervised warm start, and `model_path` names one",
        because=("actor.model.model_path",),
    ),
    IgnoredKeys(
        ("runner.partial_rollout",),
        lambda config, sizes: not config.runner.max_staleness,
        "`max_staleness` is 0: no answer is in progress when weights change",
        "remove it, or write `runner.max_staleness: 1`",
        because=("runner.max_staleness",),
    ),
    IgnoredKeys(
        ("rollout.sampling_params.top_k", "rollout.sampling_params.top_p"),
        lambda config, sizes: config.rollout.sampling_params.temperature == 0,
        "`temperature: 0` samples greedily",
        because=("rollout.sampling_params.temperature",),
    ),
    IgnoredKeys(
        ("data.val_samples",),
        lambda config, sizes: config.runner.val_check_interval == -1 and not config.runner.only_eval,
        "the run has no evaluations: `val_check_interval` is -1",
        "remove it, or write `runner.val_check_interval: 10`",
        because=("runner.val_check_interval",),
    ),
    of_one_rank("actor", "critic", "reference", reads=lambda config: keeps_masters(config.actor.model)),
    without_shards("actor", lambda config: keeps_masters(config.actor.model)),
    checkpoints_of("actor"),
)
