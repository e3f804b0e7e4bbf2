"""The section `algorithm` as a union: policy gradients, and every off-policy algorithm by its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, Union, cast

from recipes.embodied.config.algorithm_config import (
    ALGORITHMS,
    ActorCriticConfig,
    GroupConfig,
    LearningConfig,
    PolicyGradientConfig,
)
from recipes.embodied.config.off_policy_settings import OffPolicyMethod, OffPolicySettings, off_policy_of
from rlinf_core.registry import import_target

# Those with `critic_norm: batch`.
_WITH_JOINT_CRITICS: Final[Mapping[str, str]] = {
    "sac": "recipes.embodied.off_policy.crossq:CrossQ",
    "td3": "recipes.embodied.off_policy.crossq:CrossQTd3",
    "td3_bc": "recipes.embodied.off_policy.crossq:CrossQTd3Bc",
    "dsrl": "recipes.embodied.off_policy.crossq:CrossQDsrl",
}


def is_off_policy(loss_type: str) -> bool:
    """Return whether a value of `algorithm.loss_type` learns from a replay buffer."""
    return loss_type in ALGORITHMS


def method_of(section: LearningConfig) -> type[OffPolicyMethod]:
    """Return the algorithm that the section `algorithm` names.

    Raises:
        TypeError: it learns on-policy.
    """
    settings = off_policy_of(section)
    plain = ALGORITHMS[section.loss_type].target
    return _imported(_WITH_JOINT_CRITICS[section.loss_type] if settings.critic_norm == "batch" else plain)


def trainer_of(policy_type: str) -> str:
    """Return the first value of `algorithm.loss_type` that trains a policy of this kind."""
    return next(name for name, method in METHODS.items() if method.policy_type == policy_type)


def _imported(target: str) -> type[OffPolicyMethod]:
    return cast("type[OffPolicyMethod]", import_target(target, "off-policy algorithm"))


METHODS: Final = {name: _imported(algorithm.target) for name, algorithm in ALGORITHMS.items()}
if TYPE_CHECKING:
    Algorithm: TypeAlias = PolicyGradientConfig | OffPolicySettings
else:
    Algorithm = Union[(ActorCriticConfig, GroupConfig, *(method.settings_model for method in METHODS.values()))]
