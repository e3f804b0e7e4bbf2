"""Keys of the embodied recipe that have no effect with, or without, an off-policy loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from recipes.embodied.config.off_policy_config import ALGORITHMS, OffPolicyConfig, is_off_policy, method_of, owners
from recipes.embodied.config.off_policy_settings import OffPolicyMethod
from rlinf_core import IgnoredKeys
from rlinf_core.config.model import WorldSizes

_AT: Final = "algorithm.off_policy"
_LOSS_TYPE: Final = ("algorithm.loss_type",)


def _learns_off_policy(config: Any, sizes: WorldSizes) -> bool:
    return is_off_policy(config.algorithm.loss_type)


def _loss_type(config: Any) -> str:
    return f"`loss_type: {config.algorithm.loss_type}` learns from single transitions, using action values"


def _where(holds: Callable[[type[OffPolicyMethod]], bool]) -> Callable[[Any, WorldSizes], bool]:
    """Return the condition that a file names an off-policy algorithm of which something holds."""
    return lambda config, sizes: _learns_off_policy(config, sizes) and holds(method_of(config.algorithm))


def _of_other_algorithms() -> tuple[IgnoredKeys, ...]:
    """Return a rule for each set of keys that some algorithms have and others lack."""
    keys: dict[tuple[str, ...], list[str]] = {}
    for key in OffPolicyConfig.model_fields:
        keys.setdefault(tuple(owners(key)), []).append(key)
    return tuple(
        IgnoredKeys(
            tuple(f"{_AT}.{key}" for key in shared),
            _where(lambda algorithm, key=shared[0]: key not in algorithm.settings_model.model_fields),
            lambda config, names=names: (
                f"it is a key of {' and '.join(f'`{name}`' for name in names)}, not of"
                f" `loss_type: {config.algorithm.loss_type}`"
            ),
            f"remove it, or write `loss_type: {names[0]}`",
            because=_LOSS_TYPE,
        )
        for names, shared in keys.items()
        if len(names) < len(ALGORITHMS)
    )


OFF_POLICY: Final = (
    IgnoredKeys(
        (_AT,),
        lambda config, sizes: not _learns_off_policy(config, sizes),
        lambda config: f"`loss_type: {config.algorithm.loss_type}` learns on-policy",
        "remove it, or write `loss_type: sac`",
        because=_LOSS_TYPE,
    ),
    IgnoredKeys(
        tuple(
            f"algorithm.{name}"
            for name in (
                *("adv_type", "gae_lambda", "normalize_advantages", "update_epoch", "loss_agg_func", "options"),
                *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_bonus", "value_clip", "huber_delta"),
                *("bootstrap_type", "reward_type", "logprob_type", "entropy_type", "filter_rewards", "bc_weight"),
                *("critic_warmup_steps", "value_weight", "target_kl", "normalize_rewards"),
            )
        ),
        _learns_off_policy,
        _loss_type,
        because=_LOSS_TYPE,
    ),
    IgnoredKeys(
        ("actor.model.add_value_head", "actor.micro_batch_size", "data.normalization", "data.only_interventions"),
        _learns_off_policy,
        _loss_type,
        because=_LOSS_TYPE,
    ),
    *_of_other_algorithms(),
    IgnoredKeys(
        (f"{_AT}.replay.demonstrations_share",),
        _where(lambda algorithm: algorithm.records_alone),
        lambda config: f"`loss_type: {config.algorithm.loss_type}` learns from demonstrations alone",
        because=_LOSS_TYPE,
    ),
    IgnoredKeys(
        (f"{_AT}.target_rate",),
        _where(lambda algorithm: not algorithm.uses_target_critics and not algorithm.uses_target_policy),
        "`critic_norm: batch` needs no target networks",
        because=(f"{_AT}.critic_norm",),
    ),
    IgnoredKeys(
        (f"{_AT}.replay.demonstrations_share",),
        lambda config, sizes: not config.data.train_data_paths,
        "there are no demonstrations",
        "remove it, or write `data.train_data_paths`",
        because=("data.train_data_paths",),
    ),
    IgnoredKeys(
        (f"{_AT}.replay.interventions_share",),
        lambda config, sizes: config.env.train.intervention.source == "none",
        "there are no interventions",
        "remove it, or name an `env.train.intervention.source`",
        because=("env.train.intervention.source",),
    ),
)
