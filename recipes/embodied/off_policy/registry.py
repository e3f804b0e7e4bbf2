"""The off-policy algorithms by `algorithm.loss_type`, and `algorithm.off_policy` with the keys of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pydantic import create_model

from recipes.embodied.off_policy.algorithm import OffPolicyAlgorithm
from recipes.embodied.off_policy.crossq import CrossQ, CrossQDsrl, CrossQTd3, CrossQTd3Bc
from recipes.embodied.off_policy.dsrl import Dsrl
from recipes.embodied.off_policy.iql import Iql
from recipes.embodied.off_policy.sac import Sac
from recipes.embodied.off_policy.settings import OffPolicySettings
from recipes.embodied.off_policy.td3 import Td3
from recipes.embodied.off_policy.td3_bc import Td3Bc

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedAlgorithmConfig

ALGORITHMS: Final[Mapping[str, type[OffPolicyAlgorithm[Any]]]] = {
    "sac": Sac,
    "td3": Td3,
    "td3_bc": Td3Bc,
    "iql": Iql,
    "dsrl": Dsrl,
}
# Those with `critic_norm: batch`.
WITH_JOINT_CRITICS: Final[Mapping[str, type[OffPolicyAlgorithm[Any]]]] = {
    "sac": CrossQ,
    "td3": CrossQTd3,
    "td3_bc": CrossQTd3Bc,
    "dsrl": CrossQDsrl,
}


def is_off_policy(loss_type: str) -> bool:
    """Return whether a value of `algorithm.loss_type` learns from a replay buffer."""
    return loss_type in ALGORITHMS


def algorithm_of(section: EmbodiedAlgorithmConfig) -> type[OffPolicyAlgorithm[Any]]:
    """Return the algorithm that the section `algorithm` names.

    Raises:
        KeyError: it learns on-policy.
    """
    plain = ALGORITHMS[section.loss_type]
    return WITH_JOINT_CRITICS.get(section.loss_type, plain) if section.off_policy.critic_norm == "batch" else plain


def owners(key: str) -> list[str]:
    """Return the values of `algorithm.loss_type` that have a key of `algorithm.off_policy`."""
    return [name for name, algorithm in ALGORITHMS.items() if key in algorithm.settings_model.model_fields]


def trainer_of(policy_type: str) -> str:
    """Return the first value of `algorithm.loss_type` that trains a policy of this kind."""
    return next(name for name, algorithm in ALGORITHMS.items() if algorithm.policy_type == policy_type)


def _settings_models() -> tuple[type[OffPolicySettings], ...]:
    """Return the settings models of all algorithms, each before those that it extends."""
    models = {algorithm.settings_model for algorithm in ALGORITHMS.values()}
    return tuple(sorted(models, key=lambda model: (-len(model.__mro__), model.__name__)))


if TYPE_CHECKING:
    OffPolicyConfig = OffPolicySettings
else:
    OffPolicyConfig = create_model(
        "OffPolicyConfig",
        __base__=_settings_models(),
        __module__=__name__,
        __doc__="The replay buffer, the critics and the pace of learning, with the keys of every algorithm.",
    )
    OffPolicyConfig.no_effect = tuple(rule for model in _settings_models() for rule in vars(model).get("no_effect", ()))
