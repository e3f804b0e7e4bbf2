"""The off-policy algorithms by `algorithm.loss_type`, and `algorithm.off_policy` with the keys of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import create_model

from recipes.embodied.config.off_policy_settings import OffPolicyMethod, OffPolicySettings
from rlinf_core.registry import import_target

# By name, as they compute with what the configuration describes.
ALGORITHMS: Final[Mapping[str, str]] = {
    "sac": "recipes.embodied.off_policy.sac:Sac",
    "td3": "recipes.embodied.off_policy.td3:Td3",
    "td3_bc": "recipes.embodied.off_policy.td3_bc:Td3Bc",
    "iql": "recipes.embodied.off_policy.iql:Iql",
    "dsrl": "recipes.embodied.off_policy.dsrl:Dsrl",
}
# Those with `critic_norm: batch`.
WITH_JOINT_CRITICS: Final[Mapping[str, str]] = {
    "sac": "recipes.embodied.off_policy.crossq:CrossQ",
    "td3": "recipes.embodied.off_policy.crossq:CrossQTd3",
    "td3_bc": "recipes.embodied.off_policy.crossq:CrossQTd3Bc",
    "dsrl": "recipes.embodied.off_policy.crossq:CrossQDsrl",
}


def is_off_policy(loss_type: str) -> bool:
    """Return whether a value of `algorithm.loss_type` learns from a replay buffer."""
    return loss_type in ALGORITHMS


def method_of(section: Any) -> type[OffPolicyMethod]:
    """Return the algorithm that the section `algorithm` names.

    Raises:
        KeyError: it learns on-policy.
    """
    plain = ALGORITHMS[section.loss_type]
    joint = section.off_policy.critic_norm == "batch"
    return _imported(WITH_JOINT_CRITICS.get(section.loss_type, plain) if joint else plain)


def owners(key: str) -> list[str]:
    """Return the values of `algorithm.loss_type` that have a key of `algorithm.off_policy`."""
    return [name for name in ALGORITHMS if key in METHODS[name].settings_model.model_fields]


def trainer_of(policy_type: str) -> str:
    """Return the first value of `algorithm.loss_type` that trains a policy of this kind."""
    return next(name for name, method in METHODS.items() if method.policy_type == policy_type)


def _imported(target: str) -> type[OffPolicyMethod]:
    return cast("type[OffPolicyMethod]", import_target(target, "off-policy algorithm"))


def _settings_models() -> tuple[type[OffPolicySettings], ...]:
    """Return the settings models of all algorithms, each before those that it extends."""
    models = {method.settings_model for method in METHODS.values()}
    return tuple(sorted(models, key=lambda model: (-len(model.__mro__), model.__name__)))


METHODS: Final = {name: _imported(target) for name, target in ALGORITHMS.items()}
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
