"""Keys of the embodied recipes without effect in combination with others: tables of `EmbodiedConfig` and `SftConfig`.

Keys whose effect depends on their own section alone have their rules there.
"""

from __future__ import annotations

from typing import Any, Final

from recipes.embodied.config.algorithm_config import is_off_policy
from recipes.sections.actor import checkpoints_of, of_one_rank
from recipes.sections.algorithm import (
    ADVANTAGES,
    NOT_TRAINED,
    adv_type,
    compares_within_groups,
    discount_of_total_rewards,
)
from rlinf_core import IgnoredKeys
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import WorldSizes

_LOSS_TYPE: Final = ("algorithm.loss_type",)


def _learns_off_policy(config: Any, sizes: WorldSizes) -> bool:
    return is_off_policy(config.algorithm.loss_type)


OFF_POLICY: Final = (
    IgnoredKeys(
        ("actor.model.add_value_head", "actor.micro_batch_size", "data.normalization", "data.only_interventions"),
        _learns_off_policy,
        lambda config: f"`loss_type: {config.algorithm.loss_type}` learns from single transitions, using action values",
        because=_LOSS_TYPE,
    ),
)


# Policies that contain no transformers model.
SMALL_MODELS: Final = ("mlp_policy", "cnn_policy", "flow_policy", "squashed_policy", "steered_policy")
_OPENVLA: Final = ("openvla", "openvla_oft")
# The components that evaluate in recipe `sft`.
_EVALUATING: Final = ("rollout", "env")


def _is_small(config: Any, sizes: WorldSizes) -> bool:
    # A custom model receives all keys and may use any of them.
    return config.actor.model.model_type in SMALL_MODELS


def _never_evaluates(config: Any, sizes: WorldSizes) -> bool:
    return config.runner.val_check_interval == -1 and not config.runner.only_eval


def _has_no_evaluators(config: Any, sizes: WorldSizes) -> bool:
    return not all(name in config.cluster.component_placement for name in _EVALUATING)


def _is_lerobot(config: Any, sizes: WorldSizes) -> bool:
    return config.actor.model.model_type == "lerobot"


# Rules of both recipes for the sections that they share.
_OF_BOTH: Final = (
    IgnoredKeys(
        ("actor.fsdp_config.gradient_checkpointing",),
        _is_lerobot,
        "lerobot's policies are trained as they are",
        "remove it; `pi0`, `pi05` and `smolvla` take it, and `actor.model.trainable` freezes weights",
        because=("actor.model.model_type",),
        severity=Severity.ERROR,
    ),
    IgnoredKeys(
        ("actor.model.hidden_dim",),
        _is_lerobot,
        "lerobot's configuration has the sizes",
        "write them as `actor.model.options.config`, such as `{dim_model: 256}`",
        because=("actor.model.model_type",),
    ),
    IgnoredKeys(
        ("data.normalization",),
        lambda config, sizes: _is_lerobot(config, sizes) and config.data.normalization != "none",
        "lerobot's configuration says how states and actions are normalized",
        "remove it, or write `options.config: {normalization_mapping: {...}}`",
        because=("actor.model.model_type",),
    ),
    IgnoredKeys(
        ("actor.fsdp_config.gradient_checkpointing",),
        _is_small,
        "such a policy has two or three layers, so its activations are small",
        "remove it, or lower `actor.micro_batch_size`",
        because=("actor.model.model_type",),
        severity=Severity.ERROR,
    ),
    IgnoredKeys(
        ("actor.model.hidden_dim", "actor.model.options.num_layers", "actor.model.options.patch_size"),
        lambda config, sizes: config.actor.model.model_type in _OPENVLA and config.actor.model.model_path,
        "`model_path` names a model, which fixes the sizes",
        because=("actor.model.model_path",),
    ),
    of_one_rank("actor"),
    checkpoints_of("actor"),
)

EMBODIED: Final = (
    NOT_TRAINED,
    *OFF_POLICY,
    *_OF_BOTH,
    IgnoredKeys(
        ("env.eval",),
        _never_evaluates,
        "the run has no evaluations: `val_check_interval` is -1",
        "remove it, or write `runner.val_check_interval: 10`; `rlinf eval` reads it",
        because=("runner.val_check_interval",),
        severity=Severity.NOTE,
    ),
    IgnoredKeys(
        ("algorithm.options.gae_lambda",),
        lambda config, sizes: config.algorithm.adv_type in ADVANTAGES and config.algorithm.adv_type != "gae",
        lambda config: f"{adv_type(config)} uses no value estimates",
        "remove it, or write `adv_type: gae` and `loss_type: actor_critic`",
        because=("algorithm.adv_type",),
    ),
    discount_of_total_rewards(
        lambda config, sizes: (
            not _learns_off_policy(config, sizes)
            and compares_within_groups(config, sizes)
            and not config.actor.model.add_value_head
        )
    ),
    IgnoredKeys(
        ("algorithm.normalize_rewards",),
        lambda config, sizes: compares_within_groups(config, sizes),
        "scores are compared within a group, whatever their size",
        because=("algorithm.adv_type",),
    ),
    IgnoredKeys(
        ("algorithm.options.value_clip", "algorithm.options.value_weight", "actor.optim.value_lr"),
        lambda config, sizes: config.algorithm.loss_type == "actor" or not config.actor.model.add_value_head,
        "no values are trained",
        "remove it, or write `loss_type: actor_critic` and `adv_type: gae`",
        because=("algorithm.loss_type", "actor.model.add_value_head"),
    ),
    IgnoredKeys(
        ("algorithm.options.normalize_advantages",),
        compares_within_groups,
        lambda config: f"{adv_type(config)} compares samples within groups",
        "remove it; `adv_type: dr_grpo` does not divide by the standard deviation",
        because=("algorithm.adv_type",),
    ),
    IgnoredKeys(
        ("algorithm.target_kl",),
        lambda config, sizes: config.algorithm.update_epoch == 1,
        "a training step takes one pass over its samples, and this stops further ones",
        "remove it, or write `algorithm.update_epoch: 4`",
        because=("algorithm.update_epoch",),
    ),
    IgnoredKeys(
        ("data",),
        lambda config, sizes: not _learns_off_policy(config, sizes) and not config.algorithm.bc_weight,
        "`algorithm.bc_weight`, the weight of demonstrations, is 0",
        "remove it, or write `algorithm.bc_weight: 0.1`; recipe `sft` learns from demonstrations alone",
        because=("algorithm.bc_weight",),
    ),
)

SFT: Final = (
    *_OF_BOTH,
    IgnoredKeys(
        ("runner.val_check_interval", "runner.val_before_train"),
        _has_no_evaluators,
        "nothing is evaluated: `rollout` and `env` have no placement",
        "remove it, or place `actor,rollout,env: 0`",
        because=("cluster.component_placement",),
    ),
    IgnoredKeys(
        ("env", "rollout"),
        lambda config, sizes: _has_no_evaluators(config, sizes) or _never_evaluates(config, sizes),
        lambda config: (
            "nothing is evaluated: `rollout` and `env` have no placement"
            if _has_no_evaluators(config, {})
            else "the run has no evaluations: `val_check_interval` is -1"
        ),
        "remove it; `rlinf eval` and `rlinf record` read it",
        because=("runner.val_check_interval",),
        severity=Severity.NOTE,
    ),
)
