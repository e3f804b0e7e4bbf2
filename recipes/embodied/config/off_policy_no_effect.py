"""Keys of the embodied recipe that have no effect with, or without, `loss_type: sac` and `td3`."""

from __future__ import annotations

from typing import Any, Final

from recipes.embodied.config.off_policy_config import (
    CLONING_LOSS,
    DETERMINISTIC_LOSSES,
    ENTROPY_LOSSES,
    IMPLICIT_LOSS,
    NOISE_LOSS,
    RECORDED_LOSSES,
    is_off_policy,
)
from rlinf_core import IgnoredKeys
from rlinf_core.config.model import WorldSizes


def _learns_off_policy(config: Any, sizes: WorldSizes) -> bool:
    return is_off_policy(config.algorithm.loss_type)


def _loss_type(config: Any) -> str:
    return f"`loss_type: {config.algorithm.loss_type}` learns from single transitions, using action values"


OFF_POLICY: Final = (
    IgnoredKeys(
        ("algorithm.off_policy",),
        lambda config, sizes: not _learns_off_policy(config, sizes),
        lambda config: f"`loss_type: {config.algorithm.loss_type}` learns on-policy",
        "remove it, or write `loss_type: sac`",
        because=("algorithm.loss_type",),
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
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("actor.model.add_value_head", "actor.micro_batch_size", "data.normalization", "data.only_interventions"),
        _learns_off_policy,
        _loss_type,
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        tuple(
            f"algorithm.off_policy.{name}"
            for name in ("temperature", "learn_temperature", "target_entropy", "entropy_in_target", "policy_values")
        ),
        lambda config, sizes: config.algorithm.loss_type not in ENTROPY_LOSSES,
        lambda config: f"entropy has no weight in `loss_type: {config.algorithm.loss_type}`",
        "remove it, or write `loss_type: sac`",
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.target_noise", "algorithm.off_policy.target_noise_clip"),
        lambda config, sizes: config.algorithm.loss_type not in DETERMINISTIC_LOSSES,
        lambda config: f"targets of `loss_type: {config.algorithm.loss_type}` have no noise of this kind",
        "remove it, or write `loss_type: td3`",
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.cloning_scale",),
        lambda config, sizes: config.algorithm.loss_type != CLONING_LOSS,
        lambda config: f"`loss_type: {config.algorithm.loss_type}` does not imitate recorded actions",
        "remove it, or write `loss_type: td3_bc`",
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.expectile", "algorithm.off_policy.advantage_scale"),
        lambda config, sizes: config.algorithm.loss_type != IMPLICIT_LOSS,
        lambda config: f"`loss_type: {config.algorithm.loss_type}` does not weigh recorded actions",
        f"remove it, or write `loss_type: {IMPLICIT_LOSS}`",
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.noise_aliasing",),
        lambda config, sizes: config.algorithm.loss_type != NOISE_LOSS,
        lambda config: f"`loss_type: {config.algorithm.loss_type}` chooses actions, and no noise",
        f"remove it, or write `loss_type: {NOISE_LOSS}`",
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.critics_in_target",),
        lambda config, sizes: config.algorithm.loss_type == IMPLICIT_LOSS,
        f"targets of `loss_type: {IMPLICIT_LOSS}` are values of states",
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.replay.demonstrations_share",),
        lambda config, sizes: config.algorithm.loss_type in RECORDED_LOSSES,
        lambda config: f"`loss_type: {config.algorithm.loss_type}` learns from demonstrations alone",
        because=("algorithm.loss_type",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.target_entropy",),
        lambda config, sizes: not config.algorithm.off_policy.learn_temperature,
        "the entropy weight is fixed: `learn_temperature` is false",
        because=("algorithm.off_policy.learn_temperature",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.target_rate",),
        lambda config, sizes: (
            config.algorithm.off_policy.critic_norm == "batch" and config.algorithm.loss_type in ENTROPY_LOSSES
        ),
        "`critic_norm: batch` needs no target networks",
        because=("algorithm.off_policy.critic_norm",),
    ),
    IgnoredKeys(
        ("algorithm.off_policy.replay.demonstrations_share",),
        lambda config, sizes: not config.data.train_data_paths,
        "there are no demonstrations",
        "remove it, or write `data.train_data_paths`",
        because=("data.train_data_paths",),
    ),
    IgnoredKeys(
        tuple(f"algorithm.off_policy.replay.interventions_{name}" for name in ("share", "capacity")),
        lambda config, sizes: config.env.train.intervention.source == "none",
        "there are no interventions",
        "remove it, or name an `env.train.intervention.source`",
        because=("env.train.intervention.source",),
    ),
)
